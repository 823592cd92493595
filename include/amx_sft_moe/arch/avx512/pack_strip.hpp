// Strips (arch/strips.hpp) with AVX512, from rows of B and from rows that are its columns. Nothing beyond a
// row's end is read.
#pragma once

#include "amx_sft_moe/arch/avx512/pack.hpp"
#include "amx_sft_moe/arch/strips.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Two rows of 64 bf16 as the pairs of a step along K of a strip.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void step_of_rows(const bf16* even, const bf16* odd, bf16* out) {
  AMX_SFT_MOE_UNROLL
  for (int c = 0; c < kStripCols; c += 32, out += 64) {
    const __m512i a = _mm512_loadu_si512(even + c);
    const __m512i b = _mm512_loadu_si512(odd + c);
    _mm512_storeu_si512(out, pairs_of_rows<0>(a, b));
    _mm512_storeu_si512(out + 32, pairs_of_rows<1>(a, b));
  }
}

// src [k, cols], columns adjacent -> strip, whole panels of it.
template <class E, class S>
AMX_SFT_MOE_TARGET_AVX512 void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, E* strip) {
  constexpr index_t kGroup = kPairing<E>;
  constexpr PanelStep kStep{kPanelCols * kGroup, 2 * kPanelCols * kGroup};
  if constexpr (std::is_same_v<E, float>) {
    if (cols == kStripCols) {
      for (index_t kk = 0; kk < k; ++kk, strip += kStripCols) {
        const S* row = src.row(kk);
        AMX_SFT_MOE_UNROLL
        for (int p = 0; p < 4; ++p) _mm512_storeu_ps(strip + p * kPanelCols, load16(row + p * kPanelCols));
      }
      return;
    }
  }
  index_t kk = 0;
  if constexpr (std::is_same_v<E, bf16> && std::is_same_v<S, bf16>) {
    if (cols == kStripCols) {
      for (; kk + 1 < k; kk += 2, strip += 2 * kStripCols) step_of_rows(src.row(kk), src.row(kk + 1), strip);
    }
  }
  for (; kk < k; kk += kGroup, strip += kStripCols * kGroup) {
    pack_step(src, kk, k, cols, 1.0F, strip, kStep);
  }
}

// 16 rows of 32 bf16 -> 16 steps of pairs of a strip.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void transpose_pairs(const bf16* rows, index_t stride, bf16* out) {
  __m512i pairs[16];
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 16; ++i) pairs[i] = _mm512_loadu_si512(rows + i * stride);
  transpose_16x16(pairs);
  AMX_SFT_MOE_UNROLL
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + index_t{2} * i * kStripCols, pairs[i]);
}

// src [cols, k], K adjacent -> strip, whole panels of it.
template <class E, class S>
AMX_SFT_MOE_TARGET_AVX512 void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, E* strip) {
  constexpr index_t kGroup = kPairing<E>;
  for (index_t j = 0; j < cols; j += kPanelCols) {
    index_t kk = 0;
    if constexpr (std::is_same_v<S, bf16> && std::is_same_v<E, bf16>) {
      if (cols - j >= kPanelCols && src.row_index == nullptr) {
        for (; kk + 32 <= k; kk += 32) {
          transpose_pairs(src.row(j) + kk, src.row_stride, strip + kk * kStripCols + j * kGroup);
        }
      }
    }
    if (kk == k) continue;
    transpose_columns(src.from_row(j).from_column(kk), cols - j < kPanelCols ? cols - j : kPanelCols, k - kk,
                      round_up(k - kk, kGroup), strip + kk * kStripCols + j * kGroup, kPanelCols * kGroup,
                      kStripCols * kGroup);
  }
}

// What a microkernel over strips of E has to make them.
template <class E>
struct MakesStrips {
  template <class S>
  static void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, E* strip) {
    avx512::strip_of_rows(src, k, cols, strip);
  }
  template <class S>
  static void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, E* strip) {
    avx512::strip_of_columns(src, cols, k, strip);
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
