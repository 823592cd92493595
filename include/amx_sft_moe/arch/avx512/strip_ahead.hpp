// The strip that is next, with AVX512. 24 of the 32 zmm are a tile's accumulators: a unit needs no more than four.
#pragma once

#include "amx_sft_moe/arch/avx512/pack_strip.hpp"
#include "amx_sft_moe/arch/strip_ahead.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

struct RowsAhead : arch::RowsAhead {
  using arch::RowsAhead::RowsAhead;

  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void turn() {
    for (index_t units = due(); units > 0; --units, next_unit()) {
      const bf16* even = row(0);
      const bf16* odd = row(1);
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < 4; p += 2) {
        const __m512i a = _mm512_loadu_si512(even + p * kPanelCols);
        const __m512i b = _mm512_loadu_si512(odd + p * kPanelCols);
        _mm512_storeu_si512(out() + 2 * p * kPanelCols, pairs_of_rows<0>(a, b));
        _mm512_storeu_si512(out() + (2 * p + 2) * kPanelCols, pairs_of_rows<1>(a, b));
      }
    }
  }
};

struct ColumnsAhead : arch::ColumnsAhead {
  using arch::ColumnsAhead::ColumnsAhead;

  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void turn() {
    for (index_t units = due(); units > 0; --units, next_unit()) {
      AMX_SFT_MOE_UNROLL
      for (int dword = 0; dword < 8; dword += 4) four_dwords(dword);
    }
  }

 private:
  // Dwords [first, first + 4) of each of the eight rows, which become four lines of eight.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void four_dwords(index_t first) const {
    __m256i rows[4];  // i, and behind it i + 4
    AMX_SFT_MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto* low = reinterpret_cast<const __m128i*>(row(i) + first * kPairing<bf16>);
      const auto* high = reinterpret_cast<const __m128i*>(row(i + 4) + first * kPairing<bf16>);
      rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
    }
    const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpacklo_epi32(rows[2], rows[3]);
    const __m256i c = _mm256_unpackhi_epi32(rows[0], rows[1]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
    line(first, _mm256_unpacklo_epi64(a, b));
    line(first + 1, _mm256_unpackhi_epi64(a, b));
    line(first + 2, _mm256_unpacklo_epi64(c, d));
    line(first + 3, _mm256_unpackhi_epi64(c, d));
  }
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void line(index_t dword, __m256i eight) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out() + dword * kPairing<bf16> * kStripCols), eight);
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
