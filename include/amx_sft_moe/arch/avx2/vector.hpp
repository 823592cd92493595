// Building blocks of the AVX2 row operations: typed loads and stores, bf16 rounding, 8 x 8 transposition.
// Always inlined into leaf functions that carry the same target attribute.
#pragma once

#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

inline constexpr index_t kLanes = 8;

// The first min(n, 8) lanes, none for n <= 0: a window into eight ones and eight zeros.
inline constexpr std::int32_t kMaskWindow[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                         0,  0,  0,  0,  0,  0,  0,  0};
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256i mask8(index_t n) {
  const index_t lanes = n >= kLanes ? kLanes : (n > 0 ? n : 0);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMaskWindow + kLanes - lanes));
}

// C [Rows, 8 Vectors]: zeros where it has no sums yet, whatever memory holds, without a branch. Not a masked load: Zen 1 is
// some seven cycles busy with one (gemm_nn of 4 and 8 rows took twice the time).
template <std::size_t Rows, std::size_t Vectors>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void load_sums(const SumRows& c, __m256 (&sum)[Rows][Vectors]) {
  const __m256 there = _mm256_castsi256_ps(_mm256_set1_epi32(c.fresh ? 0 : -1));
  const float* from = c.data;
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r, from += c.stride) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v)
      sum[r][v] = _mm256_and_ps(there, _mm256_loadu_ps(from + v * std::size_t{kLanes}));
  }
}
template <std::size_t Rows, std::size_t Vectors>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void store_sums(const __m256 (&sum)[Rows][Vectors],
                                                           const SumRows& c) {
  float* to = c.data;
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r, to += c.stride) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) _mm256_storeu_ps(to + v * std::size_t{kLanes}, sum[r][v]);
  }
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 widen_bf16(__m128i values) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 load8(const float* p) {
  return _mm256_loadu_ps(p);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 load8(const bf16* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// The first min(n, 8) elements, zeros behind; n <= 0 reads nothing.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 load8(const float* p, index_t n) {
  return n >= kLanes ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask8(n));
}
// AVX2 has no masks for 16-bit lanes: tails go through the stack.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256 load8(const bf16* p, index_t n) {
  if (n >= kLanes) return load8(p);
  alignas(16) bf16 tail[kLanes] = {};
  for (index_t i = 0; i < n; ++i) tail[i] = p[i];
  return widen_bf16(_mm_load_si128(reinterpret_cast<const __m128i*>(tail)));
}

// By bits where the compiler is clang: with -ffast-math or one of its parts it takes for granted of compared lanes too that
// none is a NaN.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256i nan_lanes(__m256 value) {
#if defined(__clang__)
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fffffff));
  return _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
#else
  return _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
#endif
}

// Nearest even, as to_bf16(): a NaN stays a quiet NaN, denormals survive.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m256i round_bf16_lanes(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan_lanes(value)), 16);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m128i round_bf16(__m256 value) {
  const __m256i high = round_bf16_lanes(value);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void store8(float* p, __m256 value) {
  _mm256_storeu_ps(p, value);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void store8(bf16* p, __m256 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_bf16(value));
}

// The first min(n, 8) lanes; n <= 0 writes nothing.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void store8(float* p, index_t n, __m256 value) {
  if (n >= kLanes) return _mm256_storeu_ps(p, value);
  _mm256_maskstore_ps(p, mask8(n), value);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void store8(bf16* p, index_t n, __m256 value) {
  if (n >= kLanes) return store8(p, value);
  alignas(16) bf16 tail[kLanes];
  _mm_store_si128(reinterpret_cast<__m128i*>(tail), round_bf16(value));
  for (index_t i = 0; i < n; ++i) p[i] = tail[i];
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void store16(float* p, __m256 low, __m256 high) {
  _mm256_storeu_ps(p, low);
  _mm256_storeu_ps(p + kLanes, high);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void store16(bf16* p, __m256 low, __m256 high) {
  const __m256i both = _mm256_packus_epi32(round_bf16_lanes(low), round_bf16_lanes(high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 float sum_lanes(__m256 value) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
// The sums over the lanes of a, b, c and d.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 __m128 sum_lanes(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
  const __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
  const __m256 two =
      _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
  return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

// r[i][j] <-> r[j][i].
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void transpose_8x8(__m256 (&r)[8]) {
  __m256 t[8];
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
