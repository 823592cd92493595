// The fp32 microkernel of AVX512: broadcast an element of A's row, fused multiply-add with two cache lines of
// packed B.
#pragma once

#include <algorithm>

#include "amx_sft_moe/arch/avx512/in_place.hpp"
#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/register_tiles.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 12 rows x 2 panels: 24 accumulators, 2 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B
// serves 12 products, each broadcast 2. Latency times rate is 8: 12 accumulators would do.
// 48 rows are four tiles and three 16 x 16 transpositions of the result; C stays in L1.
struct Avx512Microkernel : RegisterTiles<Avx512Microkernel, float, 12, 2 * kPanelCols, 48> {
  template <int Rows, int Cols>
  AMX_SFT_MOE_TARGET_AVX512 static void tile(const Segments<float>& segments, index_t i, index_t j, float* c,
                                             index_t c_stride) {
    constexpr int kPanels = Cols / kPanelCols;
    constexpr index_t kChunk = 32;  // steps between two prefetches of a row: a line of bf16
    __m512 sum[std::size_t{Rows}][std::size_t{kPanels}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_setzero_ps();
    }
    for (int s = 0; s < segments.count; ++s) {
      const Segment<float>& segment = segments.at[s];
      const float* a = segment.a + i * segment.a_stride;
      const float* b = segment.b + j / kPanelCols * segment.panel_stride;
      for (index_t k = 0; k < segment.k;) {
        const index_t stop = k + kChunk < segment.k ? k + kChunk : segment.k;
        if (s == 0) segments.ahead.prefetch(i, Rows, k, stop);
        for (; k < stop; ++k, b += kPanelCols) {
          __m512 line[std::size_t{kPanels}];
          AMX_SFT_MOE_UNROLL
          for (int p = 0; p < kPanels; ++p) line[p] = _mm512_loadu_ps(b + p * segment.panel_stride);
          AMX_SFT_MOE_UNROLL
          for (int r = 0; r < Rows; ++r) {
            const __m512 value = _mm512_set1_ps(a[r * segment.a_stride + k]);
            AMX_SFT_MOE_UNROLL
            for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_fmadd_ps(value, line[p], sum[r][p]);
          }
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(c + r * c_stride + p * kPanelCols, sum[r][p]);
    }
  }

  // Rows of A in gemm_nn, tokens in gemm_nt, up to which weights are read in place. gemm_nn of 16 rows reads
  // 0.70 of the bandwidth instead of 0.44 by packed panels, of 8 all of it.
  static constexpr int kInPlaceRows = 16;

  // C [rows, cols] += A [rows, k] x B [k, cols], see avx512::multiply_in_place.
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
        const index_t next = t == 0 ? kDotRows : 0;
        const S* row[std::size_t{kDotRows}];
        const S* ahead[std::size_t{kDotRows}];
        for (index_t r = 0; r < kDotRows; ++r) {
          row[r] = w.row(std::min(i + r, rows - 1));
          ahead[r] = w.row(std::min(i + r + next, below - 1));
        }
        dot_of<S>(rows - i, tokens - t)(row, ahead, x + t * x_stride, x_stride, k, c + i * c_stride + t,
                                        c_stride);
      }
    }
  }

 private:
  // 3 rows x 8 tokens: 24 accumulators, 3 registers of W, 1 of x.
  static constexpr int kDotRows = 3;
  static constexpr int kDotTokens = 8;
  template <class S>
  using Dot = void (*)(const S* const*, const S* const*, const float*, index_t, index_t, float*, index_t);
  template <class S>
  static Dot<S> dot_of(index_t rows, index_t tokens) {
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Dot<S> kOf[] = {&avx512::dot<N / kDotTokens + 1, N % kDotTokens + 1, S>...};
      return kOf[n];
    }((std::min<index_t>(rows, kDotRows) - 1) * kDotTokens + std::min<index_t>(tokens, kDotTokens) - 1,
           std::make_integer_sequence<int, kDotRows * kDotTokens>{});
  }

  template <class S>
  using InPlace = void (*)(const float*, index_t, const RowSource<S>&, index_t, index_t, float*, index_t);
  template <class S>
  static InPlace<S> in_place_of(index_t rows) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr InPlace<S> kOf[] = {&avx512::multiply_in_place<Less + 1, S>...};
      return kOf[n - 1];
    }(rows, std::make_integer_sequence<int, kInPlaceRows>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
