// Biases of the experts' projections: added to a block of C while it is in L1, and what their gradients are made of, by a
// GEMM like LoRA's.
#pragma once

#include "amx_sft_moe/gemm/forms.hpp"
#include "amx_sft_moe/lora/products.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

// Adds b[expert][first ...] to the outputs of each token. Nothing where there is no bias.
inline void add_bias(const gemm::TokenBlock& block, const AnyConstMatrix& bias, index_t expert, index_t first) {
  if (bias.empty()) return;
  bias.visit([&](const auto* data) {
    const auto* b = data + expert * bias.row_stride() + first * bias.col_stride();
    for (index_t i = 0; i < block.lines(); ++i) {
      float* line = block.line(i);
      if (block.token_lines) {
        for (index_t o = 0; o < block.outs; ++o) line[o] += to_float(b[o * bias.col_stride()]);
      } else {
        const float value = to_float(b[i * bias.col_stride()]);
        for (index_t t = 0; t < block.tokens; ++t) line[t] += value;
      }
    }
  });
}

// <row, b[expert]>, the down bias' part in the gradient of a routing weight; zero where there is no bias.
template <class T>
float dot_with_bias(const T* row, const AnyConstMatrix& bias, index_t expert) {
  if (bias.empty()) return 0.0F;
  constexpr index_t kLanes = 16;  // independent sums, as accurate as a vector's and open to vectorisation
  float lanes[kLanes] = {};
  bias.visit([&](const auto* data) {
    const auto* b = data + expert * bias.row_stride();
    const index_t whole = bias.cols() / kLanes * kLanes;
    for (index_t c = 0; c < whole; c += kLanes) {
      for (index_t l = 0; l < kLanes; ++l)
        lanes[l] += to_float(row[c + l]) * to_float(b[(c + l) * bias.col_stride()]);
    }
    for (index_t c = whole; c < bias.cols(); ++c)
      lanes[c - whole] += to_float(row[c]) * to_float(b[c * bias.col_stride()]);
  });
  float sum = 0.0F;
  for (float lane : lanes) sum += lane;
  return sum;
}

// The gradient [E, out] of a bias, of one expert, as a matrix of one row. Empty where none is wanted.
inline AnyMatrix bias_gradient_of(const AnyMatrix& grad, index_t expert) {
  if (grad.empty()) return grad;
  return grad.visit([&](auto* data) {
    return AnyMatrix(data + expert * grad.row_stride(), 1, grad.cols(), 0, grad.col_stride());
  });
}

// Exact zeros, for an expert without tokens.
inline void clear_bias_gradient(const AnyMatrix& grad, index_t expert) {
  if (const AnyMatrix row = bias_gradient_of(grad, expert); !row.empty()) lora::clear(row);
}

// The factor of a bias' gradient: ones, or the weights; null: ones.
inline gemm::Factor factor_of_bias(const float* weights) {
  static constexpr float kOne = 1.0F;
  return {gemm::AnyRows(arch::RowSource<float>{&kOne, 0, 1, nullptr}), weights};  // the same for every row
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
