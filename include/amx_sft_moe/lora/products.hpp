// An adapter's projections, each one GEMM: u = s x A^T and v = s grad B. u B^T and v A are second terms of the base GEMMs,
// gradients of the factors are in moe/gradient_chunks.hpp.
#pragma once

#include <algorithm>

#include "amx_sft_moe/gemm/forms.hpp"
#include "amx_sft_moe/lora/adapter.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace lora {

// Where u = scaling x A^T goes: an operand of the forward's second term, and rows for backward (rows.data null: not
// saved), each times its token's weight where `weights` is not null: a product with them is rounded once.
template <class Kernel>
struct ProjectionTarget {
  float scaling;
  gemm::Panels<typename Kernel::Compute> operand;  // [tokens, r]
  MatrixView<typename Kernel::Stored> rows;        // [tokens, r]
  const float* weights = nullptr;                  // [tokens]
};

// u = scaling x A^T for one target, or for the two that share A: x an operand [tokens, k], A = lora_a [r, k], u in the same
// form. gemm_nt
template <class Kernel>
void project(gemm::ThreadContext<Kernel>& thread, const AnyConstMatrix& lora_a, index_t tokens,
             gemm::TokenForm form, const gemm::Panels<const typename Kernel::Compute>& x,
             std::span<const ProjectionTarget<Kernel>> targets) {
  using E = typename Kernel::Compute;
  const index_t rank = lora_a.rows();
  const std::array<gemm::Term<E>, 1> terms{{{gemm::AnyRows(lora_a), lora_a.cols(), x}}};
  const std::array<std::span<const gemm::Term<E>>, 1> outputs{{terms}};
  gemm::gemm_nt<Kernel>(
      thread, rank, tokens, form, outputs, [&](const std::array<gemm::TokenBlock, 1>& blocks) {
        const gemm::TokenBlock& u = blocks[0];
        for (const ProjectionTarget<Kernel>& to : targets) {
          gemm::append_operand<Kernel>(u, form, to.scaling, to.operand.from_column(u.token), u.out, rank);
          if (to.rows.data == nullptr) continue;
          gemm::store_tokens<Kernel>(u, to.rows.row(u.token) + u.out, to.rows.row_stride, to.scaling,
                                     to.weights == nullptr ? nullptr : to.weights + u.token);
        }
      });
}

// Where v = scaling grad B goes, and where each row of it times its weight goes (weights null: nowhere). Both are
// rounded once, from the accumulators.
template <class Kernel>
struct GradientTarget {
  float scaling;
  MatrixView<typename Kernel::Stored> v;           // [rows, r]
  const float* weights = nullptr;                  // [rows]
  MatrixView<typename Kernel::Stored> weighted{};  // [rows, r]
};

// v = scaling grad B: grad [rows, out], B = lora_b [out, r]. gemm_nn
template <class Kernel>
void project_gradient(gemm::ThreadContext<Kernel>& thread, const gemm::AnyRows& grad, index_t rows,
                      const AnyConstMatrix& lora_b, const GradientTarget<Kernel>& to) {
  using Stored = typename Kernel::Stored;
  const std::array<gemm::NnTerm, 1> terms{{{grad, gemm::AnyRows(lora_b), lora_b.rows()}}};
  gemm::gemm_nn<Kernel>(thread, rows, lora_b.cols(), terms, [&](const gemm::Block& block) {
    const auto store = [&](const MatrixView<Stored>& v, index_t first, index_t count, float scale) {
      const arch::BlockTarget<Stored> target{
          v.row(block.row + first) + block.col, v.row_stride, 1, false, scale, nullptr};
      Kernel::Rows::store(block.c + first * block.stride, block.stride, count, block.cols, target);
    };
    store(to.v, 0, block.rows, to.scaling);
    if (to.weights == nullptr) return;
    for (index_t i = 0; i < block.rows; ++i) {
      store(to.weighted, i, 1, to.scaling * to.weights[block.row + i]);
    }
  });
}

// Exact zeros, for an expert without tokens. Rows, or columns, that lie one behind the other are filled in one go.
inline void clear(const AnyMatrix& grad) {
  if (grad.col_stride() != 1 && grad.row_stride() == 1) return clear(grad.transposed());
  grad.visit([&](auto* data) {
    const auto zero = from_float<std::remove_pointer_t<decltype(data)>>(0.0F);
    const bool adjacent = grad.col_stride() == 1;
    if (adjacent && grad.row_stride() == grad.cols()) {
      std::fill_n(data, grad.rows() * grad.cols(), zero);
      return;
    }
    for (index_t i = 0; i < grad.rows(); ++i) {
      auto* row = data + i * grad.row_stride();
      if (adjacent) {
        std::fill_n(row, grad.cols(), zero);
        continue;
      }
      for (index_t j = 0; j < grad.cols(); ++j) row[j * grad.col_stride()] = zero;
    }
  });
}

}  // namespace lora
AMX_SFT_MOE_NAMESPACE_END
