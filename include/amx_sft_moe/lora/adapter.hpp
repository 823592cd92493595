// LoRA factors as users store them (PEFT's orientation), and their gradients.
#pragma once

#include "amx_sft_moe/core/views.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// One projection's adapter: W + scaling B A. No adapter: leave a and b empty. Factors are read anew in every
// call.
struct LoraAdapter {
  AnyConstExpertTensor a;  // lora_a [E, r, in]
  AnyConstExpertTensor b;  // lora_b [E, out, r]
  float scaling = 1.0F;    // alpha / r, or whatever the adapter's owner uses

  index_t rank() const { return a.empty() ? 0 : a.rows(); }
};

// When gate.a and up.a are the same view (same data, shape and strides) it is one shared A: computed once, and
// its gradient, the sum of both, goes to gate_a.
struct LoraWeights {
  LoraAdapter gate;  // a [E, r, H], b [E, I, r]
  LoraAdapter up;    // a [E, r, H], b [E, I, r]
  LoraAdapter down;  // a [E, r, I], b [E, H, r]

  bool gate_up_share_a() const { return gate.rank() > 0 && up.rank() > 0 && gate.a.same_as(up.a); }
};

// Where gradients of the factors go, in each factor's own shape; any may be empty (not wanted). With a shared
// A, leave up_a empty: gate_a receives the sum.
struct LoraGradients {
  AnyExpertTensor gate_a, gate_b;
  AnyExpertTensor up_a, up_b;
  AnyExpertTensor down_a, down_b;
};

AMX_SFT_MOE_NAMESPACE_END
