// Gradients of parameters: each is factor^T x columns, a gemm_tn over an expert's rows. A task makes a rectangle of one:
//
//   for each chunk of the expert's rows        its columns of x, of h or of a gradient, packed
//     for each group of the rectangle's rows   their factors transposed; gemm_tn
//
// Where there are several chunks their products are summed in fp32, in the scratch, and rounded once. Chunks have a fixed
// length: a task's memory has a bound, and neither threads nor caches change a bit.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "amx_sft_moe/gemm/forms.hpp"
#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/moe/step.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

// Rows and columns of a gradient, as the C of its gemm_tn has them.
struct GradientRectangle {
  AnyMatrix grad;
  index_t row, rows, col, cols;
};

// Rows [first, first + count) of an expert, and where what they give goes: to the rectangle, or, of several chunks, to
// fp32 sums, which the next chunk and the rounding read.
struct GradientChunk {
  index_t first, count;
  GradientRectangle to;
  GradientMode mode;
  bool read_soon;
};

// The rectangle's elements from [row, col] of it on, in the memory of its gradient.
template <class T>
arch::BlockTarget<T> target_of(const GradientRectangle& to, T* grad, index_t row, index_t col,
                               const GradientMode& mode) {
  const index_t row_stride = to.grad.row_stride(), col_stride = to.grad.col_stride();
  T* first = grad + (to.row + row) * row_stride + (to.col + col) * col_stride;
  return {first, row_stride, col_stride, mode.accumulate, mode.scale, nullptr};
}

// Stores a block of C, whose first row and column are those of the rectangle.
template <class Kernel>
void store_gradient(const gemm::Block& block, const GradientRectangle& to, const GradientMode& mode) {
  to.grad.visit([&](auto* data) {
    Kernel::Rows::store(block.c, block.stride, block.rows, block.cols,
                        target_of(to, data, block.row, block.col, mode));
  });
}

// Calls product(GradientChunk) for all `tokens` rows of an expert; the rectangle is the sum of what these give.
template <class Kernel, class Product>
void in_chunks(Worker<Kernel>& worker, index_t tokens, const GradientRectangle& to, const GradientMode& mode,
               Product&& product) {
  constexpr index_t kChunk = gemm::Blocking::kGradTokens;
  if (tokens <= kChunk) return product(GradientChunk{0, tokens, to, mode, false});
  const index_t stride = spread_row_stride<float>(to.cols);
  float* sum = worker.gemm.scratch.sums.template as<float>(to.rows * stride);
  const GradientRectangle sums{{sum, to.rows, to.cols, stride}, 0, to.rows, 0, to.cols};
  for (index_t first = 0; first < tokens; first += kChunk) {
    product(GradientChunk{first, std::min(kChunk, tokens - first), sums, {first > 0, 1.0F}, true});
  }
  store_gradient<Kernel>({0, to.rows, 0, to.cols, sum, stride}, to, mode);
}

// The factor of the chunk's tokens, for C's rows from `row` on.
inline gemm::Factor factor_of(const gemm::Factor& factor, const GradientChunk& chunk, index_t row) {
  return {factor.rows.from(chunk.first, row),
          factor.weights == nullptr ? nullptr : factor.weights + chunk.first};
}

// The chunk's part of a rectangle = sum of factors^T x columns.
template <class Kernel, std::size_t Factors>
void multiply_chunk(Worker<Kernel>& worker, const std::array<gemm::Factor, Factors>& factors,
                    const gemm::TokenRows<Kernel>& columns, const GradientChunk& chunk) {
  for (index_t row = 0; row < chunk.to.rows; row += gemm::Blocking::kGradRows) {
    std::array<gemm::Factor, Factors> here;
    for (std::size_t f = 0; f < Factors; ++f) here[f] = factor_of(factors[f], chunk, row);
    const index_t rows = std::min(gemm::Blocking::kGradRows, chunk.to.rows - row);
    gemm::gemm_tn<Kernel>(worker.gemm, rows, here, columns, [&](gemm::Block block) {
      block.row += row;
      store_gradient<Kernel>(block, chunk.to, chunk.mode);
    });
  }
}

// A task's columns for several gradients, made one after the other: packed when a chunk's are asked for, and where there is
// one chunk, only once. columns(first, count) gives those of the expert's rows.
template <class Kernel, class Columns>
class ChunkColumns {
 public:
  ChunkColumns(Worker<Kernel>& worker, index_t cols, Columns columns)
      : worker_(worker), cols_(cols), columns_(std::move(columns)) {}

  const gemm::TokenRows<Kernel>& of(const GradientChunk& chunk) {
    if (chunk.first != first_) {
      packed_ = gemm::pack_tokens<Kernel>(worker_.gemm, columns_(chunk.first, chunk.count), chunk.count, cols_);
      first_ = chunk.first;
    }
    return packed_;
  }

 private:
  Worker<Kernel>& worker_;
  index_t cols_;
  Columns columns_;
  gemm::TokenRows<Kernel> packed_;
  index_t first_ = -1;
};

// A rectangle = sum of factors^T x columns over all `tokens` rows of an expert. Nothing where no gradient is wanted.
template <class Kernel, std::size_t Factors, class Columns>
void gradient_of_tokens(Worker<Kernel>& worker, index_t tokens,
                        const std::array<gemm::Factor, Factors>& factors,
                        ChunkColumns<Kernel, Columns>& columns, const GradientRectangle& to,
                        const GradientMode& mode) {
  if (to.grad.empty()) return;
  in_chunks(worker, tokens, to, mode,
            [&](const GradientChunk& chunk) { multiply_chunk(worker, factors, columns.of(chunk), chunk); });
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
