// The base weights of the experts.
#pragma once

#include "amx_sft_moe/core/views.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Biases of the projections, [E, out] in fp32 or bf16 with any strides (gpt-oss's interleaved gate_up bias is
// two views with a column stride of 2). Leave empty what a model does not have.
struct ExpertBiases {
  AnyConstMatrix gate;  // [E, I]
  AnyConstMatrix up;    // [E, I]
  AnyConstMatrix down;  // [E, H]
};

// The base weights, read where they lie, never copied and never written. T is bf16 or float and must fit the kernel.
// Fused gate_up [E, 2I, H], gate rows first: gate = {p, nullptr, 2I*H, I, H, H}, up the same from p + I*H.
template <class T>
struct BaseWeights {
  ExpertMatrices<const T> gate;  // [I, H] per expert
  ExpertMatrices<const T> up;    // [I, H]
  ExpertMatrices<const T> down;  // [H, I]
  ExpertBiases biases = {};
};

AMX_SFT_MOE_NAMESPACE_END
