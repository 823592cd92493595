// gemm_tn at full width, a base weight's gradient [out, in] = grad^T x, for kernels of strips. It is as large as the weight,
// and of few tokens it takes as long to write as to compute: so its elements go from registers to where they belong,
//
//   strips of x, one behind the other, made once
//   for each block of the gradient's rows        their factor, transposed
//     for each few rows of it (a register tile)
//       for each strip                           products of all tokens, written at once
//
// An element is the same chain of products along the tokens as in gemm/forms.hpp: the same bits.
#pragma once

#include <algorithm>

#include "amx_sft_moe/gemm/forms.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// B [tokens, cols] as strips of what the kernel computes with; zeros behind the last token up to a whole pair of bf16.
template <class Kernel>
struct TokenStrips {
  const typename Kernel::Compute* data = nullptr;
  index_t tokens = 0, depth = 0, cols = 0;

  const typename Kernel::Compute* from_column(index_t col) const { return data + col * depth; }
};

// Some rows of B at a time, an even number for pairs, so that these are read along: strip by strip it would be 128 bytes of
// each (benchmarks/LOG.md, "Gradients from registers").
template <MultipliesStrips Kernel>
TokenStrips<Kernel> strips_of_tokens(Scratch& scratch, const AnyRows& b, index_t tokens, index_t cols) {
  using E = typename Kernel::Compute;
  using Micro = typename Kernel::Microkernel;
  constexpr index_t kTogether = arch::kStripRowsTogether, kCols = Micro::kCols;
  static_assert(Micro::kBlock == kCols);  // a strip is one block of those that multiply() meets
  const index_t depth = round_up(tokens, arch::kPairing<E>);
  E* strips = scratch.b_panels.template as<E>(depth * round_up(cols, arch::kStripCols));
  with_adjacent_rows<Kernel>(scratch, b, tokens, cols, [&](const auto& source) {
    for (index_t t = 0; t < tokens; t += kTogether) {
      const auto rows = source.from_row(t);
      for (index_t col = 0; col < cols; col += kCols) {
        Micro::strip_of_rows(rows.from_column(col), std::min(kTogether, tokens - t),
                             std::min(kCols, cols - col), strips + col * depth + t * kCols);
      }
    }
  });
  return {strips, tokens, depth, cols};
}

// Columns of C from `first` on, strip by strip, by way of sums in the scratch: what is no whole strip, or not written in rows.
template <class Kernel, class T>
void finish_by_sums(Scratch& scratch, const arch::RowSource<typename Kernel::Compute>& a, index_t rows,
                    const TokenStrips<Kernel>& b, index_t first, arch::BlockTarget<T> to) {
  if (first == b.cols) return;
  const index_t stride = strips_stride(arch::kStripCols);
  float* c = scratch.c_blocks.template as<float>(rows * stride);
  T* const data = to.data;
  for (index_t col = first; col < b.cols; col += arch::kStripCols) {
    const index_t cols = std::min(arch::kStripCols, b.cols - col);
    Kernel::Microkernel::multiply(a.data, a.row_stride, rows, b.from_column(col), b.depth, cols,
                                  {c, stride, true}, arch::PacedPrefetch(arch::BytesAhead{}));
    to.data = data + col * to.col_stride;
    Kernel::Rows::store(c, stride, rows, cols, to);
  }
}

// `to` [rows, b.cols] = factor^T x B. read_soon: by whoever wrote it, so that it is left in the caches.
template <MultipliesStrips Kernel, class T>
void gemm_tn_finished(Scratch& scratch, index_t rows, const Factor& factor, const TokenStrips<Kernel>& b,
                      bool read_soon, const arch::BlockTarget<T>& to) {
  using E = typename Kernel::Compute;
  using Micro = typename Kernel::Microkernel;
  E* transposed = scratch.a_transposed.template as<E>(b.depth * rows);
  factor.rows.visit([&](const auto& source) {
    Kernel::Rows::template stage_transposed<E>(source, rows, b.tokens, b.depth, factor.weights, transposed,
                                               b.depth);
  });
  const arch::RowSource<E> a{transposed, b.depth, 1, nullptr};
  if (to.col_stride != 1) return finish_by_sums(scratch, a, rows, b, 0, to);
  const index_t whole = b.cols / arch::kStripCols * arch::kStripCols;
  const bool past_caches = !read_soon && !to.accumulate && Micro::whole_lines(to.data, to.row_stride);
  Micro::finish(a.data, a.row_stride, rows, b.data, b.depth, whole,
                arch::FinishedRows<T>{to.data, to.row_stride, to.accumulate, to.scale, past_caches});
  finish_by_sums(scratch, a, rows, b, whole, to);
}

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
