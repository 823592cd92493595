#include "transpose.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "amx_sft_moe/parallel/tasks.hpp"

namespace amx_sft_moe::python {
namespace {

// A square whose rows are one cache line: each line of source and target is touched once.
template <class T>
inline constexpr index_t kSide = index_t{kCacheLine} / index_t{sizeof(T)};
// Rows and columns of a task: source and target of it stay in L2.
constexpr index_t kTaskSide = 256;

template <class T>
struct Matrix {
  T* data;
  index_t rows, cols, stride;
};

// A square from `from` on; its sides are constants, so that the compiler moves lines in vectors.
template <class T>
void transpose_square(const T* from, index_t from_stride, T* to, index_t to_stride) {
  constexpr auto kSize = static_cast<std::size_t>(kSide<T>);
  std::array<std::array<T, kSize>, kSize> square;
  for (std::size_t i = 0; i < kSize; ++i) {
    std::memcpy(square[i].data(), from + static_cast<index_t>(i) * from_stride, sizeof(square[i]));
  }
  for (std::size_t j = 0; j < kSize; ++j) {
    std::array<T, kSize> line;
    for (std::size_t i = 0; i < kSize; ++i) line[i] = square[i][j];
    std::memcpy(to + static_cast<index_t>(j) * to_stride, line.data(), sizeof(line));
  }
}

// What is left of a square at an edge.
template <class T>
void transpose_rest(const T* from, index_t from_stride, T* to, index_t to_stride, index_t rows, index_t cols) {
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < cols; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

template <class T>
void transpose_typed(const Matrix<const T>& source, const Matrix<T>& target, int threads) {
  const index_t across = ceil_div(source.cols, kTaskSide);
  const index_t tasks = ceil_div(source.rows, kTaskSide) * across;
  parallel::run_tasks(threads, tasks, [&](int) {
    return [&](index_t task) {
      const index_t row_begin = task / across * kTaskSide;
      const index_t col_begin = task % across * kTaskSide;
      const index_t row_end = std::min(row_begin + kTaskSide, source.rows);
      const index_t col_end = std::min(col_begin + kTaskSide, source.cols);
      for (index_t col = col_begin; col < col_end; col += kSide<T>) {
        for (index_t row = row_begin; row < row_end; row += kSide<T>) {
          const T* from = source.data + row * source.stride + col;
          T* to = target.data + col * target.stride + row;
          const index_t rows = std::min(kSide<T>, row_end - row);
          const index_t cols = std::min(kSide<T>, col_end - col);
          if (rows == kSide<T> && cols == kSide<T>) {
            transpose_square(from, source.stride, to, target.stride);
          } else {
            transpose_rest(from, source.stride, to, target.stride, rows, cols);
          }
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
