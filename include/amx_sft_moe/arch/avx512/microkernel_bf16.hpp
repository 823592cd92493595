// The AVX512-BF16 microkernel: broadcast a pair of A's row, VDPBF16PS with two cache lines of packed B.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/register_tiles.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 12 rows x 2 panels: 24 accumulators, 2 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B
// serves 12 products, each broadcast 2. Latency times rate is 8 to 12: 12 accumulators would do.
// 48 rows are four tiles and three 16 x 16 transpositions of the result; C stays in L1.
struct Avx512Bf16Microkernel : RegisterTiles<Avx512Bf16Microkernel, bf16, 12, 2 * kPanelCols, 48> {
  template <int Rows, int Cols>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void tile(const Segments<bf16>& segments, index_t i, index_t j,
                                                  float* c, index_t c_stride) {
    constexpr int kPanels = Cols / kPanelCols;
    constexpr index_t kChunk = 32;  // steps between two prefetches of a row: a line of bf16
    __m512 sum[std::size_t{Rows}][std::size_t{kPanels}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_setzero_ps();
    }
    for (int s = 0; s < segments.count; ++s) {
      const Segment<bf16>& segment = segments.at[s];
      const bf16* a = segment.a + i * segment.a_stride;
      const bf16* b = segment.b + j / kPanelCols * segment.panel_stride;
      for (index_t k = 0; k < segment.k;) {
        const index_t stop = k + kChunk < segment.k ? k + kChunk : segment.k;
        if (s == 0) segments.ahead.prefetch(i, Rows, k, stop);
        for (; k < stop; k += 2, b += 2 * kPanelCols) {
          __m512bh line[std::size_t{kPanels}];
          AMX_SFT_MOE_UNROLL
          for (int p = 0; p < kPanels; ++p) {
            line[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + p * segment.panel_stride));
          }
          AMX_SFT_MOE_UNROLL
          for (int r = 0; r < Rows; ++r) {
            std::int32_t pair;
            std::memcpy(&pair, a + r * segment.a_stride + k, sizeof(pair));
            __m512i pairs = _mm512_set1_epi32(pair);
#if defined(__clang__) && __clang_major__ < 19  // clang 16 crashes where it sees a broadcast turn into bf16
            __asm__("" : "+v"(pairs));
#endif
            const __m512bh both = reinterpret_cast<__m512bh>(pairs);
            AMX_SFT_MOE_UNROLL
            for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], both, line[p]);
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
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
