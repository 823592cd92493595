// The fp32 microkernel of AVX2: broadcast an element of A's row, fused multiply-add with a step of packed B.
#pragma once

#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/register_tiles.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 6 rows x 16 columns: 12 accumulators, 2 registers of B, 1 broadcast of the 16 ymm. Latency times rate is 10 on
// Haswell, 8 since. 12 FMA ask for 8 loads, two of them a cycle at least: loads take 4 of the 6 cycles. 4 x 24
// would ask for 7, but panels are 16 wide.
// 48 rows are eight tiles and whole 8 x 8 transpositions of the result; C stays in L1.
struct Avx2Microkernel : RegisterTiles<Avx2Microkernel, float, 6, kPanelCols, 48> {
  template <int Rows, int Cols>
  AMX_SFT_MOE_TARGET_AVX2 static void tile(const Segments<float>& segments, index_t i, index_t j, float* c,
                                           index_t c_stride) {
    constexpr int kVectors = Cols / 8;
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
      for (index_t k = 0; k < segment.k; ++k, b += kPanelCols) {
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
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(c + r * c_stride + 8 * v, sum[r][v]);
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
