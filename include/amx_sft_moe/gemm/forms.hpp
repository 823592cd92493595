// The three GEMM forms of the operator, each a task's work on one thread:
//
//   gemm_nt   C^T [N, M] = B A^T     forward: weights are the microkernel's A, read where they lie; x comes packed
//   gemm_nn   C [M, N] = A B         data gradient: rows of B are interleaved into panels on their way, or, for
//                                    few rows of A, used where they lie
//   gemm_tn   C [M, N] = A^T B       weight gradient: contraction over tokens; A^T is the small, transposed factor
//
// Sums of products (LoRA beside base, gate beside up) are several terms of one call and round once.
#pragma once

#include <algorithm>

#include "amx_sft_moe/gemm/blocks.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// What a thread brings to a GEMM.
template <class Kernel>
struct ThreadContext {
  typename Kernel::Session session;
  Scratch& scratch;

  explicit ThreadContext(Scratch& of_thread)
      : session(make_session<typename Kernel::Session>(of_thread)), scratch(of_thread) {}

 private:
  // Sessions of kernels that keep something between regions find it in the scratch.
  template <class Session>
  static Session make_session(Scratch& of_thread) {
    if constexpr (std::is_constructible_v<Session, KernelStateSlot&>) {
      return Session(of_thread.kernel_state);
    } else {
      return Session{};
    }
  }
};

template <class Kernel>
constexpr index_t padded_k(index_t k) {
  return round_up(k, Kernel::Microkernel::kKUnit);
}

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

// C^T [out, tokens] = sum over the terms of W [out, k] x x^T [k, tokens], for one or two sets of weights (gate
// and up) over the same tokens.
template <class Kernel, std::size_t Outputs, class Epilogue>
void gemm_nt(ThreadContext<Kernel>& thread, index_t out, index_t tokens,
             const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
             Epilogue&& epilogue) {
  for_each_block<Kernel>(thread.session, thread.scratch, out, tokens, Kernel::Microkernel::kKUnit, outputs,
                         epilogue);
}

// One product of gemm_nn: A [M, k] x B [k, N], both as they lie.
struct NnTerm {
  AnyRows a;
  AnyRows b;
  index_t k = 0;
};

// A microkernel may offer, beside block(), a product for few rows that reads B where it lies.
template <class Kernel>
concept MultipliesInPlace = requires { Kernel::Microkernel::kInPlaceRows; };

// gemm_nn for few rows: packing B would cost as much as the products, and memory would wait meanwhile. Every
// element of C is the same chain of products along K as in a register tile: the same bits.
template <class Kernel, std::size_t Terms, class Epilogue>
void gemm_nn_in_place(ThreadContext<Kernel>& thread, index_t rows, index_t cols,
                      const std::array<NnTerm, Terms>& terms, Epilogue&& epilogue) {
  using E = typename Kernel::Compute;
  const index_t stride = round_up(cols, arch::kPanelCols);
  float* c = thread.scratch.c_blocks.template as<float>(rows * stride);
  std::fill_n(c, rows * stride, 0.0F);
  for (const NnTerm& term : terms) {
    if (term.k == 0) continue;
    const E* a = term.a.template direct<E>();
    index_t a_stride = term.a.row_stride();
    if (a == nullptr) {
      a_stride = round_up(term.k, arch::kPanelCols) + arch::kPanelCols;  // not a multiple of 4 KiB
      E* staged = thread.scratch.a_rows.template as<E>(rows * a_stride);
      term.a.visit([&](const auto& source) {
        Kernel::Rows::template stage<E>(source, rows, term.k, term.k, staged, a_stride);
      });
      a = staged;
    }
    term.b.visit([&](const auto& b) {
      Kernel::Microkernel::multiply_in_place(a, a_stride, rows, b, term.k, cols, c, stride);
    });
  }
  epilogue(Block{0, rows, 0, cols, c, stride});
}

// C [rows, cols] = sum over the terms.
template <class Kernel, std::size_t Terms, class Epilogue>
void gemm_nn(ThreadContext<Kernel>& thread, index_t rows, index_t cols, const std::array<NnTerm, Terms>& terms,
             Epilogue&& epilogue) {
  using E = typename Kernel::Compute;
  if constexpr (MultipliesInPlace<Kernel>) {
    const bool adjacent = std::all_of(
        terms.begin(), terms.end(), [](const NnTerm& term) { return term.b.col_stride() == 1 || term.k == 0; });
    if (adjacent && rows <= Kernel::Microkernel::kInPlaceRows) {
      return gemm_nn_in_place<Kernel>(thread, rows, cols, terms, epilogue);
    }
  }
  constexpr index_t kUnit = Kernel::Microkernel::kKUnit;
  const index_t wide = round_up(cols, arch::kPanelCols);
  index_t k = 0;
  for (const NnTerm& term : terms) k += padded_k<Kernel>(term.k);
  E* free = thread.scratch.b_panels.template as<E>(k * wide);
  std::array<Term<E>, Terms> packed;
  for (std::size_t t = 0; t < Terms; ++t) {
    packed[t] = {terms[t].a, terms[t].k, pack_rows<Kernel>(terms[t].b, terms[t].k, kUnit, cols, free)};
    free += padded_k<Kernel>(terms[t].k) * wide;
  }
  const std::array<std::span<const Term<E>>, 1> outputs{{packed}};
  for_each_block<Kernel>(thread.session, thread.scratch, rows, cols, kUnit, outputs,
                         [&](const std::array<Block, 1>& blocks) { epilogue(blocks[0]); });
}

// B of gemm_tn, packed once for several factors.
template <class Kernel>
struct TokenPanels {
  Panels<const typename Kernel::Compute> b;
  index_t tokens = 0, k_tile = 0, cols = 0;
};

// Panels of B [tokens, cols].
template <class Kernel>
TokenPanels<Kernel> pack_tokens(ThreadContext<Kernel>& thread, const AnyRows& b, index_t tokens, index_t cols) {
  using E = typename Kernel::Compute;
  const index_t k_tile = Kernel::Microkernel::fitted_k_tile(tokens);
  E* to = thread.scratch.b_panels.template as<E>(round_up(tokens, k_tile) * round_up(cols, arch::kPanelCols));
  return {pack_rows<Kernel>(b, tokens, k_tile, cols, to), tokens, k_tile, cols};
}

// The A of one product of gemm_tn: [tokens, rows], each row times its weight where `weights` is not null.
struct Factor {
  AnyRows rows;
  const float* weights = nullptr;
};

// C [rows, cols] = sum over the factors of factor^T x B.
template <class Kernel, std::size_t Factors, class Epilogue>
void gemm_tn(ThreadContext<Kernel>& thread, index_t rows, const std::array<Factor, Factors>& factors,
             const TokenPanels<Kernel>& b, Epilogue&& epilogue) {
  using E = typename Kernel::Compute;
  const index_t padded = round_up(b.tokens, b.k_tile);
  E* free = thread.scratch.a_transposed.template as<E>(padded * rows * static_cast<index_t>(Factors));
  std::array<Term<E>, Factors> terms;
  for (std::size_t f = 0; f < Factors; ++f, free += padded * rows) {
    factors[f].rows.visit([&](const auto& source) {
      Kernel::Rows::template stage_transposed<E>(source, rows, b.tokens, padded, factors[f].weights, free,
                                                 padded);
    });
    terms[f] = {arch::RowSource<E>{free, padded, 1, nullptr}, padded, b.b};
  }
  const std::array<std::span<const Term<E>>, 1> outputs{{terms}};
  for_each_block<Kernel>(thread.session, thread.scratch, rows, b.cols, b.k_tile, outputs,
                         [&](const std::array<Block, 1>& blocks) { epilogue(blocks[0]); });
}

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
