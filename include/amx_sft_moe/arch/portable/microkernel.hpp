// The fp32 microkernel that any x86-64 runs. Vectors of four floats by the compilers' vector extension, which
// both GCC and clang lower to SSE2 without any flag.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct PortableMicrokernel {
  using Element = float;
  static constexpr index_t kKUnit = 1;  // A and B are padded with zeros to multiples of it
  struct Session {};                    // nothing to keep per thread

  static constexpr index_t kMaxRows = 32;
  static constexpr index_t kMaxCols = 32;
  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    return uniform_plan(rows, cols, kMaxRows, kMaxCols);
  }
  static constexpr index_t fitted_k_tile(index_t) { return kKUnit; }

  // C [rows, cols] = sum of the segments; rows and cols as the driver's block shape allows. C's rows have room
  // for whole panels.
  static void block(Session&, int /*pattern*/, const Segments<float>& segments, index_t rows, index_t cols,
                    float* c, index_t c_stride) {
    for (index_t j = 0; j < cols; j += kCols) {
      index_t i = 0;
      for (; i + kRows <= rows; i += kRows) tile<kRows>(segments, i, j, c + i * c_stride + j, c_stride);
      for (; i < rows; ++i) tile<1>(segments, i, j, c + i * c_stride + j, c_stride);
    }
  }

 private:
  using Vec4 = float __attribute__((vector_size(16)));
  // 4 x 8 accumulators are 8 of the 16 xmm registers; 2 hold B and 1 the broadcast element of A, and mul + add
  // (there is no FMA in SSE2) needs one more. 6 x 8 spills with GCC 12.
  static constexpr index_t kRows = 4;
  static constexpr index_t kCols = 8;

  template <index_t Rows>
  static void tile(const Segments<float>& segments, index_t i, index_t j, float* c, index_t c_stride) {
    Vec4 low[std::size_t{Rows}] = {};
    Vec4 high[std::size_t{Rows}] = {};
    for (int s = 0; s < segments.count; ++s) {
      const Segment<float>& segment = segments.at[s];
      const float* a = segment.a + i * segment.a_stride;
      const float* b = segment.b + j / kPanelCols * segment.panel_stride + j % kPanelCols;
      for (index_t k = 0; k < segment.k; ++k, b += kPanelCols) {
        Vec4 b_low;
        Vec4 b_high;
        std::memcpy(&b_low, b, sizeof(Vec4));
        std::memcpy(&b_high, b + 4, sizeof(Vec4));
        for (index_t r = 0; r < Rows; ++r) {
          const float value = a[r * segment.a_stride + k];
          low[r] += value * b_low;
          high[r] += value * b_high;
        }
      }
    }
    for (index_t r = 0; r < Rows; ++r) {
      std::memcpy(c + r * c_stride, &low[r], sizeof(Vec4));
      std::memcpy(c + r * c_stride + 4, &high[r], sizeof(Vec4));
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
