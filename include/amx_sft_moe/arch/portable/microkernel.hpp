// The fp32 microkernel that any x86-64 runs. Vectors of four floats by the compilers' vector extension, which
// both GCC and clang lower to SSE2 without any flag.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/portable/rows.hpp"
#include "amx_sft_moe/arch/strips.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 4 x 8 accumulators are 8 of the 16 xmm registers; 2 hold B and 1 the broadcast element of A, and mul + add
// (there is no FMA in SSE2) needs one more. 6 x 8 spills with GCC 12. So a panel is two products of 8 columns.
struct PortableMicrokernel : StripTiles<PortableMicrokernel, float, float, 4, 1, 16, 16> {
  // src [k, cols], columns adjacent -> strip, whole panels of it.
  template <class S>
  static void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, float* strip) {
    for (index_t j = 0; j < cols; j += kCols) {
      const index_t there = cols - j < kCols ? cols - j : kCols;
      for (index_t kk = 0; kk < k; ++kk, strip += kCols) {
        const S* row = src.row(kk) + j;
        for (index_t n = 0; n < there; ++n) strip[n] = to_float(row[n]);
        for (index_t n = there; n < kCols; ++n) strip[n] = 0.0F;
      }
    }
  }
  // src [cols, k], K adjacent -> strip, whole panels of it.
  template <class S>
  static void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, float* strip) {
    const index_t padded = round_up(cols, kPanelCols);
    for (index_t j = 0; j < padded; ++j) {
      const S* row = j < cols ? src.row(j) : nullptr;
      float* to = strip + j / kCols * kCols * k + j % kCols;
      for (index_t kk = 0; kk < k; ++kk) to[kk * kCols] = row == nullptr ? 0.0F : to_float(row[kk]);
    }
  }

  template <int Rows, int Panels, class Ahead>
  static void tile(const float* a, index_t a_stride, const float* strip, index_t steps, const SumRows& c,
                   Ahead& ahead) {
    half<Rows>(a, a_stride, strip, steps, c, [&] { ahead.turn(); });
    half<Rows>(a, a_stride, strip + 8, steps, c.from(0, 8), [] {});
  }

  template <int Rows, class T>
  static void finished_tile(const float* a, index_t a_stride, const float* strip, index_t steps,
                            const FinishedRows<T>& to) {
    float sums[std::size_t{Rows} * std::size_t{kCols}];
    NothingAhead ahead;
    tile<Rows, 1>(a, a_stride, strip, steps, SumRows{sums, kCols, true}, ahead);
    PortableRows::store(sums, kCols, Rows, kCols,
                        BlockTarget<T>{to.data, to.row_stride, 1, to.accumulate, to.scale, nullptr});
  }

 private:
  using Vec4 = float __attribute__((vector_size(16)));
  static Vec4 load4(const float* p) {
    Vec4 value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }

  template <int Rows, class Turn>
  static void half(const float* a, index_t a_stride, const float* strip, index_t steps, const SumRows& c,
                   Turn turn) {
    Vec4 sum[std::size_t{Rows}][2];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      sum[r][0] = c.fresh ? Vec4{} : load4(c.data + r * c.stride);
      sum[r][1] = c.fresh ? Vec4{} : load4(c.data + r * c.stride + 4);
    }
    for (index_t begin = 0; begin < steps; begin += kStepsATurn) {
      turn();
      const index_t end = begin + kStepsATurn < steps ? begin + kStepsATurn : steps;
      for (index_t k = begin; k < end; ++k, strip += kCols) {
        const Vec4 low = load4(strip);
        const Vec4 high = load4(strip + 4);
        AMX_SFT_MOE_UNROLL
        for (int r = 0; r < Rows; ++r) {
          const float value = a[r * a_stride + k];
          sum[r][0] += value * low;
          sum[r][1] += value * high;
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec4 low = sum[r][0];  // the address of an accumulator would keep all of them in memory
      const Vec4 high = sum[r][1];
      std::memcpy(c.data + r * c.stride, &low, sizeof(low));
      std::memcpy(c.data + r * c.stride + 4, &high, sizeof(high));
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
