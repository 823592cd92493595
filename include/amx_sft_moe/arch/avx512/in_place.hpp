// Register tiles of products for few rows of A, or few tokens, that read B or W where it lies: see in_place_blocks.hpp,
// in_place_dots.hpp and dot_blocks.hpp of arch/.
#pragma once

#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/in_place_blocks.hpp"
#include "amx_sft_moe/arch/in_place_dots.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// sum [Rows][Tokens] += one half of a line of each row, of which n elements are there, times x, a line of each token
// after the other.
template <bool Whole, int Half, std::size_t Rows, std::size_t Tokens, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void dot_line(__m512 (&sum)[Rows][Tokens], const S* const* row,
                                                           index_t kk, index_t n, const float* x) {
  __m512 line[Rows];
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    line[r] = Whole ? load_half<Half>(row[r] + kk) : load_half<Half>(row[r] + kk, n);
  }
  AMX_SFT_MOE_UNROLL
  for (std::size_t t = 0; t < Tokens; ++t) {
    __m512 value = _mm512_loadu_ps(x + static_cast<index_t>(2 * t + Half) * (kLine / 2));
    // GCC would load it once for each row, and loads are what there are too many of.
    AMX_SFT_MOE_HIDE_ORIGIN(value);
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) sum[r][t] = _mm512_fmadd_ps(line[r], value, sum[r][t]);
  }
}

// C [Tokens, Rows] += the sums over the lanes of each.
template <std::size_t Rows, std::size_t Tokens>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void store_dots(const __m512 (&sum)[Rows][Tokens],
                                                             const SumRows& c) {
  static_assert(Rows <= 4);
  constexpr std::size_t kLast = Rows - 1;
  AMX_SFT_MOE_UNROLL
  for (std::size_t t = 0; t < Tokens; ++t) {
    alignas(16) float of_row[4];
    _mm_store_ps(of_row, sum_lanes(sum[0][t], sum[std::min<std::size_t>(1, kLast)][t],
                                   sum[std::min<std::size_t>(2, kLast)][t], sum[kLast][t]));
    float* to = c.data + static_cast<index_t>(t) * c.stride;
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) to[r] = c.fresh ? of_row[r] : to[r] + of_row[r];
  }
}

// Before a line of each row.
template <std::size_t Rows, class S, class Ahead>
AMX_SFT_MOE_INLINE void ask_ahead(const S* const* row, Ahead& ahead, index_t kk) {
  constexpr index_t kCacheLine = kLineBytes / static_cast<index_t>(sizeof(S));
  AMX_SFT_MOE_UNROLL
  for (index_t at = 0; at < kLine; at += kCacheLine) {
    ahead.template turn<static_cast<int>(Rows)>(row, kk + at, at == 0);
  }
}

struct InPlaceTiles {
  using Element = float;
  static constexpr index_t kLine = avx512::kLine;

  // 12 rows x 32 columns: 24 accumulators, 2 registers of B, 1 broadcast of the 32 zmm. Of few rows more columns: a broadcast
  // serves more products, and their chains hide one another's latency (of 3 rows one of 24 sums is in memory then, at the same
  // rate). A's block is copied: a row's place is part of an instruction then, and its lines are adjacent.
  static constexpr index_t kLeastRows = 1, kRows = 12, kSteps = kBlockSteps;
  template <int Rows, class S, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512 static void block(const float* from, index_t from_stride, const S* const* b,
                                              index_t steps, index_t cols, const SumRows& c, BlockEnds ends,
                                              Ahead& ahead) {
    constexpr int kPanels = Rows <= 3 ? 8 : Rows <= 6 ? 4 : 2;
    alignas(kLineBytes) float a[std::size_t{Rows}][std::size_t{kBlockSteps}];
    copy_block(from, from_stride, steps, a);
    Ahead asked = ahead;
    index_t j = 0;
    for (; j + kPanels * kPanelCols <= cols; j += kPanels * kPanelCols) {
      block_tile<kPanels>(a, b, steps, j, c, ends, asked);
    }
    for (; j + kLine <= cols; j += kLine) block_tile<2>(a, b, steps, j, c, ends, asked);
    for (; j < cols; j += kPanelCols) last_columns(a, b, steps, j, mask16(cols - j), c);
    ahead = asked;
  }

  // X [tokens, k] -> [k / kLine][tokens][kLine] in the order of load_half<S>(), zeros behind k.
  template <class S>
  AMX_SFT_MOE_TARGET_AVX512 static void order(const float* x, index_t x_stride, index_t tokens, index_t k,
                                              float* to) {
    for (index_t kk = 0; kk < k; kk += kLine) {
      for (index_t t = 0; t < tokens; ++t, to += kLine) {
        const float* from = x + t * x_stride + kk;
        const bool whole = k - kk >= kLine;
        const __m512 low = whole ? load_half<0>(from) : load_half<0>(from, k - kk);
        const __m512 high = whole ? load_half<1>(from) : load_half<1>(from, k - kk);
        _mm512_storeu_ps(to, half_in_order<0, S>(low, high));
        _mm512_storeu_ps(to + kLine / 2, half_in_order<1, S>(low, high));
      }
    }
  }

  // C [Tokens, Rows] += X [Tokens, k] x rows^T, X in that order.
  template <int Rows, int Tokens, class S, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512 static void dot(const S* const* row, const float* x, index_t k, const SumRows& c,
                                            Ahead& ahead) {
    __m512 sum[std::size_t{Rows}][std::size_t{Tokens}];
    clear_sums(sum);
    add_dots(sum, row, x, k, [&](index_t kk) { ask_ahead<std::size_t{Rows}>(row, ahead, kk); });
    store_dots(sum, c);
  }

  // The same of a part of K, three rows at a time.
  static constexpr index_t kSumLanes = kPanelCols;
  template <int Tokens, int Lines, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void dot_part(const DotPart<S>& part, const float* x, const SumRows& c,
                                                 NextBlockOfDots& ahead) {
    float of_last[std::size_t{3 * Tokens}];
    const SumRows last{of_last, 3, true};
    for (index_t o = 0; o < part.rows; o += 3) {
      const SumRows to = o + 3 <= part.rows ? c.from(0, o) : last;
      dot_tile<Tokens>(part, o, x, to, ahead.template lines<Lines>(o));
    }
    const index_t rows = part.rows % 3;
    if (part.last && rows > 0) add_last_rows(last, Tokens, rows, c.from(0, part.rows - rows));
  }

 private:
  // Three rows from o on, the last one several times where fewer are there.
  template <int Tokens, int Lines, class S>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void dot_tile(const DotPart<S>& part, index_t o,
                                                                    const float* x, const SumRows& c,
                                                                    LinesOfTile<Lines> lines) {
    const S* row[3];
    for (index_t r = 0; r < 3; ++r) row[r] = part.w + std::min(o + r, part.rows - 1) * part.row_stride;
    __m512 sum[3][std::size_t{Tokens}];
    const SumRows sums{part.sums + o * Tokens * kSumLanes, Tokens * kSumLanes, false};
    clear_sums(sum);
    if (!part.first) load_sums(sums, sum);
    add_dots(sum, row, x, part.k, [&](index_t /*kk*/) {
      AMX_SFT_MOE_UNROLL
      for (index_t at = 0; at < kLine; at += kLineBytes / index_t{sizeof(S)}) lines.turn();
    });
    part.last ? store_dots(sum, c) : store_sums(sum, sums);
  }

  template <std::size_t Rows, std::size_t Tokens>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void clear_sums(__m512 (&sum)[Rows][Tokens]) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (std::size_t t = 0; t < Tokens; ++t) sum[r][t] = _mm512_setzero_ps();
    }
  }

  // With ask(kk) before each kLine elements.
  template <std::size_t Rows, std::size_t Tokens, class S, class Ask>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void add_dots(__m512 (&sum)[Rows][Tokens],
                                                                    const S* const* row, const float* x,
                                                                    index_t k, const Ask& ask) {
    index_t kk = 0;
    for (; kk + kLine <= k; kk += kLine, x += kLine * index_t{Tokens}) {
      ask(kk);
      dot_line<true, 0>(sum, row, kk, kLine, x);
      dot_line<true, 1>(sum, row, kk, kLine, x);
    }
    if (kk < k) {
      dot_line<false, 0>(sum, row, kk, k - kk, x);
      dot_line<false, 1>(sum, row, kk, k - kk, x);
    }
  }

  template <std::size_t Rows>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void copy_block(
      const float* from, index_t stride, index_t steps, float (&a)[Rows][std::size_t{kBlockSteps}]) {
    static_assert(kBlockSteps == 2 * 16);
    const __mmask16 low = mask16(steps), high = mask16(steps > 16 ? steps - 16 : 0);
    const index_t second = steps > 16 ? 16 : 0;  // no address behind the end of what is there
    for (std::size_t r = 0; r < Rows; ++r) {
      const float* row = from + static_cast<index_t>(r) * stride;
      _mm512_storeu_ps(a[r], _mm512_maskz_loadu_ps(low, row));
      _mm512_storeu_ps(a[r] + 16, _mm512_maskz_loadu_ps(high, row + second));
    }
  }

  // Columns [j, j + 16 Panels). Of bf16 a line is taken apart by even and odd columns, for less than half of what it takes to
  // widen its halves, and so are the sums from block to block.
  template <int Panels, std::size_t Rows, class S, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void block_tile(
      const float (&a)[Rows][std::size_t{kBlockSteps}], const S* const* b, index_t steps, index_t j,
      const SumRows& c, BlockEnds ends, Ahead& ahead) {
    constexpr bool kPairs = std::is_same_v<S, bf16>;
    __m512 sum[Rows][std::size_t{Panels}];
    load_sums(c.from(0, j), sum);
    if (kPairs && ends.first && !c.fresh) to_alternate(sum);
    for (index_t k = 0; k < steps; ++k) {
      AMX_SFT_MOE_UNROLL
      for (index_t bytes = 0; bytes < Panels * kPanelCols * index_t{sizeof(S)}; bytes += kLineBytes)
        ahead.turn();
      const S* row = b[k] + j;
      __m512 line[std::size_t{Panels}];
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < Panels; p += 2) {
        line[p] = load_half<0>(row + p * kPanelCols);
        line[p + 1] = load_half<1>(row + p * kPanelCols);
      }
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        const __m512 value = _mm512_set1_ps(a[r][k]);
        AMX_SFT_MOE_UNROLL
        for (int p = 0; p < Panels; ++p) sum[r][p] = _mm512_fmadd_ps(value, line[p], sum[r][p]);
      }
    }
    if (kPairs && ends.last) from_alternate(sum);
    store_sums(sum, c.from(0, j));
  }

  template <std::size_t Rows, std::size_t Panels>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void to_alternate(__m512 (&sum)[Rows][Panels]) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (std::size_t p = 0; p < Panels; p += 2) {
        const __m512 low = sum[r][p];
        sum[r][p] = half_in_order<0, bf16>(low, sum[r][p + 1]);
        sum[r][p + 1] = half_in_order<1, bf16>(low, sum[r][p + 1]);
      }
    }
  }
  template <std::size_t Rows, std::size_t Panels>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void from_alternate(__m512 (&sum)[Rows][Panels]) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (std::size_t p = 0; p < Panels; p += 2) {
        const __m512 even = sum[r][p];
        sum[r][p] = half_of_alternate<0>(even, sum[r][p + 1]);
        sum[r][p + 1] = half_of_alternate<1>(even, sum[r][p + 1]);
      }
    }
  }

  // Columns from j on, of which `there` are there.
  template <std::size_t Rows, class S>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void last_columns(
      const float (&a)[Rows][std::size_t{kBlockSteps}], const S* const* b, index_t steps, index_t j,
      __mmask16 there, const SumRows& c) {
    __m512 sum[Rows][1];
    load_sums(c.from(0, j), sum);
    for (index_t k = 0; k < steps; ++k) {
      const __m512 line = load16(b[k] + j, there);
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        sum[r][0] = _mm512_fmadd_ps(_mm512_set1_ps(a[r][k]), line, sum[r][0]);
      }
    }
    store_sums(sum, c.from(0, j));
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
