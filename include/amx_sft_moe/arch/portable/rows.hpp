// Row operations in plain C++: packing, staging, storing, summing. The reference for every other instruction
// set's, and what a CPU without AVX2 runs. Loops over a panel's 16 columns have constant bounds, so compilers
// vectorise them at -O2.
#pragma once

#include <cmath>

#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct PortableRows {
  // B operand from rows along K: src [k, cols] -> panels, zeros up to k_padded and to whole panels.
  template <class E, class S>
  static void pack_rows(const RowSource<S>& src, index_t k, index_t k_padded, index_t cols, float scale,
                        E* panels, index_t panel_stride) {
    constexpr index_t kGroup = kPairing<E>;
    for (index_t kk = 0; kk < k_padded; ++kk) {
      const S* row = kk < k ? src.row(kk) : nullptr;
      E* out = panels + kk / kGroup * (kPanelCols * kGroup) + kk % kGroup;
      for (index_t c0 = 0; c0 < cols; c0 += kPanelCols, out += panel_stride) {
        const index_t here = row == nullptr ? 0 : (cols - c0 < kPanelCols ? cols - c0 : kPanelCols);
        for (index_t c = 0; c < here; ++c) {
          out[c * kGroup] = from_float<E>(to_float(row[(c0 + c) * src.col_stride]) * scale);
        }
        for (index_t c = here; c < kPanelCols; ++c) out[c * kGroup] = from_float<E>(0.0F);
      }
    }
  }

  // A operand: src [rows, k] -> dst [rows, k_padded] contiguous in K, zeros up to k_padded.
  template <class E, class S>
  static void stage(const RowSource<S>& src, index_t rows, index_t k, index_t k_padded, E* dst,
                    index_t dst_stride) {
    for (index_t i = 0; i < rows; ++i) {
      const S* row = src.row(i);
      E* out = dst + i * dst_stride;
      for (index_t kk = 0; kk < k; ++kk) out[kk] = from_float<E>(to_float(row[kk * src.col_stride]));
      for (index_t kk = k; kk < k_padded; ++kk) out[kk] = from_float<E>(0.0F);
    }
  }

  // A operand of gemm_tn: src [k, rows], columns adjacent -> dst [rows, k_padded], each of src's rows times its weight
  // where given.
  template <class E, class S>
  static void stage_transposed(const RowSource<S>& src, index_t rows, index_t k, index_t k_padded,
                               const float* weights, E* dst, index_t dst_stride) {
    for (index_t kk = 0; kk < k_padded; ++kk) {
      const S* row = kk < k ? src.row(kk) : nullptr;
      const float weight = row != nullptr && weights != nullptr ? weights[kk] : 1.0F;
      for (index_t i = 0; i < rows; ++i) {
        dst[i * dst_stride + kk] = from_float<E>(row == nullptr ? 0.0F : to_float(row[i]) * weight);
      }
    }
  }

  // A finished block of C [rows, cols] to its place. What is added to is rounded once, as by vectors' instructions: where
  // the place lies changes no bit.
  template <class T>
  static void store(const float* c, index_t c_stride, index_t rows, index_t cols, const BlockTarget<T>& to) {
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < cols; ++j) {
        T& out = to.data[i * to.row_stride + j * to.col_stride];
        const float factor = to.col_scale == nullptr ? to.scale : to.scale * to.col_scale[j];
        const float value = c[i * c_stride + j];
        if (!to.accumulate) {
          out = from_float<T>(value * factor);
        } else {  // without fma(), which some CPUs have no instruction for, in the usual case
          out = from_float<T>(factor == 1.0F ? value + to_float(out) : std::fma(value, factor, to_float(out)));
        }
      }
    }
  }

  // out[cols] = sum over the slots of rows[index[slot]], in the order of slots; negative indices are skipped.
  template <class T>
  static void sum_rows(const float* rows, index_t row_stride, const std::int32_t* index, index_t slots,
                       index_t cols, T* out) {
    for (index_t c0 = 0; c0 < cols; c0 += kPanelCols) {
      const index_t here = cols - c0 < kPanelCols ? cols - c0 : kPanelCols;
      float sum[kPanelCols] = {};
      for (index_t slot = 0; slot < slots; ++slot) {
        if (index[slot] < 0) continue;
        const float* row = rows + index[slot] * row_stride + c0;
        for (index_t c = 0; c < here; ++c) sum[c] += row[c];
      }
      for (index_t c = 0; c < here; ++c) out[c0 + c] = from_float<T>(sum[c]);
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
