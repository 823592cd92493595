// Rows that become columns with AVX2, eight by eight: [cols, k] with K adjacent to [k][stride], widened to fp32. Nothing
// beyond a row's end is read.
#pragma once

#include "amx_sft_moe/arch/avx2/vector.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

// column[k][i] = rows[i][k], 8 x 8. Halves of registers change sides where they are loaded: row i and row i + 4 share
// one.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void load_columns(const float* const (&rows)[8], index_t k,
                                                             __m256 (&column)[8]) {
  AMX_SFT_MOE_UNROLL
  for (int half = 0; half < 8; half += 4) {
    __m256 r[4];
    AMX_SFT_MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps(rows[i] + k + half));
      r[i] = _mm256_insertf128_ps(low, _mm_loadu_ps(rows[i + 4] + k + half), 1);
    }
    AMX_SFT_MOE_UNROLL
    for (int two = 0; two < 4; two += 2) {
      const __m256 a = two == 0 ? _mm256_unpacklo_ps(r[0], r[1]) : _mm256_unpackhi_ps(r[0], r[1]);
      const __m256 b = two == 0 ? _mm256_unpacklo_ps(r[2], r[3]) : _mm256_unpackhi_ps(r[2], r[3]);
      column[half + two] = _mm256_shuffle_ps(a, b, 0x44);
      column[half + two + 1] = _mm256_shuffle_ps(a, b, 0xee);
    }
  }
}
// With bf16 half as many loads do, and the last of the shuffles widens.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void load_columns(const bf16* const (&rows)[8], index_t k,
                                                             __m256 (&column)[8]) {
  __m256i r[4];
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + k));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4] + k));
    r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  AMX_SFT_MOE_UNROLL
  for (int four = 0; four < 8; four += 4) {
    const __m256i a = four == 0 ? _mm256_unpacklo_epi16(r[0], r[1]) : _mm256_unpackhi_epi16(r[0], r[1]);
    const __m256i b = four == 0 ? _mm256_unpacklo_epi16(r[2], r[3]) : _mm256_unpackhi_epi16(r[2], r[3]);
    AMX_SFT_MOE_UNROLL
    for (int two = 0; two < 4; two += 2) {
      const __m256i both = two == 0 ? _mm256_unpacklo_epi32(a, b) : _mm256_unpackhi_epi32(a, b);
      const __m256i zero = _mm256_setzero_si256();
      column[four + two] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, both));
      column[four + two + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, both));
    }
  }
}

// The same where K ends `left` < 8 steps on: zeros behind it.
template <class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void load_columns(const S* const (&rows)[8], index_t k, index_t left,
                                                             __m256 (&column)[8]) {
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 8; ++i) column[i] = load8(rows[i] + k, left);
  transpose_8x8(column);
}

// Columns [first, first + 8) of the result from those rows of src, zeros beyond its rows [0, cols) and steps [0, k):
// element [kk, j], kk < padded_k, to out[kk * stride + j - first]. k <= padded_k < k + 8.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 void write_columns(const RowSource<S>& src, index_t first, index_t cols, index_t k,
                                           index_t padded_k, float* out, index_t stride) {
  const index_t there = cols - first;
  if (there <= 0) {
    for (index_t kk = 0; kk < padded_k; ++kk) _mm256_storeu_ps(out + kk * stride, _mm256_setzero_ps());
    return;
  }
  const __m256 lanes = _mm256_castsi256_ps(mask8(there));
  const S* rows[8];  // the last one in place of those that are not there
  for (index_t i = 0; i < 8; ++i) rows[i] = src.row(first + (i < there ? i : there - 1));
  for (index_t kk = 0; kk < padded_k; kk += 8) {
    __m256 column[8];
    if (k - kk >= 8) {
      load_columns(rows, kk, column);
    } else {
      load_columns(rows, kk, k - kk, column);
    }
    const index_t steps = padded_k - kk;
    AMX_SFT_MOE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const __m256 value = there >= 8 ? column[i] : _mm256_and_ps(column[i], lanes);
      if (i < steps) _mm256_storeu_ps(out + (kk + i) * stride, value);
    }
  }
}

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
