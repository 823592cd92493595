// The AVX512-BF16 microkernel: broadcast a pair of A's row, VDPBF16PS with two cache lines of packed B.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct Avx512Bf16Microkernel {
  using Element = bf16;
  static constexpr index_t kKUnit = 2;  // A and B are padded with zeros to multiples of it
  struct Session {};                    // nothing to keep per thread
  // 12 rows x 2 panels: 24 accumulators, 2 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B
  // serves 12 products, each broadcast 2. VDPBF16PS has a latency of 4 to 6 and a rate of 1 to 2 a cycle: 12
  // would be enough.
  static constexpr index_t kRows = 12;

  // 48 rows are four tiles and three 16 x 16 transpositions of the result; 32 columns two panels. C stays in
  // L1.
  static constexpr index_t kMaxRows = 4 * kRows;
  static constexpr index_t kMaxCols = 2 * kPanelCols;
  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    return uniform_plan(rows, cols, kMaxRows, kMaxCols);
  }
  static constexpr index_t fitted_k_tile(index_t) { return kKUnit; }

  // See PortableMicrokernel::block.
  static void block(Session&, int /*pattern*/, const Segments<bf16>& segments, index_t rows, index_t cols,
                    float* c, index_t c_stride) {
    index_t j = 0;
    for (; j + kPanelCols < cols; j += 2 * kPanelCols) strip<2>(segments, rows, j, c, c_stride);
    if (j < cols) strip<1>(segments, rows, j, c, c_stride);
  }

 private:
  template <int Panels>
  static void strip(const Segments<bf16>& segments, index_t rows, index_t j, float* c, index_t c_stride) {
    for (index_t i = 0; i < rows; i += kRows) {
      tile_of<Panels>(rows - i)(segments, i, j, c + i * c_stride + j, c_stride);
    }
  }

  using Tile = void (*)(const Segments<bf16>&, index_t, index_t, float*, index_t);
  template <int Panels>
  static Tile tile_of(index_t rows) {
    static constexpr Tile kTiles[kRows] = {tile<1, Panels>,  tile<2, Panels>,  tile<3, Panels>,
                                           tile<4, Panels>,  tile<5, Panels>,  tile<6, Panels>,
                                           tile<7, Panels>,  tile<8, Panels>,  tile<9, Panels>,
                                           tile<10, Panels>, tile<11, Panels>, tile<12, Panels>};
    return kTiles[(rows < kRows ? rows : kRows) - 1];
  }

  template <int Rows, int Panels>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void tile(const Segments<bf16>& segments, index_t i, index_t j,
                                                  float* c, index_t c_stride) {
    __m512 sum[Rows][Panels];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < Panels; ++p) sum[r][p] = _mm512_setzero_ps();
    }
    for (int s = 0; s < segments.count; ++s) {
      const Segment<bf16>& segment = segments.at[s];
      const bf16* a = segment.a + i * segment.a_stride;
      const bf16* b = segment.b + j / kPanelCols * segment.panel_stride;
      for (index_t k = 0; k < segment.k; k += 2, b += 2 * kPanelCols) {
        __m512bh line[Panels];
        AMX_SFT_MOE_UNROLL
        for (int p = 0; p < Panels; ++p) {
          line[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + p * segment.panel_stride));
        }
        AMX_SFT_MOE_UNROLL
        for (int r = 0; r < Rows; ++r) {
          std::int32_t pair;
          std::memcpy(&pair, a + r * segment.a_stride + k, sizeof(pair));
          const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
          AMX_SFT_MOE_UNROLL
          for (int p = 0; p < Panels; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], both, line[p]);
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < Panels; ++p) _mm512_storeu_ps(c + r * c_stride + p * kPanelCols, sum[r][p]);
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
