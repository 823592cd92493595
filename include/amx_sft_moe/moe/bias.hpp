// Biases of the experts' projections: added to a block of C while it is in L1, and their gradients, a row of
// the same GEMM that makes LoRA's.
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

// Elements [first, first + grad.cols) of grad_b[expert] = sum over the expert's rows of weight x grad. gemm_tn
// with a column of ones (or the weights; null: ones) as its factor.
template <class Kernel>
void bias_gradient(gemm::ThreadContext<Kernel>& thread, const float* weights,
                   const gemm::TokenRows<Kernel>& grad, index_t expert, index_t first, const AnyMatrix& grad_b,
                   const lora::GradientMode& mode) {
  constexpr float kOne = 1.0F;
  const arch::RowSource<float> ones{&kOne, 0, 1, nullptr};  // the same element for every row
  const std::array<gemm::Factor, 1> factors{{{gemm::AnyRows(ones), weights}}};
  gemm::gemm_tn<Kernel>(thread, 1, factors, grad, [&](const gemm::Block& block) {
    grad_b.visit([&](auto* data) {
      using T = std::remove_pointer_t<decltype(data)>;
      T* out = data + expert * grad_b.row_stride() + (first + block.col) * grad_b.col_stride();
      const arch::BlockTarget<T> to{out, 0, grad_b.col_stride(), mode.accumulate, mode.scale, nullptr};
      Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, to);
    });
  });
}

// Exact zeros, for an expert without tokens.
inline void clear_bias_gradient(const AnyMatrix& grad_b, index_t expert) {
  if (grad_b.empty()) return;
  grad_b.visit([&](auto* data) {
    lora::clear({data + expert * grad_b.row_stride(), 1, grad_b.cols(), 0, grad_b.col_stride()});
  });
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
