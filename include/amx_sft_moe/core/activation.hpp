// Gated activations, h = act(gate, up), as policies: a value type with one forward and one backward formula.
//
// A new activation is one more struct here and one more alternative of `Activation`; kernels and phases do not
// change.
#pragma once

#include <cmath>
#include <variant>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// h = silu(g) u,  silu(g) = g sigmoid(g)                       (Shazeer 2020, arXiv 2002.05202, "SwiGLU")
struct SiluGlu {};

// h = (clamp(u, -limit, limit) + 1) g' sigmoid(alpha g'),  g' = min(g, limit)       (gpt-oss model card and
// reference) The gradient passes where the value was not cut, the bounds themselves included, as torch.clamp
// has it.
struct ClampedGlu {
  float limit = 7.0F;
  float alpha = 1.702F;
};

using Activation = std::variant<SiluGlu, ClampedGlu>;

AMX_SFT_MOE_NAMESPACE_END
