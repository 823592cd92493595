// Where a backward puts its results.
#pragma once

#include "amx_sft_moe/core/views.hpp"
#include "amx_sft_moe/lora/adapter.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Gradients of the biases, [E, out] with any strides, fp32 or bf16.
struct BiasGradients {
  AnyMatrix gate, up, down;
};

// Gradients of the base weights, [E, rows, cols] of the weight with any strides, fp32 or bf16 whatever the weights
// are. Halves of one [E, 2I, H] may take those of gate and up.
struct WeightGradients {
  AnyExpertTensor gate;  // [E, I, H]
  AnyExpertTensor up;    // [E, I, H]
  AnyExpertTensor down;  // [E, H, I]
};

// How a parameter's gradient is written: overwritten or added to, times a factor.
struct GradientMode {
  bool accumulate = false;
  float scale = 1.0F;
};

// Empty views are not wanted and not computed where that saves work. Those of parameters have memory of their own: not
// that of a parameter, an input or another gradient. Those of inputs may have memory of what the call brings, such as
// grad_y or x, but none of a parameter or of each other. A pass that memory does not suffice for (std::bad_alloc), or a
// product of which oneDNN refuses (KernelError), may have written part of a parameter's: before it is tried again with
// `accumulate`, they have to be what they were.
struct Gradients {
  AnyMatrix x;                // grad_x [T, H], bf16 or fp32; overwritten
  AnyMatrix routing_weights;  // grad_w [T, k], fp32 or bf16; overwritten
  LoraGradients lora;
  bool accumulate = false;  // parameter gradients: add to what is there instead of overwriting
  float scale = 1.0F;       // parameter gradients: multiplied into this call's contribution
  BiasGradients biases = {};
  WeightGradients weights = {};

  GradientMode mode() const { return {accumulate, scale}; }
};

AMX_SFT_MOE_NAMESPACE_END
