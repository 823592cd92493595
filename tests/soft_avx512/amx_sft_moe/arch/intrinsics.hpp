// In place of the library's header: the intrinsics of AVX512 that it uses in software, by SIMDe (Debian: libsimde-dev),
// so that the kernels avx512, avx512_bf16 and, with the emulator of its instructions, amx_bf16 are executed on CPUs
// without AVX512. For tests only, and slow.
#pragma once

#include <immintrin.h>
// Behind it: that header's types are replaced.
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx_sft_moe/core/config_macros.hpp"

#undef AMX_SFT_MOE_TARGET_AVX512
#define AMX_SFT_MOE_TARGET_AVX512 AMX_SFT_MOE_TARGET_AVX2
#undef AMX_SFT_MOE_TARGET_AVX512_BF16
#define AMX_SFT_MOE_TARGET_AVX512_BF16 AMX_SFT_MOE_TARGET_AVX2
#undef AMX_SFT_MOE_HIDE_ORIGIN
#define AMX_SFT_MOE_HIDE_ORIGIN(vector) __asm__("" : "+m"(vector))

// What SIMDe 0.7.4 lacks.
namespace amx_sft_moe_soft_avx512 {

template <class Lane, class Vector>
Vector load_lanes(std::uint64_t mask, const void* from) {
  Lane lanes[sizeof(Vector) / sizeof(Lane)] = {};
  for (std::size_t i = 0; i < std::size(lanes); ++i) {
    if ((mask >> i & 1U) != 0)
      std::memcpy(&lanes[i], static_cast<const char*>(from) + i * sizeof(Lane), sizeof(Lane));
  }
  Vector vector;
  std::memcpy(&vector, lanes, sizeof(vector));
  return vector;
}
template <class Lane, class Vector>
void store_lanes(void* to, std::uint64_t mask, const Vector& vector) {
  Lane lanes[sizeof(Vector) / sizeof(Lane)];
  std::memcpy(lanes, &vector, sizeof(vector));
  for (std::size_t i = 0; i < std::size(lanes); ++i) {
    if ((mask >> i & 1U) != 0) std::memcpy(static_cast<char*>(to) + i * sizeof(Lane), &lanes[i], sizeof(Lane));
  }
}
// Lane by lane.
template <class To, class ToLane, class FromLane, class From>
To convert(const From& vector) {
  FromLane from[sizeof(From) / sizeof(FromLane)];
  ToLane to[sizeof(To) / sizeof(ToLane)];
  static_assert(std::extent_v<decltype(from)> == std::extent_v<decltype(to)>);
  std::memcpy(from, &vector, sizeof(vector));
  for (std::size_t i = 0; i < std::size(from); ++i) to[i] = static_cast<ToLane>(from[i]);
  To result;
  std::memcpy(&result, to, sizeof(result));
  return result;
}

inline simde__m512 mm512_maskz_loadu_ps(std::uint64_t mask, const void* from) {
  return load_lanes<float, simde__m512>(mask, from);
}
inline simde__m512i mm512_maskz_loadu_epi32(std::uint64_t mask, const void* from) {
  return load_lanes<std::uint32_t, simde__m512i>(mask, from);
}
inline simde__m512i mm512_maskz_loadu_epi16(std::uint64_t mask, const void* from) {
  return load_lanes<std::uint16_t, simde__m512i>(mask, from);
}
inline __m256i mm256_maskz_loadu_epi16(std::uint64_t mask, const void* from) {
  return load_lanes<std::uint16_t, __m256i>(mask, from);
}
inline void mm512_mask_storeu_ps(void* to, std::uint64_t mask, const simde__m512& vector) {
  store_lanes<float>(to, mask, vector);
}
inline void mm256_mask_storeu_epi16(void* to, std::uint64_t mask, const __m256i& vector) {
  store_lanes<std::uint16_t>(to, mask, vector);
}
inline simde__m512i mm512_cvtepu16_epi32(const __m256i& vector) {
  return convert<simde__m512i, std::uint32_t, std::uint16_t>(vector);
}
inline __m256i mm512_cvtepi32_epi16(const simde__m512i& vector) {
  return convert<__m256i, std::uint16_t, std::uint32_t>(vector);
}
inline __m256 mm512_extractf32x8_ps(const simde__m512& vector, int half) {
  __m256 result;
  std::memcpy(&result, reinterpret_cast<const char*>(&vector) + std::size_t{32} * static_cast<unsigned>(half),
              32);
  return result;
}
// In halves, as GCC and clang do it.
inline float mm512_reduce_add_ps(const simde__m512& vector) {
  float lanes[16];
  std::memcpy(lanes, &vector, sizeof(vector));
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// As VCVTNE2PS2BF16: to nearest even, NaN quiet, and denormals, which it takes for zeros, zeros of their sign.
inline std::uint16_t to_bf16_without_denormals(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>((bits | 0x400000U) >> 16U);
  if (magnitude < 0x00800000U) return static_cast<std::uint16_t>((bits & 0x80000000U) >> 16U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16U & 1U)) >> 16U);
}
inline simde__m512bh mm512_cvtne2ps_pbh(const simde__m512& high, const simde__m512& low) {
  std::uint32_t from[32];
  std::memcpy(from, &low, sizeof(low));
  std::memcpy(from + 16, &high, sizeof(high));
  std::uint16_t to[32];
  for (int i = 0; i < 32; ++i) to[i] = to_bf16_without_denormals(from[i]);
  simde__m512bh result;
  std::memcpy(&result, to, sizeof(result));
  return result;
}
// As VDPBF16PS: denormals are zeros before and after.
inline simde__m512 without_denormals(const simde__m512& vector) {
  std::uint32_t lanes[16];
  std::memcpy(lanes, &vector, sizeof(vector));
  for (std::uint32_t& bits : lanes) {
    if ((bits & 0x7f800000U) == 0) bits &= 0x80000000U;
  }
  simde__m512 result;
  std::memcpy(&result, lanes, sizeof(result));
  return result;
}
inline simde__m512bh without_denormals(const simde__m512bh& vector) {
  std::uint16_t lanes[32];
  std::memcpy(lanes, &vector, sizeof(vector));
  for (std::uint16_t& bits : lanes) {
    if ((bits & 0x7f80U) == 0) bits = static_cast<std::uint16_t>(bits & 0x8000U);
  }
  simde__m512bh result;
  std::memcpy(&result, lanes, sizeof(result));
  return result;
}
inline simde__m512 mm512_dpbf16_ps(const simde__m512& sum, const simde__m512bh& a, const simde__m512bh& b) {
  return without_denormals(
      simde_mm512_dpbf16_ps(without_denormals(sum), without_denormals(a), without_denormals(b)));
}

}  // namespace amx_sft_moe_soft_avx512

#define __m512 simde__m512
#define __m512i simde__m512i
#define __m512d simde__m512d
#define __m512bh simde__m512bh
#define __mmask8 simde__mmask8
#define __mmask16 simde__mmask16
#define __mmask32 simde__mmask32
#define __mmask64 simde__mmask64

#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 amx_sft_moe_soft_avx512::mm256_mask_storeu_epi16
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 amx_sft_moe_soft_avx512::mm256_maskz_loadu_epi16
#undef _mm512_abs_ps
#define _mm512_abs_ps simde_mm512_abs_ps
#undef _mm512_add_epi16
#define _mm512_add_epi16 simde_mm512_add_epi16
#undef _mm512_add_epi32
#define _mm512_add_epi32 simde_mm512_add_epi32
#undef _mm512_add_ps
#define _mm512_add_ps simde_mm512_add_ps
#undef _mm512_and_si512
#define _mm512_and_si512 simde_mm512_and_si512
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 simde_mm512_broadcast_i32x4
#undef _mm512_broadcast_i64x4
#define _mm512_broadcast_i64x4 simde_mm512_broadcast_i64x4
#undef _mm512_castpd_ps
#define _mm512_castpd_ps simde_mm512_castpd_ps
#undef _mm512_castps512_ps256
#define _mm512_castps512_ps256 simde_mm512_castps512_ps256
#undef _mm512_castps_pd
#define _mm512_castps_pd simde_mm512_castps_pd
#undef _mm512_castps_si512
#define _mm512_castps_si512 simde_mm512_castps_si512
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps simde_mm512_castsi512_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask simde_mm512_cmp_ps_mask
#undef _mm512_cmpgt_epi32_mask
#define _mm512_cmpgt_epi32_mask simde_mm512_cmpgt_epi32_mask
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh amx_sft_moe_soft_avx512::mm512_cvtne2ps_pbh
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 amx_sft_moe_soft_avx512::mm512_cvtepi32_epi16
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 amx_sft_moe_soft_avx512::mm512_cvtepu16_epi32
#undef _mm512_div_ps
#define _mm512_div_ps simde_mm512_div_ps
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps amx_sft_moe_soft_avx512::mm512_dpbf16_ps
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps amx_sft_moe_soft_avx512::mm512_extractf32x8_ps
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps simde_mm512_fmadd_ps
#undef _mm512_fnmadd_ps
#define _mm512_fnmadd_ps simde_mm512_fnmadd_ps
#undef _mm512_loadu_ps
#define _mm512_loadu_ps simde_mm512_loadu_ps
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 simde_mm512_loadu_si512
#undef _mm512_mask_mov_epi32
#define _mm512_mask_mov_epi32 simde_mm512_mask_mov_epi32
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps amx_sft_moe_soft_avx512::mm512_mask_storeu_ps
#undef _mm512_mask_sub_ps
#define _mm512_mask_sub_ps simde_mm512_mask_sub_ps
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 amx_sft_moe_soft_avx512::mm512_maskz_loadu_epi16
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32 amx_sft_moe_soft_avx512::mm512_maskz_loadu_epi32
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps amx_sft_moe_soft_avx512::mm512_maskz_loadu_ps
#undef _mm512_maskz_mov_ps
#define _mm512_maskz_mov_ps simde_mm512_maskz_mov_ps
#undef _mm512_maskz_mul_ps
#define _mm512_maskz_mul_ps simde_mm512_maskz_mul_ps
#undef _mm512_max_ps
#define _mm512_max_ps simde_mm512_max_ps
#undef _mm512_min_epu32
#define _mm512_min_epu32 simde_mm512_min_epu32
#undef _mm512_min_ps
#define _mm512_min_ps simde_mm512_min_ps
#undef _mm512_mul_ps
#define _mm512_mul_ps simde_mm512_mul_ps
#undef _mm512_or_si512
#define _mm512_or_si512 simde_mm512_or_si512
#undef _mm512_permutex2var_epi16
#define _mm512_permutex2var_epi16 simde_mm512_permutex2var_epi16
#undef _mm512_permutex2var_ps
#define _mm512_permutex2var_ps simde_mm512_permutex2var_ps
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps amx_sft_moe_soft_avx512::mm512_reduce_add_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps simde_mm512_roundscale_ps
#undef _mm512_scalef_ps
#define _mm512_scalef_ps simde_mm512_scalef_ps
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 simde_mm512_set1_epi16
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 simde_mm512_set1_epi32
#undef _mm512_set1_ps
#define _mm512_set1_ps simde_mm512_set1_ps
#undef _mm512_set_epi16
#define _mm512_set_epi16 simde_mm512_set_epi16
#undef _mm512_set_epi32
#define _mm512_set_epi32 simde_mm512_set_epi32
#undef _mm512_setzero_ps
#define _mm512_setzero_ps simde_mm512_setzero_ps
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 simde_mm512_setzero_si512
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 simde_mm512_shuffle_i32x4
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 simde_mm512_slli_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 simde_mm512_srli_epi32
#undef _mm512_storeu_ps
#define _mm512_storeu_ps simde_mm512_storeu_ps
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 simde_mm512_storeu_si512
#undef _mm512_stream_ps
#define _mm512_stream_ps simde_mm512_storeu_ps
#undef _mm512_stream_si512
#define _mm512_stream_si512 simde_mm512_storeu_si512
#undef _mm512_sub_epi32
#define _mm512_sub_epi32 simde_mm512_sub_epi32
#undef _mm512_sub_ps
#define _mm512_sub_ps simde_mm512_sub_ps
#undef _mm512_test_epi32_mask
#define _mm512_test_epi32_mask simde_mm512_test_epi32_mask
#undef _mm512_unpackhi_epi32
#define _mm512_unpackhi_epi32 simde_mm512_unpackhi_epi32
#undef _mm512_unpackhi_epi64
#define _mm512_unpackhi_epi64 simde_mm512_unpackhi_epi64
#undef _mm512_unpackhi_pd
#define _mm512_unpackhi_pd simde_mm512_unpackhi_pd
#undef _mm512_unpackhi_ps
#define _mm512_unpackhi_ps simde_mm512_unpackhi_ps
#undef _mm512_unpacklo_epi32
#define _mm512_unpacklo_epi32 simde_mm512_unpacklo_epi32
#undef _mm512_unpacklo_epi64
#define _mm512_unpacklo_epi64 simde_mm512_unpacklo_epi64
#undef _mm512_unpacklo_pd
#define _mm512_unpacklo_pd simde_mm512_unpacklo_pd
#undef _mm512_unpacklo_ps
#define _mm512_unpacklo_ps simde_mm512_unpacklo_ps
