// The fp32 microkernel that any x86-64 runs. Vectors of four floats by the compilers' vector extension, which
// both GCC and clang lower to SSE2 without any flag.
#pragma once

#include <cstring>
#include <utility>

#include "amx_sft_moe/arch/register_tiles.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 4 x 8 accumulators are 8 of the 16 xmm registers; 2 hold B and 1 the broadcast element of A, and mul + add
// (there is no FMA in SSE2) needs one more. 6 x 8 spills with GCC 12. 8 x 4 for at most 4 columns (tokens).
struct PortableMicrokernel : RegisterTiles<PortableMicrokernel, float, 4, 8, 32, 8, 8> {
  template <int Rows, int Cols>
  static void tile(const Segments<float>& segments, index_t i, index_t j, float* c, index_t c_stride) {
    constexpr int kVectors = Cols / 4;
    constexpr index_t kChunk = 32;  // steps between two prefetches of a row: a line of bf16
    Vec4 sum[std::size_t{Rows}][std::size_t{kVectors}] = {};
    for (int s = 0; s < segments.count; ++s) {
      const Segment<float>& segment = segments.at[s];
      const float* a = segment.a + i * segment.a_stride;
      const float* b = segment.b + j / kPanelCols * segment.panel_stride + j % kPanelCols;
      for (index_t k = 0; k < segment.k;) {
        const index_t stop = k + kChunk < segment.k ? k + kChunk : segment.k;
        if (s == 0) segments.ahead.prefetch(i, Rows, k, stop);
        for (; k < stop; ++k, b += kPanelCols) {
          Vec4 line[std::size_t{kVectors}];
          AMX_SFT_MOE_UNROLL
          for (int v = 0; v < kVectors; ++v) line[v] = load4(b + 4 * v);
          AMX_SFT_MOE_UNROLL
          for (int r = 0; r < Rows; ++r) {
            const float value = a[r * segment.a_stride + k];
            AMX_SFT_MOE_UNROLL
            for (int v = 0; v < kVectors; ++v) sum[r][v] += value * line[v];
          }
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        const Vec4 value = sum[r][v];  // the address of an accumulator would keep all of them in memory
        std::memcpy(c + r * c_stride + 4 * v, &value, sizeof(value));
      }
    }
  }

 private:
  using Vec4 = float __attribute__((vector_size(16)));
  static Vec4 load4(const float* p) {
    Vec4 value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
