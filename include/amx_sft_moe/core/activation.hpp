// Gated activations, h = act(gate, up), as policies: a value type with one forward and one backward formula.
//
// A new activation is one more struct here, one more alternative of `Activation`, and its formulas per
// instruction set (arch/*/activation.hpp); kernels and phases do not change.
#pragma once

#include <cmath>
#include <variant>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// h = silu(g) u,  silu(g) = g sigmoid(g)                       (Shazeer 2020, arXiv 2002.05202, "SwiGLU")
struct SiluGlu {};

// h = (clamp(u, -limit, limit) + 1) g' sigmoid(alpha g'),  g' = min(g, limit)    (gpt-oss reference code)
// The gradient passes where the value was not cut, the bounds themselves included, as torch.clamp had it up to torch
// 2.13; from 2.14 on its is 0 there.
struct ClampedGlu {
  float limit = 7.0F;
  float alpha = 1.702F;
};

// h = gelu(g) u,  gelu(g) = g Phi(g), Phi the standard normal distribution       (Hendrycks and Gimpel 2016,
// arXiv 1606.08415)
struct GeluGlu {};

// The same with gelu(g) = g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2      (section 2 there)
struct GeluTanhGlu {};

using Activation = std::variant<SiluGlu, ClampedGlu, GeluGlu, GeluTanhGlu>;

// (1 + tanh(z)) / 2 = sigmoid(2 z): the tanh form of gelu is g sigmoid(kGeluTanhSlope (g + kGeluTanhCubic
// g^3)).
inline constexpr float kGeluTanhSlope = 1.5957691216F;  // 2 sqrt(2 / pi)
inline constexpr float kGeluTanhCubic = 0.044715F;

// Phi(-|x|) = exp(-x^2 / 2) / 2 * t P(t),  t = 1 / (1 + kNormalTailScale |x|), for vector code. P was fitted to
// erfcx(|x| / sqrt 2) / t with relative weights (Lawson's iteration on Chebyshev nodes): 3e-8 over all x that
// fp32's exp does not take to zero. Coefficients of P from t^8 down.
inline constexpr float kNormalTailScale = 0.21213203F;  // 0.3 / sqrt 2
inline constexpr float kNormalTail[9] = {-0.12925273180F, 0.48429954052F,  -0.50976818800F,
                                         0.54496252537F,  -0.09282324463F, 0.21418033540F,
                                         0.14852151275F,  0.17069089413F,  0.16918934882F};
inline constexpr float kInvSqrt2Pi = 0.3989422804F;

AMX_SFT_MOE_NAMESPACE_END
