// The fp32 microkernel of AVX512: broadcast an element of A's row, fused multiply-add with two cache lines of
// packed B.
#pragma once

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
      for (index_t k = 0; k < segment.k; ++k, b += kPanelCols) {
        __m512 line[std::size_t{kPanels}];
        AMX_SFT_MOE_UNROLL
        for (int p = 0; p < kPanels; ++p) {
          line[p] = _mm512_loadu_ps(b + p * segment.panel_stride);
        }
        AMX_SFT_MOE_UNROLL
        for (int r = 0; r < Rows; ++r) {
          const __m512 value = _mm512_set1_ps(a[r * segment.a_stride + k]);
          AMX_SFT_MOE_UNROLL
          for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_fmadd_ps(value, line[p], sum[r][p]);
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(c + r * c_stride + p * kPanelCols, sum[r][p]);
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
