// Packing for oneDNN on AVX512: two panels of 16 columns side by side, [K / 2][32 columns][2] for bf16, [K][32]
// for fp32, in the place of the two; a last panel without a neighbour stays as it is. oneDNN calls them
// BA16a32b2a and BA16a32b. With 16 columns its code keeps more rows of A in flight than L1 has ways where they
// lie 4 KiB apart: measured for K = 2048 and 256 columns 166 against 188 GFLOP/s (64 columns: 197, but tasks
// end at multiples of 32).
#pragma once

#include "amx_sft_moe/arch/avx512/rows.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct PairedAvx512Rows : Avx512Rows {
  static constexpr index_t kPairCols = 2 * kPanelCols;

  // As PortableRows::pack_rows, into the steps of K from `k_begin` on of panels whose first step is at
  // `panels`.
  template <class E, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void pack_rows(const RowSource<S>& src, index_t k, index_t k_padded,
                                                  index_t cols, float scale, E* panels, index_t panel_stride,
                                                  index_t k_begin = 0) {
    if (src.col_stride != 1) {
      return pack_elements(cols, k_padded, panels, panel_stride, k_begin, [&](index_t kk, index_t c) {
        return kk < k && c < cols ? to_float(src.row(kk)[c * src.col_stride]) * scale : 0.0F;
      });
    }
    constexpr index_t kGroup = kPairing<E>;
    const avx512::PanelStep step{kPanelCols * kGroup, 2 * panel_stride};
    const index_t left = cols % kPairCols;
    const index_t single = left > 0 && left <= kPanelCols ? left : 0;  // columns of a panel without a neighbour
    const index_t paired = cols - single;
    E* last = panels + paired / kPanelCols * panel_stride;
    for (index_t kk = 0; kk < k_padded; kk += kGroup) {
      if (kk + kPackRowsAhead + 1 < k) {
        avx512::prefetch_rows(src, kk + kPackRowsAhead, kGroup, cols);
      }
      avx512::pack_step(src, kk, k, paired, scale, panels + (k_begin + kk) * kPairCols, step);
      if (single == 0) continue;
      avx512::pack_step(src.from_column(paired), kk, k, single, scale, last + (k_begin + kk) * kPanelCols,
                        step);
    }
  }

  template <class E, class S>
  static void pack_columns(const RowSource<S>& src, index_t cols, index_t k, index_t k_padded, E* panels,
                           index_t panel_stride) {
    constexpr index_t kGroup = kPairing<E>;
    for (index_t c = 0; c < cols; c += kPairCols) {
      const index_t here = cols - c < kPairCols ? cols - c : kPairCols;
      avx512::transpose_columns(src.from_row(c), here, k, k_padded, panels + c / kPanelCols * panel_stride,
                                kPanelCols * kGroup, width(here) * kGroup);
    }
  }

 private:
  // Columns of the panel or pair that holds the next `cols` columns.
  static constexpr index_t width(index_t cols) { return cols > kPanelCols ? kPairCols : kPanelCols; }

  // Element by element: value(k, column), asked for whole panels.
  template <class E, class Value>
  static void pack_elements(index_t cols, index_t k_padded, E* panels, index_t panel_stride, index_t k_begin,
                            Value&& value) {
    constexpr index_t kGroup = kPairing<E>;
    for (index_t c = 0; c < round_up(cols, kPanelCols); ++c) {
      const index_t first = c / kPairCols * kPairCols;
      const index_t wide = width(cols - first);
      E* out = panels + first / kPanelCols * panel_stride + k_begin * wide + (c - first) * kGroup;
      for (index_t kk = 0; kk < k_padded; ++kk) {
        out[kk / kGroup * wide * kGroup + kk % kGroup] = from_float<E>(value(kk, c));
      }
    }
  }
};

// Without instructions of its own: PortableRows, and panels from columns.
struct PortablePanelRows : PortableRows {
  // See avx512::pack_columns.
  template <class E, class S>
  static void pack_columns(const RowSource<S>& src, index_t cols, index_t k, index_t k_padded, E* panels,
                           index_t panel_stride) {
    constexpr index_t kGroup = kPairing<E>;
    const index_t padded_cols = round_up(cols, kPanelCols);
    for (index_t j = 0; j < padded_cols; ++j) {
      E* out = panels + j / kPanelCols * panel_stride + j % kPanelCols * kGroup;
      const S* row = j < cols ? src.row(j) : nullptr;
      for (index_t kk = 0; kk < k_padded; ++kk) {
        const bool inside = row != nullptr && kk < k;
        out[kk / kGroup * (kPanelCols * kGroup) + kk % kGroup] =
            inside ? from_float<E>(to_float(row[kk])) : from_float<E>(0.0F);
      }
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
