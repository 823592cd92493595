// Register tiles of the products for few rows of A, see arch/in_place.hpp.
#pragma once

#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/in_place.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Depth steps along K: C [Rows, cols] += a [Rows, Depth] x B's rows b[0], b[1], ... with the rows `near` and `far`
// asked for. 32 columns at a time: 2 Depth registers of B, 2 of C; a line of bf16 is 32 columns.
template <std::size_t Rows, std::size_t Depth, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void in_place_steps(const float (&a)[Rows][Depth],
                                                                 const S* const (&b)[Depth],
                                                                 const S* const (&near)[Depth],
                                                                 const S* const (&far)[Depth], index_t cols,
                                                                 float* c, index_t c_stride) {
  index_t j = 0;
  for (; j + 32 <= cols; j += 32) {
    __m512 line[Depth][2];
    AMX_SFT_MOE_UNROLL
    for (std::size_t d = 0; d < Depth; ++d) {
      line[d][0] = load16(b[d] + j);
      line[d][1] = load16(b[d] + j + 16);
      // Here, not row by row before the loop: a burst fills the line fill buffers and all loads wait.
      _mm_prefetch(reinterpret_cast<const char*>(near[d] + j), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(far[d] + j), _MM_HINT_T1);
    }
    float* to = c + j;
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r, to += c_stride) {
      __m512 low = _mm512_loadu_ps(to);
      __m512 high = _mm512_loadu_ps(to + 16);
      AMX_SFT_MOE_UNROLL
      for (std::size_t d = 0; d < Depth; ++d) {
        const __m512 value = _mm512_set1_ps(a[r][d]);
        low = _mm512_fmadd_ps(value, line[d][0], low);
        high = _mm512_fmadd_ps(value, line[d][1], high);
      }
      _mm512_storeu_ps(to, low);
      _mm512_storeu_ps(to + 16, high);
    }
  }
  for (; j < cols; j += 16) {  // C's rows have room for whole panels
    const __mmask16 lanes = mask16(cols - j);
    for (std::size_t d = 0; d < Depth; ++d) {
      const __m512 line = load16(b[d] + j, lanes);
      for (std::size_t r = 0; r < Rows; ++r) {
        float* to = c + static_cast<index_t>(r) * c_stride + j;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_set1_ps(a[r][d]), line, _mm512_loadu_ps(to)));
      }
    }
  }
}

struct InPlaceTiles {
  // C [Rows, cols] += A [Rows, k] x B [k, cols], B's columns adjacent; C, in L1, has room for whole panels.
  template <int Rows, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void rows_in_place(const float* a, index_t a_stride, const RowSource<S>& b,
                                                      index_t k, index_t cols, float* c, index_t c_stride) {
    constexpr int kDepth = 4;
    index_t kk = 0;
    for (; kk + kDepth <= k; kk += kDepth) {
      const S* row[std::size_t{kDepth}];
      const S* near[std::size_t{kDepth}];
      const S* far[std::size_t{kDepth}];
      float value[std::size_t{Rows}][std::size_t{kDepth}];
      AMX_SFT_MOE_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        row[d] = b.row(kk + d);
        near[d] = kk + kNearRows + d < k ? b.row(kk + kNearRows + d) : row[d];
        far[d] = kk + kFarRows + d < k ? b.row(kk + kFarRows + d) : row[d];
      }
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < Rows; ++r) _mm_storeu_ps(value[r], _mm_loadu_ps(a + r * a_stride + kk));
      in_place_steps(value, row, near, far, cols, c, c_stride);
    }
    for (; kk < k; ++kk) {
      const S* row[1] = {b.row(kk)};
      float value[std::size_t{Rows}][1];
      for (int r = 0; r < Rows; ++r) value[r][0] = a[r * a_stride + kk];
      in_place_steps(value, row, row, row, cols, c, c_stride);
    }
  }

  // C [Tokens, Rows] += X [Tokens, k] x rows^T.
  template <int Rows, int Tokens, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void dot(const S* const* row, const S* const* far, index_t far_shift,
                                            const float* x, index_t x_stride, index_t k, float* c,
                                            index_t c_stride) {
    constexpr index_t kChunk = 64 / static_cast<index_t>(sizeof(S));  // a line of W
    __m512 sum[std::size_t{Rows}][std::size_t{Tokens}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    index_t kk = 0;
    for (; kk + kChunk <= k; kk += kChunk) {
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        _mm_prefetch(reinterpret_cast<const char*>(row[r] + kk) + kNearBytes, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(far[r] + (kk >> far_shift)), _MM_HINT_T1);
      }
      for (index_t at = kk; at < kk + kChunk; at += 16) {
        __m512 line[std::size_t{Rows}];
        AMX_SFT_MOE_UNROLL
        for (int r = 0; r < Rows; ++r) line[r] = load16(row[r] + at);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < Tokens; ++t) {
          const __m512 value = _mm512_loadu_ps(x + t * x_stride + at);
          AMX_SFT_MOE_UNROLL
          for (int r = 0; r < Rows; ++r) sum[r][t] = _mm512_fmadd_ps(line[r], value, sum[r][t]);
        }
      }
    }
    for (; kk < k; kk += 16) {
      const __mmask16 lanes = mask16(k - kk);
      AMX_SFT_MOE_UNROLL  // accumulators that a loop indexes would lie in memory
          for (int r = 0; r < Rows; ++r) {
        const __m512 line = load16(row[r] + kk, lanes);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < Tokens; ++t) {
          sum[r][t] = _mm512_fmadd_ps(line, load16(x + t * x_stride + kk, lanes), sum[r][t]);
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int t = 0; t < Tokens; ++t) c[t * c_stride + r] += _mm512_reduce_add_ps(sum[r][t]);
    }
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
