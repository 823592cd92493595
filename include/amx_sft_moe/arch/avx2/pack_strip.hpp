// Strips (arch/strips.hpp) with AVX2, from rows of B and from rows that are its columns. Nothing beyond a row's
// end is read.
#pragma once

#include "amx_sft_moe/arch/avx2/columns.hpp"
#include "amx_sft_moe/arch/strips.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

// src [k, cols], columns adjacent -> strip, whole panels of it, one after the other.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, float* strip) {
  const index_t whole = cols / kPanelCols * kPanelCols;
  for (index_t kk = 0; kk < k; ++kk, strip += kPanelCols) {
    const S* row = src.row(kk);
    for (index_t j = 0; j < whole; j += kPanelCols) {
      _mm256_storeu_ps(strip + j * k, load8(row + j));
      _mm256_storeu_ps(strip + j * k + kLanes, load8(row + j + kLanes));
    }
    if (whole == cols) continue;
    const index_t first = cols - whole < kLanes ? cols - whole : kLanes;
    _mm256_storeu_ps(strip + whole * k, load8(row + whole, first));
    _mm256_storeu_ps(strip + whole * k + kLanes, load8(row + whole + first, cols - whole - first));
  }
}

// src [cols, k], K adjacent -> strip, whole panels of it, one after the other.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, float* strip) {
  for (index_t j = 0; j < cols; j += kPanelCols) {
    write_columns(src, j, cols, k, k, strip + j * k, kPanelCols);
    write_columns(src, j + kLanes, cols, k, k, strip + j * k + kLanes, kPanelCols);
  }
}

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
