// B operands with AVX512: panels from rows (interleaving) and from columns (transposing). Loads are masked:
// nothing beyond a row's end is read.
#pragma once

#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/pages_ahead.hpp"
#include "amx_sft_moe/arch/portable/rows.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Where one step along K of a row of panels goes: panels two by two, `neighbour` apart, `pair` from two to two.
struct PanelStep {
  index_t neighbour, pair;

  static constexpr PanelStep of_stride(index_t panel_stride) { return {panel_stride, 2 * panel_stride}; }
  // The panel of column c.
  constexpr index_t at(index_t c) const {
    return c / (2 * kPanelCols) * pair + (c % (2 * kPanelCols) < kPanelCols ? 0 : neighbour);
  }
};

// Two rows of bf16 into the pairs of a step along K, 32 columns at a time: two word permutations for two cache
// lines.
AMX_SFT_MOE_TARGET_AVX512 inline void interleave_bf16(const bf16* even, const bf16* odd, index_t cols,
                                                      bf16* out, const PanelStep& step) {
  for (index_t c = 0; c < cols; c += 2 * kPanelCols, out += step.pair) {
    const __mmask32 lanes = mask32(cols - c);
    const __m512i a = _mm512_maskz_loadu_epi16(lanes, even + c);
    const __m512i b = odd == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(lanes, odd + c);
    _mm512_storeu_si512(out, pairs_of_rows<0>(a, b));
    if (cols - c > kPanelCols) _mm512_storeu_si512(out + step.neighbour, pairs_of_rows<1>(a, b));
  }
}

// The same with a conversion or a scale on the way.
template <class S>
AMX_SFT_MOE_TARGET_AVX512 inline void interleave_scaled(const S* even, const S* odd, index_t cols, float scale,
                                                        bf16* out, const PanelStep& step) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (index_t c = 0; c < cols; c += kPanelCols) {
    const __mmask16 lanes = mask16(cols - c);
    const __m512 a = _mm512_mul_ps(load16(even + c, lanes), factor);
    const __m512 b = odd == nullptr ? _mm512_setzero_ps() : _mm512_mul_ps(load16(odd + c, lanes), factor);
    const __m512i pair = _mm512_or_si512(_mm512_cvtepu16_epi32(round_bf16(a)),
                                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(b)), 16));
    _mm512_storeu_si512(out + step.at(c), pair);
  }
}

template <class S>
AMX_SFT_MOE_TARGET_AVX512 inline void copy_row(const S* row, index_t cols, float scale, float* out,
                                               const PanelStep& step) {
  index_t c = 0;
  if (scale == 1.0F) {
    float* pair = out;
    for (; c + 2 * kPanelCols <= cols; c += 2 * kPanelCols, pair += step.pair) {
      _mm512_storeu_ps(pair, load16(row + c));
      _mm512_storeu_ps(pair + step.neighbour, load16(row + c + kPanelCols));
    }
  }
  const __m512 factor = _mm512_set1_ps(scale);
  for (; c < cols; c += kPanelCols) {
    _mm512_storeu_ps(out + step.at(c), _mm512_mul_ps(load16(row + c, mask16(cols - c)), factor));
  }
}

template <class E>
AMX_SFT_MOE_TARGET_AVX512 inline void clear_step(index_t cols, E* out, const PanelStep& step) {
  for (index_t c = 0; c < cols; c += kPanelCols) _mm512_storeu_si512(out + step.at(c), _mm512_setzero_si512());
}

// One step along K (kPairing<E> of src's rows, zeros behind k) into all panels.
template <class E, class S>
AMX_SFT_MOE_TARGET_AVX512 inline void pack_step(const RowSource<S>& src, index_t kk, index_t k, index_t cols,
                                                float scale, E* out, const PanelStep& step) {
  if (kk >= k) return clear_step(cols, out, step);
  if constexpr (std::is_same_v<E, float>) {
    copy_row(src.row(kk), cols, scale, out, step);
  } else {
    const S* even = src.row(kk);
    const S* odd = kk + 1 < k ? src.row(kk + 1) : nullptr;
    if constexpr (std::is_same_v<S, bf16>) {
      if (scale == 1.0F) return interleave_bf16(even, odd, cols, out, step);
    }
    interleave_scaled(even, odd, cols, scale, out, step);
  }
}

// Pairs of rows of bf16, all of which are there, `distance` rows from one to the next: so many side by side, 32 columns of each
// at a time.
template <index_t Pairs>
AMX_SFT_MOE_TARGET_AVX512 inline void interleave_pairs(const RowSource<bf16>& src, index_t first,
                                                       index_t distance, index_t cols, bf16* out,
                                                       const PanelStep& step) {
  constexpr std::size_t kRows = 2 * Pairs;
  const bf16* rows[kRows];
  for (index_t p = 0; p < Pairs; ++p) {
    rows[2 * p] = src.row(first + p * distance);
    rows[2 * p + 1] = src.row(first + p * distance + 1);
  }
  for (index_t c = 0; c < cols; c += 2 * kPanelCols, out += step.pair) {
    const index_t wide = cols - c < 2 * kPanelCols ? cols - c : 2 * kPanelCols;
    AMX_SFT_MOE_UNROLL
    for (index_t p = 0; p < Pairs; ++p) {
      interleave_bf16(rows[2 * p] + c, rows[2 * p + 1] + c, wide, out + p * distance * kPanelCols, step);
    }
  }
}

// Fetches rows [first, first + count) of src: strided rows of a weight panel defeat the hardware's prefetchers.
template <class S>
AMX_SFT_MOE_TARGET_AVX512 inline void prefetch_rows(const RowSource<S>& src, index_t first, index_t count,
                                                    index_t cols) {
  for (index_t ahead = 0; ahead < count; ++ahead) {
    const char* row = reinterpret_cast<const char*>(src.row(first + ahead));
    for (index_t byte = 0; byte < cols * static_cast<index_t>(sizeof(S)); byte += 64) {
      _mm_prefetch(row + byte, _MM_HINT_T0);
    }
  }
}

// The rows [first, k) as far as they are whole groups of so many pairs, which go together; returns the first that is left. Rows
// of whole pages follow one another: the page behind such a row is another one of those at hand.
template <index_t Pairs>
AMX_SFT_MOE_TARGET_AVX512 inline index_t pack_pairs(const RowSource<bf16>& src, index_t first, index_t k,
                                                    index_t cols, bf16* panels, const PanelStep& step) {
  constexpr index_t kTogether = 2 * Pairs;
  const index_t rows = (k - first) / kTogether * kTogether;
  const bool whole_pages = src.row_stride * static_cast<index_t>(sizeof(bf16)) % kPageBytes == 0;
  const index_t distance = whole_pages ? 2 : rows / Pairs;
  const index_t end = first + (whole_pages ? rows : distance);
  for (index_t row = first; row < end; row += whole_pages ? kTogether : 2) {
    interleave_pairs<Pairs>(src, row, distance, cols, panels + row * kPanelCols, step);
  }
  return first + rows;
}

// See PortableRows::pack_rows.
template <class E, class S>
AMX_SFT_MOE_TARGET_AVX512 inline void pack_rows(const RowSource<S>& src, index_t k, index_t k_padded,
                                                index_t cols, float scale, E* panels, index_t panel_stride) {
  if (src.col_stride != 1) return PortableRows::pack_rows(src, k, k_padded, cols, scale, panels, panel_stride);
  constexpr index_t kGroup = kPairing<E>;
  const PanelStep step = PanelStep::of_stride(panel_stride);
  index_t kk = 0;
  if constexpr (std::is_same_v<E, bf16> && std::is_same_v<S, bf16>) {
    if (scale == 1.0F) {
      kk = pack_pairs<kPackPairsTogether>(src, 0, k, cols, panels, step);
      kk = pack_pairs<kPackPairsOfFew>(src, kk, k, cols, panels, step);
    }
  }
  E* out = panels + kk * kPanelCols;
  for (; kk < k_padded; kk += kGroup, out += kPanelCols * kGroup) {
    if (kk + kPackRowsAhead + 1 < k) prefetch_rows(src, kk + kPackRowsAhead, kGroup, cols);
    pack_step(src, kk, k, cols, scale, out, step);
  }
}

// Columns that are rows of src, 16 at a time; `k_step` elements from one step along K to the next.
template <class E, class S>
AMX_SFT_MOE_TARGET_AVX512 inline void transpose_columns(const RowSource<S>& src, index_t cols, index_t k,
                                                        index_t k_padded, E* panels, index_t panel_stride,
                                                        index_t k_step) {
  constexpr index_t kGroup = kPairing<E>;
  constexpr index_t kStep = 16 * kGroup;  // elements of 16 dwords
  for (index_t j = 0; j < cols; j += kPanelCols, panels += panel_stride) {
    for (index_t kk = 0; kk < k_padded; kk += kStep) {
      __m512i r[16];
      AMX_SFT_MOE_UNROLL
      for (int i = 0; i < 16; ++i) {
        r[i] = j + i < cols && kk < k ? load_dwords<E>(src.row(j + i) + kk, k - kk) : _mm512_setzero_si512();
      }
      transpose_16x16(r);
      E* out = panels + kk / kGroup * k_step;
      const index_t steps = (k_padded - kk) / kGroup;
      AMX_SFT_MOE_UNROLL
      for (int i = 0; i < 16; ++i) {
        if (i < steps) _mm512_storeu_si512(out + i * k_step, r[i]);
      }
    }
  }
}

// B operand from rows along N: src [cols, k], columns adjacent -> panels, zeros up to k_padded and to whole panels;
// src's row j becomes column j.
template <class E, class S>
void pack_columns(const RowSource<S>& src, index_t cols, index_t k, index_t k_padded, E* panels,
                  index_t panel_stride) {
  transpose_columns(src, cols, k, k_padded, panels, panel_stride, kPanelCols * kPairing<E>);
}

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
