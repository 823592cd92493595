// The fp32 microkernels of AVX2. The register tile: broadcast an element of A's row, fused multiply-add with a
// step of packed B. And for few tokens, two products that read the weights where they lie.
#pragma once

#include <algorithm>

#include "amx_sft_moe/arch/avx2/vector.hpp"
#include "amx_sft_moe/arch/register_tiles.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 6 rows x 16 columns: 12 accumulators, 2 registers of B, 1 broadcast of the 16 ymm. Latency times rate is 10
// on Haswell, 8 since. 12 FMA ask for 8 loads, of which every CPU does two a cycle: 4 of the 6 cycles. 4 x 24
// would ask for 7, but panels are 16 wide. 48 rows are eight tiles and whole 8 x 8 transpositions of the
// result; C stays in L1.
// 8 x 8 where at most 8 columns are left: half the arithmetic. 12 x 8 was no faster: twelve row pointers do not
// fit the general registers. Blocks of 8 rows there: what is staged of them is 64 KiB at K = 2048.
struct Avx2Microkernel : RegisterTiles<Avx2Microkernel, float, 6, kPanelCols, 48, 8, 8> {
  template <int Rows, int Cols>
  AMX_SFT_MOE_TARGET_AVX2 static void tile(const Segments<float>& segments, index_t i, index_t j, float* c,
                                           index_t c_stride) {
    constexpr int kVectors = Cols / 8;
    constexpr index_t kChunk = 32;  // steps between two prefetches of a row: a line of bf16
    __m256 sum[std::size_t{Rows}][std::size_t{kVectors}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_setzero_ps();
    }
    for (int s = 0; s < segments.count; ++s) {
      const Segment<float>& segment = segments.at[s];
      const float* a = segment.a + i * segment.a_stride;
      const float* b = segment.b + j / kPanelCols * segment.panel_stride + j % kPanelCols;
      for (index_t k = 0; k < segment.k;) {
        const index_t stop = k + kChunk < segment.k ? k + kChunk : segment.k;
        if (s == 0) segments.ahead.prefetch(i, Rows, k, stop);
        for (; k < stop; ++k, b += kPanelCols) {
          __m256 line[std::size_t{kVectors}];
          AMX_SFT_MOE_UNROLL
          for (int v = 0; v < kVectors; ++v) line[v] = _mm256_loadu_ps(b + 8 * v);
          AMX_SFT_MOE_UNROLL
          for (int r = 0; r < Rows; ++r) {
            const __m256 value = _mm256_set1_ps(a[r * segment.a_stride + k]);
            AMX_SFT_MOE_UNROLL
            for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_fmadd_ps(value, line[v], sum[r][v]);
          }
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(c + r * c_stride + 8 * v, sum[r][v]);
    }
  }

  // C [rows, cols] += A [rows, k] x B [k, cols], B as it lies with its columns adjacent; C, in L1, has room for
  // whole panels.
  // Four of B's rows meet in C's registers, 16 columns wide: 8 registers of B, 2 of C, 1 broadcast.
  static constexpr int kInPlaceRows = 8;
  template <class S>
  static void multiply_in_place(const float* a, index_t a_stride, index_t rows, const RowSource<S>& b,
                                index_t k, index_t cols, float* c, index_t c_stride) {
    in_place_of<S>(rows)(a, a_stride, b, k, cols, c, c_stride);
  }

  // C [rows, tokens] += W [rows, k] x x^T with W as it lies, its columns adjacent, and x [tokens, k]. W's rows
  // up to `below` may be prefetched.
  template <class S>
  static void dot_in_place(const RowSource<S>& w, index_t rows, index_t below, const float* x, index_t x_stride,
                           index_t tokens, index_t k, float* c, index_t c_stride) {
    for (index_t i = 0; i < rows; i += kDotRows) {
      for (index_t t = 0; t < tokens; t += kDotTokens) {
        // Each pass over these rows asks for its share of the next ones: memory does not wait for arithmetic.
        const index_t from = t > 0 ? k / 2 : 0;
        const index_t shift = tokens > kDotTokens ? 1 : 0;
        dot_of<S>(rows - i, tokens - t)(w, i, below - 1, from, shift, x + t * x_stride, x_stride, k,
                                        c + i * c_stride + t, c_stride);
      }
    }
  }

 private:
  // 3 rows x 4 tokens: 12 accumulators, 3 registers of W, 1 of x.
  static constexpr int kDotRows = 3;
  static constexpr int kDotTokens = 4;
  template <class S>
  using Dot = void (*)(const RowSource<S>&, index_t, index_t, index_t, index_t, const float*, index_t, index_t,
                       float*, index_t);
  template <class S>
  static Dot<S> dot_of(index_t rows, index_t tokens) {
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Dot<S> kOf[] = {&dot<N / kDotTokens + 1, N % kDotTokens + 1, S>...};
      return kOf[n];
    }((std::min<index_t>(rows, kDotRows) - 1) * kDotTokens + std::min<index_t>(tokens, kDotTokens) - 1,
           std::make_integer_sequence<int, kDotRows * kDotTokens>{});
  }

  template <int Rows, int Tokens, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void dot(const RowSource<S>& w, index_t i, index_t last, index_t from,
                                          index_t shift, const float* x, index_t x_stride, index_t k, float* c,
                                          index_t c_stride) {
    constexpr index_t kChunk = 64 / static_cast<index_t>(sizeof(S));
    __m256 sum[std::size_t{Rows}][std::size_t{Tokens}];
    const S* row[std::size_t{Rows}];
    const S* ahead[std::size_t{Rows}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      row[r] = w.row(i + r);
      ahead[r] = w.row(std::min(i + kDotRows + r, last)) + from;
      AMX_SFT_MOE_UNROLL
      for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm256_setzero_ps();
    }
    index_t kk = 0;
    for (; kk + kChunk <= k; kk += kChunk) {
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < Rows; ++r)
        _mm_prefetch(reinterpret_cast<const char*>(ahead[r] + (kk >> shift)), _MM_HINT_T0);
      for (index_t at = kk; at < kk + kChunk; at += 8) {
        __m256 line[std::size_t{Rows}];
        AMX_SFT_MOE_UNROLL
        for (int r = 0; r < Rows; ++r) line[r] = avx2::load8(row[r] + at);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < Tokens; ++t) {
          const __m256 value = _mm256_loadu_ps(x + t * x_stride + at);
          AMX_SFT_MOE_UNROLL
          for (int r = 0; r < Rows; ++r) sum[r][t] = _mm256_fmadd_ps(line[r], value, sum[r][t]);
        }
      }
    }
    for (; kk < k; kk += 8) {
      AMX_SFT_MOE_UNROLL  // accumulators that a loop indexes would lie in memory
          for (int r = 0; r < Rows; ++r) {
        const __m256 line = avx2::load8(row[r] + kk, k - kk);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < Tokens; ++t) {
          sum[r][t] = _mm256_fmadd_ps(line, avx2::load8(x + t * x_stride + kk, k - kk), sum[r][t]);
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int t = 0; t < Tokens; ++t) c[r * c_stride + t] += avx2::sum_lanes(sum[r][t]);
    }
  }

  template <class S>
  using InPlace = void (*)(const float*, index_t, const RowSource<S>&, index_t, index_t, float*, index_t);
  template <class S>
  static InPlace<S> in_place_of(index_t rows) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr InPlace<S> kOf[] = {&in_place<Less + 1, S>...};
      return kOf[n - 1];
    }(rows, std::make_integer_sequence<int, kInPlaceRows>{});
  }

  template <int Rows, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void in_place(const float* a, index_t a_stride, const RowSource<S>& b,
                                               index_t k, index_t cols, float* c, index_t c_stride) {
    constexpr int kDepth = 4;
    constexpr index_t kAhead = 16;  // rows of B; 8 was 0.70 instead of 0.74 of the bandwidth for 8 rows of A
    index_t kk = 0;
    for (; kk + kDepth <= k; kk += kDepth) {
      const S* row[std::size_t{kDepth}];
      const S* ahead[std::size_t{kDepth}];
      float value[std::size_t{Rows}][std::size_t{kDepth}];
      AMX_SFT_MOE_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        row[d] = b.row(kk + d);
        ahead[d] = kk + kAhead + d < k ? b.row(kk + kAhead + d) : row[d];
      }
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < Rows; ++r) _mm_storeu_ps(value[r], _mm_loadu_ps(a + r * a_stride + kk));
      steps(value, row, ahead, cols, c, c_stride);
    }
    for (; kk < k; ++kk) {
      const S* row[1] = {b.row(kk)};
      float value[std::size_t{Rows}][1];
      for (int r = 0; r < Rows; ++r) value[r][0] = a[r * a_stride + kk];
      steps(value, row, row, cols, c, c_stride);
    }
  }

  // Depth steps along K.
  template <std::size_t Rows, std::size_t Depth, class S>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void steps(const float (&a)[Rows][Depth],
                                                               const S* const (&b)[Depth],
                                                               const S* const (&ahead)[Depth], index_t cols,
                                                               float* c, index_t c_stride) {
    index_t j = 0;
    for (; j + 16 <= cols; j += 16) {
      __m256 line[Depth][2];
      AMX_SFT_MOE_UNROLL
      for (std::size_t d = 0; d < Depth; ++d) {
        line[d][0] = avx2::load8(b[d] + j);
        line[d][1] = avx2::load8(b[d] + j + 8);
        // Here, not row by row before the loop: a burst fills the line fill buffers and all loads wait.
        _mm_prefetch(reinterpret_cast<const char*>(ahead[d] + j), _MM_HINT_T0);
      }
      float* to = c + j;
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r, to += c_stride) {
        __m256 low = _mm256_loadu_ps(to);
        __m256 high = _mm256_loadu_ps(to + 8);
        AMX_SFT_MOE_UNROLL
        for (std::size_t d = 0; d < Depth; ++d) {
          const __m256 value = _mm256_set1_ps(a[r][d]);
          low = _mm256_fmadd_ps(value, line[d][0], low);
          high = _mm256_fmadd_ps(value, line[d][1], high);
        }
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
      }
    }
    for (; j < cols; j += 8) {  // C's rows have room for whole panels
      for (std::size_t d = 0; d < Depth; ++d) {
        const __m256 line = avx2::load8(b[d] + j, cols - j);
        for (std::size_t r = 0; r < Rows; ++r) {
          float* to = c + static_cast<index_t>(r) * c_stride + j;
          const __m256 value = _mm256_set1_ps(a[r][d]);
          _mm256_storeu_ps(to, _mm256_fmadd_ps(value, line, _mm256_loadu_ps(to)));
        }
      }
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
