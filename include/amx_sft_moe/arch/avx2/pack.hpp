// Panels with AVX2, for oneDNN: fp32, from rows (copying) and from columns (transposing). Nothing beyond a row's end
// is read.
#pragma once

#include "amx_sft_moe/arch/avx2/columns.hpp"
#include "amx_sft_moe/arch/avx2/rows.hpp"
#include "amx_sft_moe/arch/blocking.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

// One step along K into all panels.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 inline void copy_row(const S* row, index_t cols, float scale, float* out,
                                             index_t panel_stride) {
  index_t c = 0;
  if (scale == 1.0F) {
    for (; c + kPanelCols <= cols; c += kPanelCols, out += panel_stride) {
      _mm256_storeu_ps(out, load8(row + c));
      _mm256_storeu_ps(out + kLanes, load8(row + c + kLanes));
    }
  }
  const __m256 factor = _mm256_set1_ps(scale);
  for (; c < cols; c += kPanelCols, out += panel_stride) {
    _mm256_storeu_ps(out, _mm256_mul_ps(load8(row + c, cols - c), factor));
    _mm256_storeu_ps(out + kLanes, _mm256_mul_ps(load8(row + c + kLanes, cols - c - kLanes), factor));
  }
}

AMX_SFT_MOE_TARGET_AVX2 inline void clear_step(index_t cols, float* out, index_t panel_stride) {
  for (index_t c = 0; c < cols; c += kPanelCols, out += panel_stride) {
    _mm256_storeu_ps(out, _mm256_setzero_ps());
    _mm256_storeu_ps(out + kLanes, _mm256_setzero_ps());
  }
}

// See PortableRows::pack_rows.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 inline void pack_rows(const RowSource<S>& src, index_t k, index_t k_padded,
                                              index_t cols, float scale, float* panels, index_t panel_stride) {
  if (src.col_stride != 1) return PortableRows::pack_rows(src, k, k_padded, cols, scale, panels, panel_stride);
  float* out = panels;
  for (index_t kk = 0; kk < k_padded; ++kk, out += kPanelCols) {
    if (kk >= k) {
      clear_step(cols, out, panel_stride);
      continue;
    }
    if (kk + kPackRowsAhead < k) {
      const char* row = reinterpret_cast<const char*>(src.row(kk + kPackRowsAhead));
      for (index_t byte = 0; byte < cols * static_cast<index_t>(sizeof(S)); byte += 64) {
        _mm_prefetch(row + byte, _MM_HINT_T0);
      }
    }
    copy_row(src.row(kk), cols, scale, out, panel_stride);
  }
}

// See avx512::pack_columns. A panel's columns are two groups of eight rows of src.
template <class S>
AMX_SFT_MOE_TARGET_AVX2 inline void pack_columns(const RowSource<S>& src, index_t cols, index_t k,
                                                 index_t k_padded, float* panels, index_t panel_stride) {
  const index_t padded_cols = round_up(cols, kPanelCols);
  for (index_t j = 0; j < padded_cols; j += kLanes) {
    float* out = panels + j / kPanelCols * panel_stride + j % kPanelCols;
    write_columns(src, j, cols, k, k_padded, out, kPanelCols);
  }
}

}  // namespace arch::avx2

namespace arch {

struct Avx2PanelRows : Avx2Rows {
  template <class E, class S>
  static void pack_rows(const RowSource<S>& src, index_t k, index_t k_padded, index_t cols, float scale,
                        E* panels, index_t panel_stride) {
    avx2::pack_rows(src, k, k_padded, cols, scale, panels, panel_stride);
  }
  template <class E, class S>
  static void pack_columns(const RowSource<S>& src, index_t cols, index_t k, index_t k_padded, E* panels,
                           index_t panel_stride) {
    avx2::pack_columns(src, cols, k, k_padded, panels, panel_stride);
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
