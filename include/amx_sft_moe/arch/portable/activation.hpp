// Activations in plain C++: the formulas, and the row operations that apply them.
#pragma once

#include <cmath>

#include "amx_sft_moe/core/activation.hpp"
#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct GluGradient {
  float h;
  float dh_dgate;
  float dh_dup;
};

inline float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

inline float glu(const SiluGlu&, float gate, float up) {
  return gate * sigmoid(gate) * up;
}

inline GluGradient glu_gradient(const SiluGlu&, float gate, float up) {
  const float s = sigmoid(gate);
  const float silu = gate * s;
  return {silu * up, up * (s + silu * (1.0F - s)), silu};
}

inline float glu(const ClampedGlu& act, float gate, float up) {
  const float g = gate > act.limit ? act.limit : gate;  // a NaN stays one, here and below
  const float u = up < -act.limit ? -act.limit : (up > act.limit ? act.limit : up);
  return (u + 1.0F) * (g * sigmoid(act.alpha * g));
}

inline GluGradient glu_gradient(const ClampedGlu& act, float gate, float up) {
  const bool gate_passes = gate <= act.limit;
  const bool up_passes = up >= -act.limit && up <= act.limit;
  const float g = gate > act.limit ? act.limit : gate;
  const float u = up < -act.limit ? -act.limit : (up > act.limit ? act.limit : up);
  const float s = sigmoid(act.alpha * g);
  const float swish = g * s;
  return {(u + 1.0F) * swish, gate_passes ? (u + 1.0F) * (s + act.alpha * swish * (1.0F - s)) : 0.0F,
          up_passes ? swish : 0.0F};
}

// g Phi(g), with erfc instead of 1 + erf: no cancellation for negative g.
inline float normal_cdf(float x) {
  return 0.5F * std::erfc(x * -0.70710678F);
}

inline float glu(const GeluGlu&, float gate, float up) {
  return gate * normal_cdf(gate) * up;
}

inline GluGradient glu_gradient(const GeluGlu&, float gate, float up) {
  const float cdf = normal_cdf(gate);
  const float gelu = gate * cdf;
  const float density = kInvSqrt2Pi * std::exp(-0.5F * gate * gate);
  return {gelu * up, up * (cdf + gate * density), gelu};
}

inline float gelu_tanh_argument(float gate) {
  return kGeluTanhSlope * gate * (1.0F + kGeluTanhCubic * gate * gate);
}

inline float glu(const GeluTanhGlu&, float gate, float up) {
  return gate * sigmoid(gelu_tanh_argument(gate)) * up;
}

inline GluGradient glu_gradient(const GeluTanhGlu&, float gate, float up) {
  const float s = sigmoid(gelu_tanh_argument(gate));
  const float gelu = gate * s;
  const float slope = kGeluTanhSlope * (1.0F + 3.0F * kGeluTanhCubic * gate * gate);
  // Far out the slope of the argument overflows where s (1 - s) is zero.
  const float bend = s == 0.0F || s == 1.0F ? 0.0F : gelu * (1.0F - s) * slope;
  return {gelu * up, up * (s + bend), gelu};
}

struct PortableActivation {
  // h[n] = act(gate, up); h may be gate.
  template <class Act, class In, class Out>
  static void forward(const Act& act, const In* gate, const In* up, index_t n, Out* h) {
    for (index_t i = 0; i < n; ++i) h[i] = from_float<Out>(glu(act, to_float(gate[i]), to_float(up[i])));
  }

  // grad_gate, grad_up [n] from the unweighted grad_h [n] and the route's weight; returns <grad_h, h>, the
  // gradient of that weight.
  template <class Act, class T>
  static float backward(const Act& act, const float* grad_h, const T* gate, const T* up, float weight,
                        index_t n, T* grad_gate, T* grad_up) {
    constexpr index_t kLanes = 16;  // independent sums, so that the dot product is as accurate as a vector's
    float dot[kLanes] = {};
    for (index_t i = 0; i < n; ++i) {
      const GluGradient d = glu_gradient(act, to_float(gate[i]), to_float(up[i]));
      dot[i % kLanes] += grad_h[i] * d.h;
      const float weighted = weight * grad_h[i];
      grad_gate[i] = from_float<T>(weighted * d.dh_dgate);
      grad_up[i] = from_float<T>(weighted * d.dh_dup);
    }
    float sum = 0.0F;
    for (float lane : dot) sum += lane;
    return sum;
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
