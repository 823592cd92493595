// The sums of a register tile, scaled, rounded and written to rows of a caller's: what Avx512Rows::store makes of them in a
// cache, with the same bits, without that way.
#pragma once

#include "amx_sft_moe/arch/avx512/vector.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Sums become what is to be written, but for its type.
template <std::size_t Rows, std::size_t Panels, class T>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void scale_sums(__m512 (&sum)[Rows][Panels],
                                                             const FinishedRows<T>& to) {
  const __m512 scale = _mm512_set1_ps(to.scale);
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    const T* row = to.data + static_cast<index_t>(r) * to.row_stride;
    AMX_SFT_MOE_UNROLL
    for (std::size_t p = 0; p < Panels; ++p, row += 16) {
      sum[r][p] =
          to.accumulate ? _mm512_fmadd_ps(sum[r][p], scale, load16(row)) : _mm512_mul_ps(sum[r][p], scale);
    }
  }
}

// Whether a denormal is there, or the smallest number that is none. By their bits: what MXCSR says does not matter.
template <std::size_t Rows, std::size_t Panels>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 bool any_denormal(const __m512 (&value)[Rows][Panels]) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), one = _mm512_set1_epi32(1);
  __m512i smallest = _mm512_set1_epi32(-1);  // of bits less one, which of a zero is the largest number
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t p = 0; p < Panels; ++p) {
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(value[r][p]), magnitude);
      smallest = _mm512_min_epu32(smallest, _mm512_sub_epi32(bits, one));
    }
  }
  const __m512i exponent = _mm512_set1_epi32(static_cast<std::int32_t>(0xff800000U));
  return _mm512_test_epi32_mask(smallest, exponent) != 0xffffU;
}

// Cache lines of T from `Panels` vectors.
template <class T, std::size_t Panels>
inline constexpr std::size_t kLinesOf = Panels * sizeof(T) / sizeof(float);

// Values as lines of T, rounded as store16() does.
template <class T, std::size_t Rows, std::size_t Panels>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void lines_of(const __m512 (&value)[Rows][Panels],
                                                           __m512i (&line)[Rows][kLinesOf<T, Panels>]) {
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t n = 0; n < kLinesOf<T, Panels>; ++n) {
      if constexpr (std::is_same_v<T, float>) {
        line[r][n] = _mm512_castps_si512(value[r][n]);
      } else {
        line[r][n] = round_bf16_pair(value[r][2 * n], value[r][2 * n + 1]);
      }
    }
  }
}

template <bool PastCaches, std::size_t Rows, std::size_t Lines, class T>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void write_rows(const __m512i (&line)[Rows][Lines], T* data,
                                                             index_t row_stride) {
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    __m512i* to = reinterpret_cast<__m512i*>(data + static_cast<index_t>(r) * row_stride);
    AMX_SFT_MOE_UNROLL
    for (std::size_t n = 0; n < Lines; ++n) {
      if constexpr (PastCaches) {
        _mm512_stream_si512(to + n, line[r][n]);
      } else {
        _mm512_storeu_si512(to + n, line[r][n]);
      }
    }
  }
}

// Whole lines of each row.
template <std::size_t Rows, std::size_t Lines, class T>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void write_lines(const __m512i (&line)[Rows][Lines],
                                                              const FinishedRows<T>& to) {
  if (to.past_caches) {
    write_rows<true>(line, to.data, to.row_stride);
  } else {
    write_rows<false>(line, to.data, to.row_stride);
  }
}

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
