// Strips (arch/strips.hpp) with AVX2, from rows of B and from rows that are its columns. Nothing beyond a row's
// end is read.
#pragma once

#include "amx_sft_moe/arch/avx2/columns.hpp"
#include "amx_sft_moe/arch/strips.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

// src [k, cols], columns adjacent -> strip, whole panels of it, each a piece.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, float* strip) {
  for (index_t kk = 0; kk < k; ++kk) {
    const S* row = src.row(kk);
    float* to = strip + kk * kPanelCols;
    index_t j = 0;
    for (; j + kPanelCols <= cols; j += kPanelCols, to += k * kPanelCols) {
      _mm256_storeu_ps(to, load8(row + j));
      _mm256_storeu_ps(to + kLanes, load8(row + j + kLanes));
    }
    if (j == cols) continue;
    _mm256_storeu_ps(to, load8(row + j, cols - j));
    _mm256_storeu_ps(to + kLanes, load8(row + j + kLanes, cols - j - kLanes));
  }
}

// src [cols, k], K adjacent -> strip, whole panels of it, each a piece.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, float* strip) {
  for (index_t j = 0; j < cols; j += kPanelCols, strip += k * kPanelCols) {
    write_columns(src, j, cols, k, k, strip, kPanelCols);
    write_columns(src, j + kLanes, cols, k, k, strip + kLanes, kPanelCols);
  }
}

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
