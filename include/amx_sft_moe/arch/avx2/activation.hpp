// Activations with AVX2: the formulas of arch/portable/activation.hpp on 8 lanes.
#pragma once

#include "amx_sft_moe/arch/avx2/vector.hpp"
#include "amx_sft_moe/core/activation.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {
namespace avx2 {

// 2^n for integers -126 <= n <= 127.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// exp(x) to about 1 ulp: x = n ln 2 + f with |f| <= ln 2 / 2, the Taylor series to f^7 (error below 6e-9),
// times 2^n in two factors, because n reaches from -150 to 128. Out of range gives 0 or infinity; NaN stays NaN
// (min and max return their second operand then).
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 exp8(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-104.0F), _mm256_min_ps(_mm256_set1_ps(89.0F), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504F)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 f = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375F), x);  // ln 2 in two parts, the first exact
  f = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4F), f);      // in few bits (Cody and Waite)
  __m256 p = _mm256_set1_ps(1.0F / 5040.0F);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0F / 720.0F));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0F / 120.0F));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0F / 24.0F));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0F / 6.0F));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.5F));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0F));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0F));
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(p, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 sigmoid8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0F);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

struct GluGradient8 {
  __m256 h, dh_dgate, dh_dup;
};

// s + x s (1 - s), the derivative of x sigmoid(x) with s = sigmoid(x) and swish = x s.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 swish_slope(__m256 s, __m256 swish) {
  return _mm256_fmadd_ps(swish, _mm256_sub_ps(_mm256_set1_ps(1.0F), s), s);
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 glu8(const SiluGlu&, __m256 gate, __m256 up) {
  return _mm256_mul_ps(_mm256_mul_ps(gate, sigmoid8(gate)), up);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 GluGradient8 glu_gradient8(const SiluGlu&, __m256 gate, __m256 up) {
  const __m256 s = sigmoid8(gate);
  const __m256 silu = _mm256_mul_ps(gate, s);
  return {_mm256_mul_ps(silu, up), _mm256_mul_ps(up, swish_slope(s, silu)), silu};
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 glu8(const ClampedGlu& act, __m256 gate, __m256 up) {
  const __m256 limit = _mm256_set1_ps(act.limit);
  const __m256 g = _mm256_min_ps(limit, gate);
  const __m256 u = _mm256_max_ps(_mm256_set1_ps(-act.limit), _mm256_min_ps(limit, up));
  const __m256 swish = _mm256_mul_ps(g, sigmoid8(_mm256_mul_ps(_mm256_set1_ps(act.alpha), g)));
  return _mm256_mul_ps(_mm256_add_ps(u, _mm256_set1_ps(1.0F)), swish);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 GluGradient8 glu_gradient8(const ClampedGlu& act, __m256 gate,
                                                                      __m256 up) {
  const __m256 limit = _mm256_set1_ps(act.limit);
  const __m256 lower = _mm256_set1_ps(-act.limit);
  const __m256 g = _mm256_min_ps(limit, gate);
  const __m256 u = _mm256_max_ps(lower, _mm256_min_ps(limit, up));
  const __m256 gate_passes = _mm256_cmp_ps(gate, limit, _CMP_LE_OQ);
  const __m256 up_passes =
      _mm256_and_ps(_mm256_cmp_ps(up, limit, _CMP_LE_OQ), _mm256_cmp_ps(up, lower, _CMP_GE_OQ));
  const __m256 s = sigmoid8(_mm256_mul_ps(_mm256_set1_ps(act.alpha), g));
  const __m256 swish = _mm256_mul_ps(g, s);
  const __m256 up_plus_one = _mm256_add_ps(u, _mm256_set1_ps(1.0F));
  const __m256 slope = swish_slope(s, _mm256_mul_ps(_mm256_set1_ps(act.alpha), swish));
  return {_mm256_mul_ps(up_plus_one, swish), _mm256_and_ps(gate_passes, _mm256_mul_ps(up_plus_one, slope)),
          _mm256_and_ps(up_passes, swish)};
}

// Phi(gate) and exp(-gate^2 / 2), see kNormalTail.
struct Normal8 {
  __m256 cdf, bell;
};
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 Normal8 normal8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0F);
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x);
  const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(size, _mm256_set1_ps(kNormalTailScale), one));
  __m256 p = _mm256_set1_ps(kNormalTail[0]);
  for (int i = 1; i < 9; ++i) p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(kNormalTail[i]));
  const __m256 bell = exp8(_mm256_mul_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(-0.5F)));
  const __m256 tail = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(0.5F), bell), _mm256_mul_ps(t, p));
  const __m256 positive = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
  return {_mm256_blendv_ps(tail, _mm256_sub_ps(one, tail), positive), bell};
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 glu8(const GeluGlu&, __m256 gate, __m256 up) {
  return _mm256_mul_ps(_mm256_mul_ps(gate, normal8(gate).cdf), up);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 GluGradient8 glu_gradient8(const GeluGlu&, __m256 gate, __m256 up) {
  const Normal8 normal = normal8(gate);
  const __m256 gelu = _mm256_mul_ps(gate, normal.cdf);
  const __m256 density = _mm256_mul_ps(normal.bell, _mm256_set1_ps(kInvSqrt2Pi));
  return {_mm256_mul_ps(gelu, up), _mm256_mul_ps(up, _mm256_fmadd_ps(gate, density, normal.cdf)), gelu};
}

// sigmoid(slope (x + cubic x^3)), and the derivative of that argument.
struct GeluTanh8 {
  __m256 s, slope;
};
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 GeluTanh8 gelu_tanh8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0F);
  const __m256 scale = _mm256_set1_ps(kGeluTanhSlope);
  const __m256 cubic = _mm256_mul_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(kGeluTanhCubic));
  const __m256 s = sigmoid8(_mm256_mul_ps(_mm256_mul_ps(scale, x), _mm256_add_ps(one, cubic)));
  return {s, _mm256_mul_ps(scale, _mm256_fmadd_ps(_mm256_set1_ps(3.0F), cubic, one))};
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 glu8(const GeluTanhGlu&, __m256 gate, __m256 up) {
  return _mm256_mul_ps(_mm256_mul_ps(gate, gelu_tanh8(gate).s), up);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 GluGradient8 glu_gradient8(const GeluTanhGlu&, __m256 gate,
                                                                      __m256 up) {
  const GeluTanh8 tanh = gelu_tanh8(gate);
  const __m256 gelu = _mm256_mul_ps(gate, tanh.s);
  // Far out the slope overflows where s (1 - s) is zero: those lanes are left at zero.
  const __m256 flat = _mm256_mul_ps(gelu, _mm256_sub_ps(_mm256_set1_ps(1.0F), tanh.s));
  const __m256 bends = _mm256_cmp_ps(flat, _mm256_setzero_ps(), _CMP_NEQ_UQ);
  const __m256 bend = _mm256_and_ps(bends, _mm256_mul_ps(flat, tanh.slope));
  return {_mm256_mul_ps(gelu, up), _mm256_mul_ps(up, _mm256_add_ps(tanh.s, bend)), gelu};
}

}  // namespace avx2

struct Avx2Activation {
  template <class Act, class In, class Out>
  AMX_SFT_MOE_TARGET_AVX2 static void forward(const Act& act, const In* gate, const In* up, index_t n, Out* h) {
    for (index_t i = 0; i < n; i += 8) {
      const __m256 g = avx2::load8(gate + i, n - i);
      avx2::store8(h + i, n - i, avx2::glu8(act, g, avx2::load8(up + i, n - i)));
    }
  }

  template <class Act, class T>
  AMX_SFT_MOE_TARGET_AVX2 static float backward(const Act& act, const float* grad_h, const T* gate, const T* up,
                                                float weight, index_t n, T* grad_gate, T* grad_up) {
    __m256 dot = _mm256_setzero_ps();
    for (index_t i = 0; i < n; i += 8) {
      const __m256 g = avx2::load8(gate + i, n - i);
      const auto d = avx2::glu_gradient8(act, g, avx2::load8(up + i, n - i));
      const __m256 grad = avx2::load8(grad_h + i, n - i);
      dot = _mm256_fmadd_ps(grad, d.h, dot);
      const __m256 weighted = _mm256_mul_ps(grad, _mm256_set1_ps(weight));
      avx2::store8(grad_gate + i, n - i, _mm256_mul_ps(weighted, d.dh_dgate));
      avx2::store8(grad_up + i, n - i, _mm256_mul_ps(weighted, d.dh_dup));
    }
    return avx2::sum_lanes(dot);
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
