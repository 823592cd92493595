// Register tiles of the products for few rows of A, see arch/in_place.hpp.
#pragma once

#include <algorithm>

#include "amx_sft_moe/arch/avx2/vector.hpp"
#include "amx_sft_moe/arch/in_place.hpp"

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
  static constexpr index_t kLine = avx2::kLine, kTurnColumns = 32;

  // 16 columns at a time: 2 Depth registers of B, 2 of C, 1 broadcast.
  template <std::size_t Rows, std::size_t Depth, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void add_steps(InPlaceSteps<float, Rows, Depth, S> steps, index_t cols,
                                                SumRows c, LeadingPrefetch* ahead) {
    const __m256 there = sums_there(c);
    index_t j = 0;
    for (; j + 16 <= cols; j += 16) {
      if (ahead != nullptr && j % kTurnColumns == 0) ahead->turn();
      __m256 line[Depth][2];
      AMX_SFT_MOE_UNROLL
      for (std::size_t d = 0; d < Depth; ++d) {
        line[d][0] = load8(steps.b[d] + j);
        line[d][1] = load8(steps.b[d] + j + 8);
        // Here, not row by row before the loop: a burst fills the line fill buffers and all loads wait.
        if (Rows <= kWaitingRows || steps.asks_near) {
          _mm_prefetch(reinterpret_cast<const char*>(steps.near[d] + j), _MM_HINT_T0);
        }
      }
      float* to = c.data + j;
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r, to += c.stride) {
        __m256 low = load_sums(to, there);
        __m256 high = load_sums(to + 8, there);
        AMX_SFT_MOE_UNROLL
        for (std::size_t d = 0; d < Depth; ++d) {
          const __m256 value = _mm256_set1_ps(steps.a[r][d]);
          low = _mm256_fmadd_ps(value, line[d][0], low);
          high = _mm256_fmadd_ps(value, line[d][1], high);
        }
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
      }
    }
    for (; j < cols; j += 8) {
      __m256 line[Depth];
      for (std::size_t d = 0; d < Depth; ++d) line[d] = load8(steps.b[d] + j, cols - j);
      for (std::size_t r = 0; r < Rows; ++r) {
        float* to = c.data + static_cast<index_t>(r) * c.stride + j;
        __m256 sum = load_sums(to, there);
        for (std::size_t d = 0; d < Depth; ++d)
          sum = _mm256_fmadd_ps(_mm256_set1_ps(steps.a[r][d]), line[d], sum);
        _mm256_storeu_ps(to, sum);
      }
    }
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
  template <int Rows, int Tokens, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void dot(const S* const* row, const float* x, index_t k, const SumRows& c,
                                          DotAhead<S>& ahead) {
    constexpr index_t kCacheLine = kLineBytes / static_cast<index_t>(sizeof(S));
    constexpr index_t kStep = std::max(kLine, kCacheLine);
    __m256 sum[std::size_t{Rows}][std::size_t{Tokens}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm256_setzero_ps();
    }
    index_t kk = 0;
    for (; kk + kStep <= k; kk += kStep) {
      AMX_SFT_MOE_UNROLL
      for (index_t at = kk; at < kk + kStep; at += kCacheLine) {
        AMX_SFT_MOE_UNROLL
        for (int r = 0; r < Rows; ++r) _mm_prefetch(bytes_behind(row[r] + at, kNearBytes), _MM_HINT_T0);
        ahead.template turn<Rows>(at, at == kk);
      }
      AMX_SFT_MOE_UNROLL
      for (index_t at = kk; at < kk + kStep; at += kLine, x += kLine * Tokens) {
        dot_line<true, 0>(sum, row, at, kLine, x);
        dot_line<true, 1>(sum, row, at, kLine, x);
      }
    }
    for (; kk + kLine <= k; kk += kLine, x += kLine * Tokens) {
      dot_line<true, 0>(sum, row, kk, kLine, x);
      dot_line<true, 1>(sum, row, kk, kLine, x);
    }
    if (kk < k) {
      dot_line<false, 0>(sum, row, kk, k - kk, x);
      dot_line<false, 1>(sum, row, kk, k - kk, x);
    }
    static_assert(Rows <= 3);
    constexpr int kSecond = Rows > 1 ? 1 : 0;
    constexpr int kThird = Rows > 2 ? 2 : 0;
    AMX_SFT_MOE_UNROLL
    for (int t = 0; t < Tokens; ++t) {
      alignas(16) float of_row[4];
      _mm_store_ps(of_row, sum_lanes(sum[0][t], sum[kSecond][t], sum[kThird][t], sum[0][t]));
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        float& to = c.data[t * c.stride + r];
        to = c.fresh ? of_row[r] : to + of_row[r];
      }
    }
  }
};

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
