// Register tiles of the products for few rows of A, see arch/in_place.hpp.
#pragma once

#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/in_place.hpp"

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

// Asks for what follows a line of each row, into L1, and for what DotAhead asks.
template <std::size_t Rows, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void ask_ahead(const S* const* row, DotAhead<S>& ahead,
                                                            index_t kk) {
  constexpr index_t kCacheLine = kLineBytes / static_cast<index_t>(sizeof(S));
  for (index_t at = kk; at < kk + kLine; at += kCacheLine) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) _mm_prefetch(bytes_behind(row[r] + at, kNearBytes), _MM_HINT_T0);
    ahead.template turn<static_cast<int>(Rows)>(at, at == kk);
  }
}

struct InPlaceTiles {
  using Element = float;
  static constexpr index_t kLine = avx512::kLine, kTurnColumns = 32;

  // 32 columns at a time: 2 Depth registers of B, 2 of C; a line of bf16 is 32 columns.
  template <std::size_t Rows, std::size_t Depth, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void add_steps(InPlaceSteps<float, Rows, Depth, S> steps, index_t cols,
                                                  SumRows c, LeadingPrefetch* ahead) {
    const __mmask16 there = lanes_there(c);
    index_t j = 0;
    for (; j + kTurnColumns <= cols; j += kTurnColumns) {
      if (ahead != nullptr) ahead->turn();
      __m512 line[Depth][2];
      AMX_SFT_MOE_UNROLL
      for (std::size_t d = 0; d < Depth; ++d) {
        line[d][0] = load16(steps.b[d] + j);
        line[d][1] = load16(steps.b[d] + j + 16);
        // Here, not row by row before the loop: a burst fills the line fill buffers and all loads wait.
        if (Rows <= kWaitingRows || steps.asks_near) {
          _mm_prefetch(reinterpret_cast<const char*>(steps.near[d] + j), _MM_HINT_T0);
        }
      }
      float* to = c.data + j;
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r, to += c.stride) {
        __m512 low = _mm512_maskz_loadu_ps(there, to);
        __m512 high = _mm512_maskz_loadu_ps(there, to + 16);
        AMX_SFT_MOE_UNROLL
        for (std::size_t d = 0; d < Depth; ++d) {
          const __m512 value = _mm512_set1_ps(steps.a[r][d]);
          low = _mm512_fmadd_ps(value, line[d][0], low);
          high = _mm512_fmadd_ps(value, line[d][1], high);
        }
        _mm512_storeu_ps(to, low);
        _mm512_storeu_ps(to + 16, high);
      }
    }
    for (; j < cols; j += 16) {
      __m512 line[Depth];
      for (std::size_t d = 0; d < Depth; ++d) line[d] = load16(steps.b[d] + j, mask16(cols - j));
      for (std::size_t r = 0; r < Rows; ++r) {
        float* to = c.data + static_cast<index_t>(r) * c.stride + j;
        __m512 sum = _mm512_maskz_loadu_ps(there, to);
        for (std::size_t d = 0; d < Depth; ++d)
          sum = _mm512_fmadd_ps(_mm512_set1_ps(steps.a[r][d]), line[d], sum);
        _mm512_storeu_ps(to, sum);
      }
    }
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
  template <int Rows, int Tokens, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void dot(const S* const* row, const float* x, index_t k, const SumRows& c,
                                            DotAhead<S>& ahead) {
    __m512 sum[std::size_t{Rows}][std::size_t{Tokens}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    index_t kk = 0;
    for (; kk + kLine <= k; kk += kLine, x += kLine * Tokens) {
      ask_ahead<std::size_t{Rows}>(row, ahead, kk);
      dot_line<true, 0>(sum, row, kk, kLine, x);
      dot_line<true, 1>(sum, row, kk, kLine, x);
    }
    if (kk < k) {
      dot_line<false, 0>(sum, row, kk, k - kk, x);
      dot_line<false, 1>(sum, row, kk, k - kk, x);
    }
    store_dots(sum, c);
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
