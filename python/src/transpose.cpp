#include "transpose.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "amx_sft_moe/parallel/tasks.hpp"

namespace amx_sft_moe::python {
namespace {

// A square whose rows are as long as a cache line: where rows begin with lines, each is read and written once.
template <class T>
inline constexpr index_t kSide = index_t{kCacheLine} / index_t{sizeof(T)};
// Rows and columns of a task: 256 KiB of fp32 that are read and as many that are written.
constexpr index_t kTaskSide = 256;

template <class T>
struct Matrix {
  T* data;
  index_t rows, cols, stride;
};

// kSide rows of `cols` from `from` on, by way of a square in L1: what lies far apart is moved in whole lines.
template <class T>
inline void transpose_lines(const T* from, index_t from_stride, T* to, index_t to_stride, std::size_t cols) {
  constexpr auto kSize = static_cast<std::size_t>(kSide<T>);
  std::array<std::array<T, kSize>, kSize> square;
  for (std::size_t i = 0; i < kSize; ++i) {
    std::memcpy(square[i].data(), from + static_cast<index_t>(i) * from_stride, cols * sizeof(T));
  }
  for (std::size_t j = 0; j < cols; ++j) {
    std::array<T, kSize> line;
    for (std::size_t i = 0; i < kSize; ++i) line[i] = square[i][j];
    std::memcpy(to + static_cast<index_t>(j) * to_stride, line.data(), sizeof(line));
  }
}

// At most a square, element by element.
template <class T>
void transpose_elements(const T* from, index_t from_stride, T* to, index_t to_stride, index_t rows,
                        index_t cols) {
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < cols; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

template <class T>
void transpose_square(const T* from, index_t from_stride, T* to, index_t to_stride, index_t rows,
                      index_t cols) {
  if (rows == kSide<T> && cols == kSide<T>) {  // a constant, so that the compiler moves lines in vectors
    transpose_lines(from, from_stride, to, to_stride, static_cast<std::size_t>(kSide<T>));
  } else if (rows == kSide<T> && 4 * cols > kSide<T>) {
    transpose_lines(from, from_stride, to, to_stride, static_cast<std::size_t>(cols));
  } else {
    transpose_elements(from, from_stride, to, to_stride, rows, cols);
  }
}

template <class T>
void transpose_typed(const Matrix<const T>& source, const Matrix<T>& target, int threads) {
  const index_t across = ceil_div(source.cols, kTaskSide);
  const index_t tasks = ceil_div(source.rows, kTaskSide) * across;
  parallel::run_tasks(tasks > 1 ? threads : 1, tasks, [&](int) {
    return [&](index_t task) {
      const index_t row_begin = task / across * kTaskSide;
      const index_t col_begin = task % across * kTaskSide;
      const index_t row_end = std::min(row_begin + kTaskSide, source.rows);
      const index_t col_end = std::min(col_begin + kTaskSide, source.cols);
      for (index_t col = col_begin; col < col_end; col += kSide<T>) {
        for (index_t row = row_begin; row < row_end; row += kSide<T>) {
          const T* from = source.data + row * source.stride + col;
          T* to = target.data + col * target.stride + row;
          transpose_square(from, source.stride, to, target.stride, std::min(kSide<T>, row_end - row),
                           std::min(kSide<T>, col_end - col));
        }
      }
    };
  });
}

}  // namespace

void transpose(const Tensor& source, const Tensor& target, int threads) {
  const AnyConstMatrix from = input_matrix(source, "source", kAnyExtent, kAnyExtent);
  const AnyMatrix to = output_matrix(target, "target", source.shape[1], source.shape[0]);
  require_element(target, "target", source.dtype());
  if (source.elements() == 0) return;
  const py::gil_scoped_release released;
  from.visit([&](const auto* data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    transpose_typed<T>({data, source.shape[0], source.shape[1], from.row_stride()},
                       {static_cast<T*>(target.data), target.shape[0], target.shape[1], to.row_stride()},
                       threads);
  });
}

}  // namespace amx_sft_moe::python
