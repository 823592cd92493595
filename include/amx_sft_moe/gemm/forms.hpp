// The three GEMM forms of the operator, each a task's work on one thread:
//
//   gemm_nt   C [tokens, out] = X W^T   forward: X packed once for all weights (gemm/tokens.hpp)
//   gemm_nn   C [M, N] = A B            data gradient: rows of B are interleaved on their way, of few rows of A used as they lie
//   gemm_tn   C [M, N] = A^T B          weight gradient: contraction over tokens; A^T is the small, transposed one
//
// Sums of products (LoRA beside base, gate beside up) are several terms of one call and round once.
//
// Kernels of tiles (AMX, oneDNN) go through gemm/blocks.hpp, and so does gemm_nt with tokens along the lanes; AMX with
// tokens whose x stays in L2 through gemm/streams.hpp; kernels of strips through gemm/strips.hpp, but for gemm_tn of
// few tokens; base weights' gradients have a way of their own there (gemm/finished_strips.hpp).
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx_sft_moe/gemm/blocks.hpp"
#include "amx_sft_moe/gemm/streams.hpp"
#include "amx_sft_moe/gemm/strips.hpp"
#include "amx_sft_moe/gemm/tokens.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// Panels of B [k, cols] from its rows, k padded to a multiple of k_tile, at `to`.
template <class Kernel>
Panels<const typename Kernel::Compute> pack_rows(const AnyRows& b, index_t k, index_t k_tile, index_t cols,
                                                 typename Kernel::Compute* to) {
  using E = typename Kernel::Compute;
  const index_t padded = round_up(k, k_tile);
  const index_t panel_stride = padded * arch::kPanelCols;
  b.visit([&](const auto& source) {
    Kernel::Rows::template pack_rows<E>(source, k, padded, cols, 1.0F, to, panel_stride);
  });
  return {to, panel_stride};
}

// What multiplies weights with panels of tokens.
template <class Kernel>
struct TokenMicrokernel {
  using Type = typename Kernel::Microkernel;
};
template <LanesOfTokens Kernel>
struct TokenMicrokernel<Kernel> {
  using Type = typename Kernel::Microkernel::TokenLanes;
};

// The plan for a product whose A is read once, from memory.
template <class Micro>
arch::BlockPlan streamed_plan(index_t rows, index_t cols, TokenForm form) {
  if constexpr (requires { Micro::two_chains(1); }) {
    return Micro::plan(rows, cols, form == TokenForm::kFewPanels ? 2 : 1);
  } else if constexpr (requires { Micro::streamed_plan(rows, cols); }) {
    return Micro::streamed_plan(rows, cols);
  } else {
    return Micro::plan(rows, cols);
  }
}

// gemm_nt of tokens in panels: C^T, block by block.
template <class Kernel, std::size_t Outputs, class Epilogue>
void product_with_panels(ThreadContext<Kernel>& thread, index_t out, index_t tokens, TokenForm form,
                         const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
                         Epilogue&& epilogue) {
  using Micro = typename TokenMicrokernel<Kernel>::Type;
  if constexpr (FewRowsInPlace<Kernel>) {
    if (in_streams<typename Kernel::Compute>(outputs[0][0].k, tokens))
      return product_of_streams(thread, out, tokens, outputs, epilogue);
  }
  std::array<TokenBlock, Outputs> results;
  const arch::BlockPlan plan = streamed_plan<Micro>(out, tokens, form);
  for_each_block<Kernel, Micro>(thread.session, thread.scratch, plan, Micro::kKUnit, outputs,
                                [&](const std::array<Block, Outputs>& blocks) {
                                  for (std::size_t o = 0; o < Outputs; ++o) {
                                    const Block& block = blocks[o];
                                    results[o] = {block.row, block.rows,   block.col, block.cols,
                                                  block.c,   block.stride, false};
                                  }
                                  epilogue(results);
                                });
}

// gemm_nt of tokens in rows: C, as a whole.
template <class Kernel, std::size_t Outputs, class Epilogue>
void product_with_rows(ThreadContext<Kernel>& thread, index_t out, index_t tokens, TokenForm form,
                       const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
                       Epilogue&& epilogue) {
  using E = typename Kernel::Compute;
  std::array<TokenBlock, Outputs> results;
  const index_t stride = strips_stride(out);
  float* c = thread.scratch.c_blocks.template as<float>(tokens * stride * static_cast<index_t>(Outputs));
  for (std::size_t o = 0; o < Outputs; ++o, c += tokens * stride) {
    sum_terms<Term<E>>(outputs[o], tokens, {c, stride, true},
                       [&](const Term<E>& term, const arch::SumRows& sums) {
                         multiply_columns<Kernel>(thread.scratch, form, term.b.data, term.b.row_stride(),
                                                  tokens, term.a, out, term.k, sums);
                       });
    results[o] = {0, out, 0, tokens, c, stride, true};
  }
  epilogue(results);
}

// The result [tokens, out] = sum over the terms of X [tokens, k] x W^T, W [out, k], for one or two sets of weights
// (gate and up) over the same tokens; epilogue(std::array<TokenBlock, Outputs>). X of all terms lies as `form` says
// (gemm/tokens.hpp).
template <class Kernel, std::size_t Outputs, class Epilogue>
void gemm_nt(ThreadContext<Kernel>& thread, index_t out, index_t tokens, TokenForm form,
             const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
             Epilogue&& epilogue) {
  if constexpr (MultipliesStrips<Kernel>) {
    if (in_rows<Kernel>(form)) {
      return product_with_rows(thread, out, tokens, form, outputs, epilogue);
    }
  }
  if constexpr (PanelsOfTokens<Kernel>) {
    product_with_panels(thread, out, tokens, form, outputs, epilogue);
  }
}

// C [rows, cols] = sum over the terms, by strips, in the scratch.
template <class Kernel>
Block product_of_strips(ThreadContext<Kernel>& thread, index_t rows, index_t cols,
                        std::span<const NnTerm> terms) {
  const index_t stride = strips_stride(cols);
  float* c = thread.scratch.c_blocks.template as<float>(rows * stride);
  sum_terms<NnTerm>(terms, rows, {c, stride, true}, [&](const NnTerm& term, const arch::SumRows& sums) {
    multiply_rows<Kernel>(thread.scratch, term, rows, cols, sums);
  });
  return {0, rows, 0, cols, c, stride};
}

// Steps along K of B, `all` of them [all, cols], that are packed together: equal parts that stay in L2.
template <class Kernel>
index_t panel_depth(index_t all, index_t cols) {
  if constexpr (!AddsToC<Kernel>) return all;
  const index_t row_bytes = round_up(cols, arch::kPanelCols) * index_t{sizeof(typename Kernel::Compute)};
  const index_t fit = std::max(arch::kPackedBytes / row_bytes, arch::kLeastPackedDepth);
  const index_t parts = std::max<index_t>(ceil_div(all, fit), 1);
  return padded_k<Kernel>(ceil_div(all, parts));
}

// Panels of pieces of terms as long as they are multiplied together.
template <class Kernel, std::size_t Terms>
class PackedTerms {
  using E = typename Kernel::Compute;
  static constexpr index_t kUnit = Kernel::Microkernel::kKUnit;

 public:
  PackedTerms(Scratch& scratch, index_t depth, index_t cols)
      : wide_(round_up(cols, arch::kPanelCols)), to_(scratch.b_panels.as<E>(depth * wide_)), cols_(cols) {}

  index_t depth() const { return depth_; }
  std::span<const Term<E>> terms() const { return {terms_.data(), count_}; }

  // Rows [first, first + k) of term's B, and the columns of A that go with them.
  void add(const NnTerm& term, index_t first, index_t k) {
    terms_[count_++] = {term.a.from(0, first), k,
                        pack_rows<Kernel>(term.b.from(first, 0), k, kUnit, cols_, to_ + depth_ * wide_)};
    depth_ += round_up(k, kUnit);
  }
  void clear() {
    count_ = 0;
    depth_ = 0;
  }

 private:
  std::array<Term<E>, Terms> terms_;
  std::size_t count_ = 0;
  index_t depth_ = 0;  // along K, of all terms
  index_t wide_;
  E* to_;
  index_t cols_;
};

// C [rows, cols] = sum over the terms, their B packed as deep as it stays in L2. Where that is not all at once, C passes
// through the scratch.
template <class Kernel, std::size_t Terms, class Epilogue>
void product_of_panels(ThreadContext<Kernel>& thread, index_t rows, index_t cols,
                       const std::array<NnTerm, Terms>& terms, Epilogue&& epilogue) {
  using E = typename Kernel::Compute;
  using Micro = typename Kernel::Microkernel;
  static_assert(2 * Terms <= arch::kMaxSegments, "each term may have a staged tail of K");
  index_t all = 0;
  for (const NnTerm& term : terms) all += padded_k<Kernel>(term.k);
  const index_t depth = panel_depth<Kernel>(all, cols);
  arch::SumRows sums{};
  if (depth < all) {
    const index_t stride = strips_stride(cols);
    sums = {thread.scratch.c_blocks.template as<float>(rows * stride), stride, true};
  }
  PackedTerms<Kernel, Terms> packed(thread.scratch, depth, cols);
  const auto multiply = [&](auto&& done) {
    const std::array<std::span<const Term<E>>, 1> outputs{packed.terms()};
    for_each_block<Kernel>(
        thread.session, thread.scratch, Micro::plan(rows, cols), Micro::kKUnit, outputs,
        [&](const std::array<Block, 1>& blocks) { done(blocks[0]); }, sums);
  };
  for (const NnTerm& term : terms) {
    for (index_t k = 0; k < term.k;) {
      if (packed.depth() == depth) {
        multiply([](const Block&) {});
        sums.fresh = false;
        packed.clear();
      }
      const index_t here = std::min(depth - packed.depth(), term.k - k);
      packed.add(term, k, here);
      k += here;
    }
  }
  multiply(epilogue);
}

// C [rows, cols] = sum over the terms.
template <class Kernel, std::size_t Terms, class Epilogue>
void gemm_nn(ThreadContext<Kernel>& thread, index_t rows, index_t cols, const std::array<NnTerm, Terms>& terms,
             Epilogue&& epilogue) {
  if constexpr (MultipliesStrips<Kernel>) {
    epilogue(product_of_strips(thread, rows, cols, terms));
  } else {
    if constexpr (FewRowsInPlace<Kernel>) {
      if (rows <= Kernel::Microkernel::FewRows::kRows) {
        return product_of_few_rows(thread, rows, cols, terms, epilogue);
      }
    }
    product_of_panels(thread, rows, cols, terms, epilogue);
  }
}

// B [tokens, cols] of gemm_tn: packed once for several factors, or read where it lies.
template <class Kernel>
struct TokenRows {
  Panels<const typename Kernel::Compute> panels;
  AnyRows rows;
  index_t tokens = 0, k_tile = 1, cols = 0;
};

template <class Kernel>
TokenRows<Kernel> pack_tokens(ThreadContext<Kernel>& thread, const AnyRows& b, index_t tokens, index_t cols) {
  if constexpr (MultipliesStrips<Kernel>) {
    return {{}, b, tokens, Kernel::Microkernel::kKUnit, cols};
  } else {
    using E = typename Kernel::Compute;
    const index_t k_tile = Kernel::Microkernel::fitted_k_tile(tokens);
    E* to = thread.scratch.b_panels.template as<E>(round_up(tokens, k_tile) * round_up(cols, arch::kPanelCols));
    return {pack_rows<Kernel>(b, tokens, k_tile, cols, to), {}, tokens, k_tile, cols};
  }
}

// Whether gemm_tn with so many rows finishes C block by block, from B where it lies. What has to be rounded is rounded once
// for a strip, in place for every block anew.
template <SumsInPlace Kernel>
bool tokens_in_place(index_t rows, const TokenRows<Kernel>& b) {
  const bool rounded = std::is_same_v<typename Kernel::Compute, bf16> && b.rows.dtype() == DType::kFp32;
  return rows <= arch::kFewFactorRows && b.tokens <= (rounded ? arch::kFewSteps : arch::kFewTokens);
}

// gemm_tn of few tokens, `factors` [rows, tokens]: B is read where it lies, and C leaves block by block while it is in L1.
template <class Kernel, std::size_t Factors, class Epilogue>
void product_in_place(ThreadContext<Kernel>& thread, index_t rows,
                      const std::array<arch::RowSource<typename Kernel::Compute>, Factors>& factors,
                      const TokenRows<Kernel>& b, Epilogue&& epilogue) {
  const index_t most_rows = std::min(arch::kFactorBlockRows, rows);
  const index_t most_cols = arch::kFactorBlockSums / most_rows / arch::kStripCols * arch::kStripCols;
  const index_t stride = strips_stride(std::min(most_cols, b.cols));
  float* c = thread.scratch.c_blocks.template as<float>(most_rows * stride);
  const auto add_product = [&](const Block& block, const auto& factor, const auto& source, bool fresh) {
    Kernel::Microkernel::multiply_in_place(factor.row(block.row), factor.row_stride, block.rows,
                                           source.from_column(block.col), b.tokens, block.cols,
                                           {c, stride, fresh});
  };
  with_adjacent_rows<Kernel>(thread.scratch, b.rows, b.tokens, b.cols, [&](const auto& source) {
    for (index_t row = 0; row < rows; row += most_rows) {
      for (index_t col = 0; col < b.cols; col += most_cols) {
        const index_t height = std::min(most_rows, rows - row);
        const index_t width = std::min(most_cols, b.cols - col);
        const Block block{row, height, col, width, c, stride};
        for (std::size_t f = 0; f < Factors; ++f) add_product(block, factors[f], source, f == 0);
        epilogue(block);
      }
    }
  });
}

// The A of one product of gemm_tn: [tokens, rows], each row times its weight where `weights` is not null.
struct Factor {
  AnyRows rows;
  const float* weights = nullptr;
};

// C [rows, cols] = sum over the factors of factor^T x B, of one token or more. No rows, such as those of a factor of rank
// 0: nothing.
template <class Kernel, std::size_t Factors, class Epilogue>
void gemm_tn(ThreadContext<Kernel>& thread, index_t rows, const std::array<Factor, Factors>& factors,
             const TokenRows<Kernel>& b, Epilogue&& epilogue) {
  using E = typename Kernel::Compute;
  if (rows == 0) return;
  const index_t padded = round_up(b.tokens, b.k_tile);
  E* free = thread.scratch.a_transposed.template as<E>(padded * rows * static_cast<index_t>(Factors));
  std::array<arch::RowSource<E>, Factors> transposed;
  for (std::size_t f = 0; f < Factors; ++f, free += padded * rows) {
    factors[f].rows.visit([&](const auto& source) {
      Kernel::Rows::template stage_transposed<E>(source, rows, b.tokens, padded, factors[f].weights, free,
                                                 padded);
    });
    transposed[f] = {free, padded, 1, nullptr};
  }
  if constexpr (SumsInPlace<Kernel>) {
    if (tokens_in_place(rows, b)) return product_in_place(thread, rows, transposed, b, epilogue);
  }
  if constexpr (MultipliesStrips<Kernel>) {
    std::array<NnTerm, Factors> terms;
    for (std::size_t f = 0; f < Factors; ++f) terms[f] = {transposed[f], b.rows, b.tokens, true};
    epilogue(product_of_strips(thread, rows, b.cols, terms));
  } else {
    std::array<Term<E>, Factors> terms;
    for (std::size_t f = 0; f < Factors; ++f) terms[f] = {transposed[f], padded, b.panels};
    const std::array<std::span<const Term<E>>, 1> outputs{{terms}};
    for_each_block<Kernel>(thread.session, thread.scratch, Kernel::Microkernel::plan(rows, b.cols), b.k_tile,
                           outputs, [&](const std::array<Block, 1>& blocks) { epilogue(blocks[0]); });
  }
}

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
