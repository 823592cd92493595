// The fp32 microkernel of AVX512: broadcast an element of A's row, fused multiply-add with two cache lines of
// packed B.
#pragma once

#include "amx_sft_moe/arch/avx512/in_place.hpp"
#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/register_tiles.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 12 rows x 2 panels: 24 accumulators, 2 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B
// serves 12 products, each broadcast 2. Latency times rate is 8: 12 accumulators would do.
// 48 rows are four tiles and three 16 x 16 transpositions of the result; C stays in L1.
// 16 x 16 for at most 16 columns (tokens of gemm_nt), in blocks of 16 rows: what is staged of them is 128 KiB at
// K = 2048. Blocks of 48 read 0.53 instead of 0.71 of the bandwidth at 8 tokens.
struct Avx512Microkernel : RegisterTiles<Avx512Microkernel, float, 12, 2 * kPanelCols, 48, 16, 16> {
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

  // See avx512::multiply_in_place. At 16 rows 0.70 of the bandwidth instead of 0.44 by packed panels, at 8 all of it.
  static constexpr int kInPlaceRows = 16;
  template <class S>
  static void multiply_in_place(const float* a, index_t a_stride, index_t rows, const RowSource<S>& b,
                                index_t k, index_t cols, float* c, index_t c_stride) {
    in_place_of<S>(rows)(a, a_stride, b, k, cols, c, c_stride);
  }

 private:
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
