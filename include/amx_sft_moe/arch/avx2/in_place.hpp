// Register tiles of products for few rows of A, or few tokens, that read B or W where it lies: see in_place_blocks.hpp,
// in_place_dots.hpp and dot_blocks.hpp of arch/.
#pragma once

#include <algorithm>

#include "amx_sft_moe/arch/avx2/vector.hpp"
#include "amx_sft_moe/arch/in_place_blocks.hpp"
#include "amx_sft_moe/arch/in_place_dots.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

// Two vectors, in the order of memory: to take bf16 apart by even and odd places wants a mask, and 12 accumulators,
// 3 lines and 1 x are all 16 registers.
inline constexpr index_t kLine = 2 * kLanes;

// sum [Rows][Tokens] += one half of a line of each row, of which n elements are there, times x, a line of each token
// after the other.
template <bool Whole, int Half, std::size_t Rows, std::size_t Tokens, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void dot_line(__m256 (&sum)[Rows][Tokens], const S* const* row,
                                                         index_t kk, index_t n, const float* x) {
  __m256 line[Rows];
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    const S* from = row[r] + kk + Half * kLanes;
    line[r] = Whole ? load8(from) : load8(from, n - Half * kLanes);
  }
  AMX_SFT_MOE_UNROLL
  for (std::size_t t = 0; t < Tokens; ++t) {
    const __m256 value = _mm256_loadu_ps(x + static_cast<index_t>(2 * t + Half) * kLanes);
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) sum[r][t] = _mm256_fmadd_ps(line[r], value, sum[r][t]);
  }
}

struct InPlaceTiles {
  using Element = float;
  static constexpr index_t kLine = avx2::kLine;

  // 6 rows x 16 columns: 12 accumulators, 2 registers of B, 1 broadcast of the 16 ymm. Of few rows more columns, see
  // arch/avx512/in_place.hpp.
  static constexpr index_t kLeastRows = 1, kRows = 6, kSteps = kBlockSteps;
  template <int Rows, class S, class Ahead>
  AMX_SFT_MOE_TARGET_AVX2 static void block(const float* from, index_t from_stride, const S* const* b,
                                            index_t steps, index_t cols, const SumRows& c, BlockEnds /*ends*/,
                                            Ahead& ahead) {
    constexpr int kVectors = Rows <= 3 ? 4 : 2;
    alignas(32) float a[std::size_t{Rows}][std::size_t{kBlockSteps}];
    for (int r = 0; r < Rows; ++r) {
      const float* row = from + r * from_stride;
      for (index_t k = 0; k < steps; k += kLanes) _mm256_store_ps(a[r] + k, load8(row + k, steps - k));
    }
    Ahead asked = ahead;
    index_t j = 0;
    for (; j + kVectors * kLanes <= cols; j += kVectors * kLanes) {
      block_tile<kVectors, true>(a, b, steps, j, kLanes, c, asked);
    }
    for (; j + kLanes <= cols; j += kLanes) block_tile<1, true>(a, b, steps, j, kLanes, c, asked);
    if (j < cols) block_tile<1, false>(a, b, steps, j, cols - j, c, asked);
    ahead = asked;
  }

  // X [tokens, k] -> [k / kLine][tokens][kLine], zeros behind k.
  template <class S>
  AMX_SFT_MOE_TARGET_AVX2 static void order(const float* x, index_t x_stride, index_t tokens, index_t k,
                                            float* to) {
    for (index_t kk = 0; kk < k; kk += kLine) {
      for (index_t t = 0; t < tokens; ++t, to += kLine) {
        const float* from = x + t * x_stride + kk;
        _mm256_storeu_ps(to, load8(from, k - kk));
        _mm256_storeu_ps(to + kLanes, load8(from + kLanes, k - kk - kLanes));
      }
    }
  }

  // C [Tokens, Rows] += X [Tokens, k] x rows^T, X in that order.
  template <int Rows, int Tokens, class S, class Ahead>
  AMX_SFT_MOE_TARGET_AVX2 static void dot(const S* const* row, const float* x, index_t k, const SumRows& c,
                                          Ahead& ahead) {
    __m256 sum[std::size_t{Rows}][std::size_t{Tokens}];
    clear_sums(sum);
    add_dots(sum, row, x, k, [&](index_t kk, bool first) { ahead.template turn<Rows>(row, kk, first); });
    store_dots(sum, c);
  }

  // The same of a part of K, three rows at a time.
  static constexpr index_t kSumLanes = kLanes;
  template <int Tokens, int Lines, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void dot_part(const DotPart<S>& part, const float* x, const SumRows& c,
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
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void dot_tile(const DotPart<S>& part, index_t o,
                                                                  const float* x, const SumRows& c,
                                                                  LinesOfTile<Lines> lines) {
    const S* row[3];
    for (index_t r = 0; r < 3; ++r) row[r] = part.w + std::min(o + r, part.rows - 1) * part.row_stride;
    __m256 sum[3][std::size_t{Tokens}];
    const SumRows sums{part.sums + o * Tokens * kSumLanes, Tokens * kSumLanes, false};
    clear_sums(sum);
    if (!part.first) load_sums(sums, sum);
    add_dots(sum, row, x, part.k, [&](index_t /*kk*/, bool /*first*/) { lines.turn(); });
    part.last ? store_dots(sum, c) : store_sums(sum, sums);
  }

  template <std::size_t Rows, std::size_t Tokens>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void clear_sums(__m256 (&sum)[Rows][Tokens]) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (std::size_t t = 0; t < Tokens; ++t) sum[r][t] = _mm256_setzero_ps();
    }
  }

  // With ask(kk, first) before each cache line of the rows, `first` once for kLine elements.
  template <std::size_t Rows, std::size_t Tokens, class S, class Ask>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void add_dots(__m256 (&sum)[Rows][Tokens],
                                                                  const S* const* row, const float* x,
                                                                  index_t k, const Ask& ask) {
    constexpr index_t kCacheLine = kLineBytes / static_cast<index_t>(sizeof(S));
    constexpr index_t kStep = std::max(kLine, kCacheLine);
    constexpr index_t kTokens = Tokens;
    index_t kk = 0;
    for (; kk + kStep <= k; kk += kStep) {
      AMX_SFT_MOE_UNROLL
      for (index_t at = kk; at < kk + kStep; at += kCacheLine) ask(at, at == kk);
      AMX_SFT_MOE_UNROLL
      for (index_t at = kk; at < kk + kStep; at += kLine, x += kLine * kTokens) {
        dot_line<true, 0>(sum, row, at, kLine, x);
        dot_line<true, 1>(sum, row, at, kLine, x);
      }
    }
    for (; kk + kLine <= k; kk += kLine, x += kLine * kTokens) {
      dot_line<true, 0>(sum, row, kk, kLine, x);
      dot_line<true, 1>(sum, row, kk, kLine, x);
    }
    if (kk < k) {
      dot_line<false, 0>(sum, row, kk, k - kk, x);
      dot_line<false, 1>(sum, row, kk, k - kk, x);
    }
  }

  // C [Tokens, Rows] += the sums over the lanes of each.
  template <std::size_t Rows, std::size_t Tokens>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void store_dots(const __m256 (&sum)[Rows][Tokens],
                                                                    const SumRows& c) {
    static_assert(Rows <= 3);
    constexpr std::size_t kSecond = Rows > 1 ? 1 : 0, kThird = Rows > 2 ? 2 : 0;
    AMX_SFT_MOE_UNROLL
    for (std::size_t t = 0; t < Tokens; ++t) {
      alignas(16) float of_row[4];
      _mm_store_ps(of_row, sum_lanes(sum[0][t], sum[kSecond][t], sum[kThird][t], sum[0][t]));
      float* to = c.data + static_cast<index_t>(t) * c.stride;
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) to[r] = c.fresh ? of_row[r] : to[r] + of_row[r];
    }
  }

  // Columns [j, j + 8 Vectors), or the first n of the 8 from j on.
  template <int Vectors, bool Whole, std::size_t Rows, class S, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void block_tile(
      const float (&a)[Rows][std::size_t{kBlockSteps}], const S* const* b, index_t steps, index_t j, index_t n,
      const SumRows& c, Ahead& ahead) {
    static_assert(Whole || Vectors == 1);
    constexpr index_t kBytes = Vectors * kLanes * index_t{sizeof(S)};
    constexpr index_t kStepsOfLine = ceil_div(kLineBytes, kBytes);
    __m256 sum[Rows][std::size_t{Vectors}];
    load_sums(c.from(0, j), sum);
    for (index_t k = 0; k < steps; ++k) {
      if (k % kStepsOfLine == 0) {
        AMX_SFT_MOE_UNROLL
        for (index_t bytes = 0; bytes < kBytes; bytes += kLineBytes) ahead.turn();
      }
      const S* row = b[k] + j;
      __m256 line[std::size_t{Vectors}];
      AMX_SFT_MOE_UNROLL
      for (int v = 0; v < Vectors; ++v) line[v] = Whole ? load8(row + v * kLanes) : load8(row, n);
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        const __m256 value = _mm256_set1_ps(a[r][k]);
        AMX_SFT_MOE_UNROLL
        for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm256_fmadd_ps(value, line[v], sum[r][v]);
      }
    }
    store_sums(sum, c.from(0, j));
  }
};

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
