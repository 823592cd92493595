// Building blocks of the AVX512 row operations: typed loads and stores, bf16 rounding, 16 x 16 transposition.
// Always inlined into leaf functions that carry the same target attribute.
#pragma once

#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// The first min(n, 16) or min(n, 32) lanes.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __mmask16 mask16(index_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xffffU) : static_cast<__mmask16>((1U << n) - 1U);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __mmask32 mask32(index_t n) {
  return n >= 32 ? 0xffffffffU : static_cast<__mmask32>((std::uint64_t{1} << n) - 1U);
}

// All lanes where C holds sums already, else none: a masked load is zeros then, and costs no branch.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __mmask16 lanes_there(const SumRows& c) {
  return mask16(c.fresh ? 0 : 16);
}

// A register tile of C; zeros where nothing is there yet.
template <std::size_t Rows, std::size_t Panels>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void load_sums(const SumRows& c, __m512 (&sum)[Rows][Panels]) {
  const __mmask16 there = lanes_there(c);
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t p = 0; p < Panels; ++p) {
      sum[r][p] = _mm512_maskz_loadu_ps(
          there, c.data + static_cast<index_t>(r) * c.stride + static_cast<index_t>(p) * kPanelCols);
    }
  }
}
template <std::size_t Rows, std::size_t Panels>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void store_sums(const __m512 (&sum)[Rows][Panels],
                                                             const SumRows& c) {
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t p = 0; p < Panels; ++p) {
      _mm512_storeu_ps(c.data + static_cast<index_t>(r) * c.stride + static_cast<index_t>(p) * kPanelCols,
                       sum[r][p]);
    }
  }
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load16(const bf16* p, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load16(const float* p, __mmask16 lanes) {
  return _mm512_maskz_loadu_ps(lanes, p);
}

// All 16: a mask costs a micro-operation in a loop that converts whole matrices.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load16(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load16(const float* p) {
  return _mm512_loadu_ps(p);
}

// A line of products is 32 elements in two vectors: of bf16 those at even places, then those at odd places, for which
// one operation each is enough; of float the first 16, then the others.
inline constexpr index_t kLine = 32;

template <int Half>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 half_of_pairs(__m512i pairs) {
  if constexpr (Half == 0) return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const __m512i high = _mm512_set1_epi32(static_cast<std::int32_t>(0xffff0000U));
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
}
template <int Half>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load_half(const bf16* p) {
  return half_of_pairs<Half>(_mm512_loadu_si512(p));
}
template <int Half>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load_half(const float* p) {
  return _mm512_loadu_ps(p + 16 * Half);
}
// Of the first n elements, 0 < n < 32, zeros behind.
template <int Half>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load_half(const bf16* p, index_t n) {
  return half_of_pairs<Half>(_mm512_maskz_loadu_epi16(mask32(n), p));
}
template <int Half>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 load_half(const float* p, index_t n) {
  if (n <= 16 * Half) return _mm512_setzero_ps();
  return load16(p + 16 * Half, mask16(n - 16 * Half));
}

// 32 floats, 16 and 16, in the order of load_half() of type S.
template <int Half, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 half_in_order(__m512 low, __m512 high) {
  if constexpr (!std::is_same_v<S, bf16>) return Half == 0 ? low : high;
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_permutex2var_ps(low, _mm512_or_si512(even, _mm512_set1_epi32(Half)), high);
}

// And back: the low and the high 16 of 32 floats whose even and odd ones these are.
template <int Half>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512 half_of_alternate(__m512 even, __m512 odd) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8 * Half)), odd);
}

// Columns [16 Half, 16 Half + 16) of two rows of 32 bf16, as pairs.
template <int Half>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512i pairs_of_rows(__m512i even, __m512i odd) {
  const __m512i from_even = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7,
                                             6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  constexpr std::int32_t kFromOdd = 32 << 16, kOfHalf = 16 * Half * 0x10001;
  return _mm512_permutex2var_epi16(even, _mm512_add_epi16(from_even, _mm512_set1_epi32(kFromOdd + kOfHalf)),
                                   odd);
}

// A pair of bf16 in each lane.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 __m512bh broadcast_pair(std::int32_t pair) {
  __m512i pairs = _mm512_set1_epi32(pair);
#if defined(__clang__) && __clang_major__ < 19  // clang 16 crashes where it sees a broadcast turn into bf16
  AMX_SFT_MOE_HIDE_ORIGIN(pairs);
#endif
  return reinterpret_cast<__m512bh>(pairs);
}

// The sums over the lanes of a, b, c and d.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m128 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  const __m512 four =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

// By bits where the compiler is clang, see avx2/vector.hpp.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __mmask16 nan_lanes(__m512 value) {
#if defined(__clang__)
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff));
  return _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
#else
  return _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
#endif
}

// Nearest even, as to_bf16(), in the upper halves of lanes. Integer arithmetic, so that CPUs without VCVTNEPS2BF16 give
// the same bits and denormals survive.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512i round_bf16_lanes(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(rounded, nan_lanes(value), quiet);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m256i round_bf16(__m512 value) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16_lanes(value), 16));
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void store16(bf16* p, __mmask16 lanes, __m512 value) {
  _mm256_mask_storeu_epi16(p, lanes, round_bf16(value));
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void store16(float* p, __mmask16 lanes, __m512 value) {
  _mm512_mask_storeu_ps(p, lanes, value);
}

AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void store16(bf16* p, __m512 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(value));
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void store16(float* p, __m512 value) {
  _mm512_storeu_ps(p, value);
}

// 32 bf16 from 2 x 16 floats.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512i round_bf16_pair(__m512 low, __m512 high) {
  const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29,
                                         27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(round_bf16_lanes(low), upper, round_bf16_lanes(high));
}

// One step along K of 16 rows, as the dwords of a panel: 16 floats, or 32 bf16 in pairs. `n` elements are
// there.
template <class E, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512i load_dwords(const S* p, index_t n) {
  if constexpr (std::is_same_v<E, float>) {
    return _mm512_castps_si512(load16(p, mask16(n)));
  } else if constexpr (std::is_same_v<S, bf16>) {
    return _mm512_maskz_loadu_epi16(mask32(n), p);
  } else {
    const __m512 high = n > 16 ? load16(p + 16, mask16(n - 16)) : _mm512_setzero_ps();
    return round_bf16_pair(load16(p, mask16(n)), high);
  }
}

// r[i][j] <-> r[j][i], dwords.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void transpose_16x16(__m512i (&r)[16]) {
  __m512i t[16];
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
