// Activations with AVX512: the formulas of arch/portable/activation.hpp on 16 lanes.
#pragma once

#include <type_traits>

#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"
#include "amx_sft_moe/core/activation.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {
namespace avx512 {

// exp(x) to about 1 ulp: x = n ln 2 + f with |f| <= ln 2 / 2, the Taylor series to f^7 (error below 6e-9),
// times 2^n. Out of range gives 0 or infinity; NaN stays NaN (min and max return their second operand then).
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0F), _mm512_min_ps(_mm512_set1_ps(89.0F), x));
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"  // at -O0 GCC's roundscale is a macro with a signed mask
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504F)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#pragma GCC diagnostic pop
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375F), x);  // ln 2 in two parts, the first exact
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4F), f);      // in few bits (Cody and Waite)
  __m512 p = _mm512_set1_ps(1.0F / 5040.0F);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F / 720.0F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F / 120.0F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F / 24.0F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F / 6.0F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.5F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(p, n);
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 sigmoid16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0F);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

struct GluGradient16 {
  __m512 h, dh_dgate, dh_dup;
};

// s + x s (1 - s), the derivative of x sigmoid(x) with s = sigmoid(x) and swish = x s.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 swish_slope(__m512 s, __m512 swish) {
  return _mm512_fmadd_ps(swish, _mm512_sub_ps(_mm512_set1_ps(1.0F), s), s);
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 glu16(const SiluGlu&, __m512 gate, __m512 up) {
  return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid16(gate)), up);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 GluGradient16 glu_gradient16(const SiluGlu&, __m512 gate,
                                                                          __m512 up) {
  const __m512 s = sigmoid16(gate);
  const __m512 silu = _mm512_mul_ps(gate, s);
  return {_mm512_mul_ps(silu, up), _mm512_mul_ps(up, swish_slope(s, silu)), silu};
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 glu16(const ClampedGlu& act, __m512 gate, __m512 up) {
  const __m512 limit = _mm512_set1_ps(act.limit);
  const __m512 g = _mm512_min_ps(limit, gate);
  const __m512 u = _mm512_max_ps(_mm512_set1_ps(-act.limit), _mm512_min_ps(limit, up));
  const __m512 swish = _mm512_mul_ps(g, sigmoid16(_mm512_mul_ps(_mm512_set1_ps(act.alpha), g)));
  return _mm512_mul_ps(_mm512_add_ps(u, _mm512_set1_ps(1.0F)), swish);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 GluGradient16 glu_gradient16(const ClampedGlu& act, __m512 gate,
                                                                          __m512 up) {
  const __m512 limit = _mm512_set1_ps(act.limit);
  const __m512 lower = _mm512_set1_ps(-act.limit);
  const __m512 g = _mm512_min_ps(limit, gate);
  const __m512 u = _mm512_max_ps(lower, _mm512_min_ps(limit, up));
  const __mmask16 gate_passes = _mm512_cmp_ps_mask(gate, limit, _CMP_LE_OQ);
  const __mmask16 up_passes =
      _mm512_cmp_ps_mask(up, limit, _CMP_LE_OQ) & _mm512_cmp_ps_mask(up, lower, _CMP_GE_OQ);
  const __m512 s = sigmoid16(_mm512_mul_ps(_mm512_set1_ps(act.alpha), g));
  const __m512 swish = _mm512_mul_ps(g, s);
  const __m512 up_plus_one = _mm512_add_ps(u, _mm512_set1_ps(1.0F));
  const __m512 slope = swish_slope(s, _mm512_mul_ps(_mm512_set1_ps(act.alpha), swish));
  return {_mm512_mul_ps(up_plus_one, swish), _mm512_maskz_mul_ps(gate_passes, up_plus_one, slope),
          _mm512_maskz_mov_ps(up_passes, swish)};
}

// Phi(gate) and exp(-gate^2 / 2), see kNormalTail.
struct Normal16 {
  __m512 cdf, bell;
};
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 Normal16 normal16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(kNormalTailScale), one));
  __m512 p = _mm512_set1_ps(kNormalTail[0]);
  for (int i = 1; i < 9; ++i) p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(kNormalTail[i]));
  const __m512 bell = exp16(_mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-0.5F)));
  const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5F), bell), _mm512_mul_ps(t, p));
  const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
  return {_mm512_mask_sub_ps(tail, positive, one, tail), bell};
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 glu16(const GeluGlu&, __m512 gate, __m512 up) {
  return _mm512_mul_ps(_mm512_mul_ps(gate, normal16(gate).cdf), up);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 GluGradient16 glu_gradient16(const GeluGlu&, __m512 gate,
                                                                          __m512 up) {
  const Normal16 normal = normal16(gate);
  const __m512 gelu = _mm512_mul_ps(gate, normal.cdf);
  const __m512 density = _mm512_mul_ps(normal.bell, _mm512_set1_ps(kInvSqrt2Pi));
  return {_mm512_mul_ps(gelu, up), _mm512_mul_ps(up, _mm512_fmadd_ps(gate, density, normal.cdf)), gelu};
}

// sigmoid(slope (x + cubic x^3)), and the derivative of that argument.
struct GeluTanh16 {
  __m512 s, slope;
};
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 GeluTanh16 gelu_tanh16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 scale = _mm512_set1_ps(kGeluTanhSlope);
  const __m512 cubic = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(kGeluTanhCubic));
  const __m512 s = sigmoid16(_mm512_mul_ps(_mm512_mul_ps(scale, x), _mm512_add_ps(one, cubic)));
  return {s, _mm512_mul_ps(scale, _mm512_fmadd_ps(_mm512_set1_ps(3.0F), cubic, one))};
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 glu16(const GeluTanhGlu&, __m512 gate, __m512 up) {
  return _mm512_mul_ps(_mm512_mul_ps(gate, gelu_tanh16(gate).s), up);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 GluGradient16 glu_gradient16(const GeluTanhGlu&, __m512 gate,
                                                                          __m512 up) {
  const GeluTanh16 tanh = gelu_tanh16(gate);
  const __m512 gelu = _mm512_mul_ps(gate, tanh.s);
  // Far out the slope overflows where s (1 - s) is zero: those lanes are left at zero.
  const __m512 flat = _mm512_mul_ps(gelu, _mm512_sub_ps(_mm512_set1_ps(1.0F), tanh.s));
  const __mmask16 bends = _mm512_cmp_ps_mask(flat, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  const __m512 bend = _mm512_maskz_mul_ps(bends, flat, tanh.slope);
  return {_mm512_mul_ps(gelu, up), _mm512_mul_ps(up, _mm512_add_ps(tanh.s, bend)), gelu};
}

}  // namespace avx512

struct Avx512Activation {
  // Rows of bf16 are what a forward saved, and come from memory; those of floats it has just made.
  template <class Act, class In, class Out>
  AMX_SFT_MOE_TARGET_AVX512 static void forward(const Act& act, const In* gate, const In* up, index_t n,
                                                Out* h) {
    for (index_t i = 0; i < n; i += 16) {
      const __mmask16 lanes = avx512::mask16(n - i);
      if constexpr (std::is_same_v<In, bf16>) ask_for(gate, up, i);
      const __m512 g = avx512::load16(gate + i, lanes);
      avx512::store16(h + i, lanes, avx512::glu16(act, g, avx512::load16(up + i, lanes)));
    }
  }

  template <class Act, class T>
  AMX_SFT_MOE_TARGET_AVX512 static float backward(const Act& act, const float* grad_h, const T* gate,
                                                  const T* up, float weight, index_t n, T* grad_gate,
                                                  T* grad_up) {
    __m512 dot = _mm512_setzero_ps();
    for (index_t i = 0; i < n; i += 16) {
      const __mmask16 lanes = avx512::mask16(n - i);
      ask_for(gate, up, i);
      ask_for(grad_h, i);
      const __m512 g = avx512::load16(gate + i, lanes);
      const auto d = avx512::glu_gradient16(act, g, avx512::load16(up + i, lanes));
      const __m512 grad = avx512::load16(grad_h + i, lanes);
      dot = _mm512_fmadd_ps(grad, d.h, dot);
      const __m512 weighted = _mm512_mul_ps(grad, _mm512_set1_ps(weight));
      avx512::store16(grad_gate + i, lanes, _mm512_mul_ps(weighted, d.dh_dgate));
      avx512::store16(grad_up + i, lanes, _mm512_mul_ps(weighted, d.dh_dup));
    }
    return _mm512_reduce_add_ps(dot);
  }

 private:
  // Elements ahead. Lines of as many streams as are read here come no faster than they are used, by hardware alone
  // (benchmarks/LOG.md, "What activations wait for").
  static constexpr index_t kAhead = 512;

  // A row's line is asked for where it begins, 16 elements at a time.
  template <class T>
  AMX_SFT_MOE_INLINE static void ask_for(const T* row, index_t i) {
    constexpr index_t kSize = sizeof(T);
    if (i * kSize % kLineBytes == 0) __builtin_prefetch(bytes_behind(row, (i + kAhead) * kSize), 0, 3);
  }
  template <class T>
  AMX_SFT_MOE_INLINE static void ask_for(const T* gate, const T* up, index_t i) {
    ask_for(gate, i);
    ask_for(up, i);
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
