// Strips (arch/strips.hpp) with AVX2, from rows of B and from rows that are its columns. Nothing beyond a row's
// end is read.
#pragma once

#include "amx_sft_moe/arch/avx2/vector.hpp"
#include "amx_sft_moe/arch/strips.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

// src [k, cols], columns adjacent -> strip, whole panels of it.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, float* strip) {
  const index_t padded = round_up(cols, kPanelCols);
  for (index_t kk = 0; kk < k; ++kk, strip += kStripCols) {
    const S* row = src.row(kk);
    index_t j = 0;
    for (; j + kPanelCols <= cols; j += kPanelCols) {
      _mm256_storeu_ps(strip + j, load8(row + j));
      _mm256_storeu_ps(strip + j + kLanes, load8(row + j + kLanes));
    }
    for (; j < padded; j += kLanes) _mm256_storeu_ps(strip + j, load8(row + j, cols - j));
  }
}

// src [cols, k], K adjacent -> strip, whole panels of it.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, float* strip) {
  const index_t padded = round_up(cols, kPanelCols);
  for (index_t j = 0; j < padded; j += kLanes) {
    for (index_t kk = 0; kk < k; kk += kLanes) {
      const index_t steps = k - kk;
      __m256 r[8];
      AMX_SFT_MOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        r[i] = j + i < cols ? load8(src.row(j + i) + kk, steps) : _mm256_setzero_ps();
      }
      transpose_8x8(r);
      AMX_SFT_MOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (i < steps) _mm256_storeu_ps(strip + (kk + i) * kStripCols + j, r[i]);
      }
    }
  }
}

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
