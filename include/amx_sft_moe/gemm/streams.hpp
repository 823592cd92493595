// What kernels of tiles do with tokens whose x stays in L2, all of it or that of parts of K; few of them wait for the weights.
// 16 rows of a weight that meet tokens together are as far apart as they can be, and the next 16 are the rows below them. Of
// n = 16 P + rest rows, P odd, these are the rows t, t + P, ..., t + 15 P for t = 0 to P - 1, then the rest as they follow one
// another. Memory sees sixteen streams that go on from row to row, which hardware follows, however short the rows are; of
// neighbouring rows it has to find each anew (benchmarks/LOG.md, "Streams").
//
//   gemm_nt   the rows are outputs: tiles of C are stored as far apart, and C is finished when it is whole; the same bits
//   gemm_nn   the rows are steps along K, of up to 32 tokens, and are multiplied as they lie (arch/amx/few_rows.hpp)
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "amx_sft_moe/gemm/blocks.hpp"
#include "amx_sft_moe/gemm/strips.hpp"
#include "amx_sft_moe/gemm/thread_context.hpp"
#include "amx_sft_moe/gemm/tokens.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// Rows of a tile: the first, how far apart, how many.
struct StreamTile {
  index_t row, apart, rows;
};

// f(StreamTile) for tiles that take each of n rows once.
template <class F>
void for_each_stream_tile(index_t n, F&& f) {
  const index_t apart = arch::rows_of_stream(n);
  for (index_t row = 0; row < apart; ++row) f(StreamTile{row, apart, arch::kStreams});
  for (index_t row = apart * arch::kStreams; row < n; row += arch::kStreams) {
    f(StreamTile{row, 1, std::min(arch::kStreams, n - row)});
  }
}

// All terms of gemm_nt over the rows [0, out) of its weights, of which tiles are multiplied one at a time.
template <class Kernel, std::size_t Outputs>
class StreamedRows {
  using Micro = typename Kernel::Microkernel;
  using E = typename Kernel::Compute;

 public:
  StreamedRows(Scratch& scratch, index_t out, const std::array<std::span<const Term<E>>, Outputs>& outputs) {
    RowGroup<Kernel, Micro> group(scratch, Micro::kKUnit);
    group.reserve(outputs, out);
    for (std::size_t o = 0; o < Outputs; ++o) {
      all_[o].k_tile = Micro::kKUnit;
      for (const Term<E>& term : outputs[o]) group.append(term, 0, out, out, all_[o]);
    }
    tile_ = all_;
  }

  bool are_long() const { return all_[0].at[0].k >= arch::kLongRow; }

  // The tile that is multiplied from now on; its first token is the next.
  void begin(const StreamTile& tile) {
    next_ = tile.row + 1 < tile.apart ? StreamTile{tile.row + 1, tile.apart, tile.rows} : StreamTile{};
    for (std::size_t o = 0; o < Outputs; ++o) {
      for (int s = 0; s < all_[o].count; ++s) {
        const arch::Segment<E>& from = all_[o].at[s];
        arch::Segment<E>& to = tile_[o].at[s];
        to.a = from.a + tile.row * from.a_stride;
        to.a_stride = tile.apart * from.a_stride;
        to.b = from.b;
      }
    }
  }
  // While output o of the tile is multiplied from now on, memory is asked for the rows [first, last) of the next one.
  void ask_for(std::size_t o, index_t first, index_t last) {
    const arch::Segment<E>& from = all_[o].at[0];
    const index_t rows = std::min(last, next_.rows) - first;
    tile_[o].ahead = {from.a + (next_.row + first * next_.apart) * from.a_stride, next_.apart * from.a_stride,
                      rows};
  }
  // The tile's next `cols` tokens of output o.
  void multiply(typename Kernel::Session& session, std::size_t o, index_t rows, index_t cols,
                const arch::SumRows& c) {
    Micro::block(session, Micro::kRow, tile_[o], rows, cols, c);
    tile_[o].skip_columns(cols);
  }

 private:
  std::array<arch::Segments<E>, Outputs> all_, tile_;
  StreamTile next_{};  // of no rows: there is none
};

// Whether tiles of rows meet tokens in streams: where x of K stays in L2 meanwhile, LoRA's u beside it, or that of parts of K.
template <class E>
bool in_streams(index_t k, index_t tokens) {
  return k * tokens * index_t{sizeof(E)} <= arch::kStreamedBytes || arch::streamed_depth<E>(k, tokens) < k;
}

// f(terms, whether they are the first) for parts of K, one or more, whose x of so many tokens stays in L2. Each output's first
// term is cut, all of the same K; what is behind it, LoRA's, goes with its last part.
template <class Kernel, std::size_t Outputs, class F>
void for_each_part_of_k(index_t tokens,
                        const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
                        F&& f) {
  using E = typename Kernel::Compute;
  const index_t k = outputs[0][0].k;
  static_assert(arch::kPageSteps % Kernel::Microkernel::kKUnit == 0, "a part's x is whole steps of panels");
  const index_t depth = arch::streamed_depth<E>(k, tokens);
  index_t first = 0;
  do {  // once if K is 0: a sum of nothing is zero
    std::array<std::array<Term<E>, kMaxTerms>, Outputs> terms;
    std::array<std::span<const Term<E>>, Outputs> part;
    for (std::size_t o = 0; o < Outputs; ++o) {
      const Term<E>& all = outputs[o][0];
      const Panels<const E> b{all.b.data + first * arch::kPanelCols, all.b.panel_stride};
      const auto behind = first + depth < k ? outputs[o].first(0) : outputs[o].subspan(1);
      terms[o][0] = {all.a.from(0, first), std::min(depth, k - first), b};
      std::copy(behind.begin(), behind.end(), terms[o].begin() + 1);
      part[o] = {terms[o].data(), 1 + behind.size()};
    }
    f(part, first == 0);
    first += depth;
  } while (first < k);
}

// C^T of gemm_nt, tokens in panels, with output o's row i at row_of(o, i); added to what is there unless it is fresh. Tokens of
// more than one block of tiles meet one weight after the other where rows are a page or more: beside the lines that are asked
// for then, as many streams again are slower (benchmarks/LOG.md, "K in parts of whole pages").
template <class Kernel, std::size_t Outputs, class RowOf>
void multiply_streams(ThreadContext<Kernel>& thread, index_t out, index_t tokens,
                      const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
                      index_t stride, bool fresh, RowOf&& row_of) {
  using Micro = typename Kernel::Microkernel;
  StreamedRows<Kernel, Outputs> rows(thread.scratch, out, outputs);
  const index_t wide = Micro::even_cols(tokens), parts = ceil_div(tokens, wide);
  const bool ahead = parts > 1 && rows.are_long();
  const auto multiply = [&](std::size_t first, std::size_t last) {
    for_each_stream_tile(out, [&](const StreamTile& tile) {
      rows.begin(tile);
      for (index_t col = 0, part = 0; col < tokens; col += wide, ++part) {
        for (std::size_t o = first; o < last; ++o) {
          if (ahead) rows.ask_for(o, part * arch::kStreams / parts, (part + 1) * arch::kStreams / parts);
          rows.multiply(thread.session, o, tile.rows, std::min(wide, tokens - col),
                        {row_of(o, tile.row) + col, stride * tile.apart, fresh});
        }
      }
    });
  };
  if (!ahead) return multiply(0, Outputs);
  for (std::size_t o = 0; o < Outputs; ++o) multiply(o, o + 1);
}

// gemm_nt of few tokens in panels, or of K in parts: C^T, as a whole.
template <class Kernel, std::size_t Outputs, class Epilogue>
void product_of_streams(ThreadContext<Kernel>& thread, index_t out, index_t tokens,
                        const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
                        Epilogue&& epilogue) {
  const index_t stride = round_up(tokens, arch::kPanelCols);
  float* c = thread.scratch.c_blocks.template as<float>(out * stride * index_t{Outputs});
  const auto row_of = [&](std::size_t o, index_t row) {
    return c + (static_cast<index_t>(o) * out + row) * stride;
  };
  for_each_part_of_k<Kernel>(tokens, outputs, [&](const auto& part, bool fresh) {
    multiply_streams(thread, out, tokens, part, stride, fresh, row_of);
  });
  std::array<TokenBlock, Outputs> results;
  for (index_t row = 0; row < out; row += arch::kFinishedRows) {
    for (std::size_t o = 0; o < Outputs; ++o) {
      results[o] = {row, std::min(arch::kFinishedRows, out - row), 0, tokens, row_of(o, row), stride, false};
    }
    epilogue(results);
  }
}

// C [rows, cols] = sum over the terms, of few rows: B is multiplied as it lies. C stays in the scratch until all terms are in
// it; then it is put in order and finished, some columns at a time.
template <FewRowsInPlace Kernel, std::size_t Terms, class Epilogue>
void product_of_few_rows(ThreadContext<Kernel>& thread, index_t rows, index_t cols,
                         const std::array<NnTerm, Terms>& terms, Epilogue&& epilogue) {
  using FewRows = typename Kernel::Microkernel::FewRows;
  Scratch& scratch = thread.scratch;
  const index_t stride = strips_stride(cols);
  const arch::SumRows c{scratch.c_blocks.template as<float>(rows * stride), stride, true};
  auto* room = scratch.b_panels.template as<typename Kernel::Compute>(FewRows::kRoom);
  sum_terms<NnTerm>(terms, rows, c, [&](const NnTerm& term, const arch::SumRows& sums) {
    const auto a = adjacent_rows<Kernel>(scratch.a_rows, term.a, rows, term.k, 1);
    const auto b = adjacent_rows<Kernel>(scratch.b_rows, term.b, term.k, cols, 1);
    FewRows::multiply(thread.session, a, rows, b, term.k, cols, sums, room);
  });
  for (index_t col = 0; col < cols; col += arch::kFinishedCols) {
    const index_t wide = std::min(arch::kFinishedCols, cols - col);
    const arch::SumRows columns = c.from(0, col);
    FewRows::in_order(columns, rows, wide);
    epilogue(Block{0, rows, col, wide, columns.data, stride});
  }
}

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
