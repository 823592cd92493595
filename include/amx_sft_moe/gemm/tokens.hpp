// How tokens stand in gemm_nt, x [tokens, k] as it comes and C as it goes. Kernels of tiles want x in panels, K
// outermost, and make C^T [out, tokens]; kernels of strips want x in rows and make C [tokens, out]; LanesOfTokens want the
// one or the other. The phases of a pass see neither: this file is what they call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/gemm/operand.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// A kernel that multiplies strips (arch/strips.hpp) instead of packed panels.
template <class Kernel>
concept MultipliesStrips = requires { Kernel::Microkernel::kStrips; };

// Some kernels have, for few rows of A or few steps along K, products that read B where it lies (arch/in_place.hpp): of
// gemm_nn and gemm_tn (some by blocks, arch/in_place_blocks.hpp), of gemm_nt.
template <class Kernel>
concept SumsInPlace = requires { Kernel::Microkernel::in_place(1, 1); };
template <class Kernel>
concept DotsInPlace = requires { Kernel::Microkernel::dots(1); };

// A kernel of strips that has, for gemm_nn of few rows of A, blocks of B's rows (arch/in_place_blocks.hpp) beside another way to
// read B in place. Rows of B that are in a cache go that way, or become strips sooner.
template <class Kernel>
concept BlocksOfRows = requires { typename Kernel::Microkernel::RowBlocks; };

// A kernel of strips whose gemm_nt has tokens along the lanes (arch/avx512/token_lanes.hpp), unless it multiplies in place.
template <class Kernel>
concept LanesOfTokens = requires { typename Kernel::Microkernel::TokenLanes; };
// A kernel whose gemm_nt takes tokens in panels, always or sometimes.
template <class Kernel>
concept PanelsOfTokens = LanesOfTokens<Kernel> || !MultipliesStrips<Kernel>;

// A kernel of strips that makes the next one from rows of B while one is multiplied (arch/strip_ahead.hpp): gemm_nn goes
// strip by strip of columns. Others pay for how far apart such a strip's rows are, and go by blocks of rows.
template <class Kernel>
concept MakesRowsAhead = requires { typename Kernel::Microkernel::RowsAhead; };

// A kernel of tiles whose products can be added to C: K is split where B, packed, would not stay in L2.
template <class Kernel>
concept AddsToC = requires { Kernel::Microkernel::kAddsToC; };

// A kernel of tiles that reads weights in streams where it waits for them (gemm/streams.hpp), and in gemm_nn multiplies few rows
// with B as it lies. Sums are in another order there: a task's rows decide, which follow from an expert's tokens alone.
template <class Kernel>
concept FewRowsInPlace = requires { typename Kernel::Microkernel::FewRows; };

template <class Kernel>
constexpr index_t padded_k(index_t k) {
  return round_up(k, Kernel::Microkernel::kKUnit);
}

// How an expert's tokens are multiplied with a weight, and so how they lie: in rows for dot products with rows of the weight
// where these lie (by_dots(); else strips), in rows for strips, or in panels, of few tokens with two chains of sums.
enum class TokenForm : std::uint8_t { kDots, kShortDots, kStrips, kFewPanels, kPanels };

// Whether a term of k steps has dot products. Few steps do not pay for their sums over lanes; of more tokens than kDots is for,
// x of many steps has no room beside the weight's rows.
constexpr bool by_dots(TokenForm form, index_t k) {
  if (k < arch::kLongDot) return false;
  return form == TokenForm::kDots || (form == TokenForm::kShortDots && k <= arch::kShortDot);
}

// The form of all operands of an expert's products, LoRA's included. Sums of dot products are in another order: all tokens of
// the expert decide, and not how this machine's caches cut these into tasks: the same bits on every machine.
template <class Kernel>
constexpr TokenForm token_form(index_t all_tokens) {
  if constexpr (DotsInPlace<Kernel>) {
    if (Kernel::Microkernel::dots(all_tokens)) return TokenForm::kDots;
    if (Kernel::Microkernel::short_dots(all_tokens)) return TokenForm::kShortDots;
  }
  if constexpr (LanesOfTokens<Kernel>) {
    if (Kernel::Microkernel::TokenLanes::two_chains(all_tokens)) return TokenForm::kFewPanels;
  }
  return PanelsOfTokens<Kernel> ? TokenForm::kPanels : TokenForm::kStrips;
}

// Whether tokens of that form lie in rows; the same for every form where the kernel has only one way.
template <class Kernel>
constexpr bool in_rows(TokenForm form) {
  if constexpr (!PanelsOfTokens<Kernel>) return true;
  if constexpr (!MultipliesStrips<Kernel>) return false;
  return form != TokenForm::kPanels && form != TokenForm::kFewPanels;
}

// Elements that one token takes in an operand of K = k.
template <class Kernel>
constexpr index_t token_stride(index_t k) {
  if constexpr (MultipliesStrips<Kernel>) {
    return spread_row_stride<typename Kernel::Compute>(k);
  } else {
    return padded_k<Kernel>(k);
  }
}

// x [tokens, k]: 16 tokens are panel_stride elements, in rows or in panels.
template <class Kernel>
void pack_operand(const AnyRows& x, index_t tokens, index_t k, TokenForm form,
                  const Panels<typename Kernel::Compute>& to) {
  using E = typename Kernel::Compute;
  x.visit([&](const auto& source) {
    if (in_rows<Kernel>(form)) {
      return Kernel::Rows::template stage<E>(source, tokens, k, padded_k<Kernel>(k), to.data, to.row_stride());
    }
    if constexpr (PanelsOfTokens<Kernel>) {
      Kernel::Rows::template pack_columns<E>(source, tokens, k, padded_k<Kernel>(k), to.data, to.panel_stride);
    }
  });
}

// A block of gemm_nt's result, fp32, valid during the epilogue: outputs [out, out + outs) of tokens [token, token
// + tokens). In memory it is lines() lines of length() adjacent floats, `stride` apart: a token's outputs, or an
// output's tokens.
struct TokenBlock {
  index_t out, outs;
  index_t token, tokens;
  float* c;
  index_t stride;
  bool token_lines;

  index_t lines() const { return token_lines ? tokens : outs; }
  index_t length() const { return token_lines ? outs : tokens; }
  float* line(index_t i) const { return c + i * stride; }
};

// data[t * stride + o] = scale * (token_scale[t]) * the block's output o of token t. What is stored past the caches others
// may read after settle_stores().
template <class Kernel, class T>
void store_tokens(const TokenBlock& block, T* data, index_t stride, float scale, const float* token_scale,
                  bool past_caches = false) {
  using Rows = typename Kernel::Rows;
  if (!block.token_lines) {
    const arch::BlockTarget<T> columns{data, 1, stride, false, scale, token_scale, past_caches};
    return Rows::store(block.c, block.stride, block.outs, block.tokens, columns);
  }
  const index_t together = token_scale == nullptr ? block.tokens : 1;
  for (index_t t = 0; t < block.tokens; t += together) {
    const float factor = token_scale == nullptr ? scale : scale * token_scale[t];
    const arch::BlockTarget<T> rows{data + t * stride, stride, 1, false, factor, nullptr};
    Rows::store(block.line(t), block.stride, together, block.outs, rows);
  }
}

// Before a task is done that stored past the caches, if it did.
template <class Kernel>
void settle_stores(bool past_caches) {
  if constexpr (requires { Kernel::Rows::settle(); }) {
    if (past_caches) Kernel::Rows::settle();
  }
}

// append_operand() where operands are rows, each of which has `padded` elements from `first` on.
template <class Kernel>
void append_rows(const TokenBlock& block, float scale, const Panels<typename Kernel::Compute>& to,
                 index_t first, index_t padded) {
  using E = typename Kernel::Compute;
  store_tokens<Kernel>(block, to.data + first, to.row_stride(), scale, nullptr);
  if (padded == block.outs) return;
  for (index_t t = 0; t < block.tokens; ++t) {
    std::fill_n(to.data + t * to.row_stride() + first + block.outs, padded - block.outs, from_float<E>(0.0F));
  }
}

// append_operand() where they are panels.
template <class Kernel>
void append_panels(const TokenBlock& block, float scale, const Panels<typename Kernel::Compute>& to,
                   index_t first, index_t padded) {
  using E = typename Kernel::Compute;
  using Rows = typename Kernel::Rows;
  const arch::RowSource<float> steps{block.c, block.stride, 1, nullptr};
  if constexpr (requires { Rows::kPairCols; }) {  // lays panels out in another way, says itself where a step is
    Rows::template pack_rows<E>(steps, block.outs, padded, block.tokens, scale, to.data, to.panel_stride,
                                first);
  } else {
    Rows::template pack_rows<E>(steps, block.outs, padded, block.tokens, scale,
                                to.data + first * arch::kPanelCols, to.panel_stride);
  }
}

// The block times `scale` as elements [first, first + outs) along the K of an operand with `k` in all, zeros
// behind the last. `to` begins with the block's first token.
template <class Kernel>
void append_operand(const TokenBlock& block, TokenForm form, float scale,
                    const Panels<typename Kernel::Compute>& to, index_t first, index_t k) {
  const index_t padded = first + block.outs == k ? padded_k<Kernel>(k) - first : block.outs;
  if (in_rows<Kernel>(form)) return append_rows<Kernel>(block, scale, to, first, padded);
  if constexpr (PanelsOfTokens<Kernel>) append_panels<Kernel>(block, scale, to, first, padded);
}

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
