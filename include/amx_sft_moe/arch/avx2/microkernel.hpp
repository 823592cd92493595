// The fp32 microkernel of AVX2: broadcast an element of A's row, fused multiply-add with a strip.
#pragma once

#include "amx_sft_moe/arch/avx2/finish.hpp"
#include "amx_sft_moe/arch/avx2/in_place.hpp"
#include "amx_sft_moe/arch/avx2/pack_strip.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 6 rows x 16 columns: 12 accumulators, 2 registers of B, 1 broadcast of the 16 ymm. Latency times rate is 10
// on Haswell, 8 since. 12 FMA ask for 8 loads, of which every CPU does two a cycle: 4 of the 6 cycles. 4 x 24
// would ask for 7, but panels are 16 wide. A step is 20 instructions, and where another hyperthread takes every second
// turn of the front end, 18 (of 6 a cycle) are all that 6 cycles have: so nothing but products between two turns of the
// prefetch, and four steps to a jump. In place: dot products of 3 rows x 4 tokens, 12 accumulators.
struct Avx2Microkernel : StripTiles<Avx2Microkernel, float, float, 6, 1, 16, 16>,
                         InPlaceBlocks<avx2::InPlaceTiles, 12>,
                         InPlaceDots<avx2::InPlaceTiles, 16, 24, 3, 4> {
  static constexpr index_t kColumnsDepth = 2 * kStripDepth<float>;  // longer pieces of W's rows come faster
  static_assert(kBlock == kPanelCols);  // a strip's blocks are panels, for what packs it
  template <class S>
  static void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, float* strip) {
    avx2::strip_of_rows(src, k, cols, strip);
  }
  template <class S>
  static void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, float* strip) {
    avx2::strip_of_columns(src, cols, k, strip);
  }

  template <int Rows, int Panels, class Ahead>
  AMX_SFT_MOE_TARGET_AVX2 static void tile(const float* a, index_t a_stride, const float* strip, index_t steps,
                                           const SumRows& c, Ahead& ahead) {
    __m256 sum[std::size_t{Rows}][2];
    avx2::load_sums(c, sum);
    add_products(a, a_stride, strip, steps, sum, ahead);
    avx2::store_sums(sum, c);
  }

  template <int Rows, class T>
  AMX_SFT_MOE_TARGET_AVX2 static void finished_tile(const float* a, index_t a_stride, const float* strip,
                                                    index_t steps, const FinishedRows<T>& to) {
    __m256 sum[std::size_t{Rows}][2] = {};
    NothingAhead ahead;
    add_products(a, a_stride, strip, steps, sum, ahead);
    avx2::finish_sums(sum, to);
  }

 private:
  template <std::size_t Rows, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void add_products(const float* a, index_t a_stride,
                                                                      const float* strip, index_t steps,
                                                                      __m256 (&sum)[Rows][2], Ahead& ahead) {
    for (; steps >= kStepsATurn; steps -= kStepsATurn, a += kStepsATurn) {
      ahead.turn();
      AMX_SFT_MOE_UNROLL_4
      for (index_t k = 0; k < kStepsATurn; ++k, strip += kCols) step(a + k, a_stride, strip, sum);
    }
    if (steps > 0) ahead.turn();
    for (index_t k = 0; k < steps; ++k, strip += kCols) step(a + k, a_stride, strip, sum);
  }

  // The products of one step along K.
  template <std::size_t Rows>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void step(const float* a, index_t a_stride,
                                                              const float* strip, __m256 (&sum)[Rows][2]) {
    const __m256 low = _mm256_loadu_ps(strip);
    const __m256 high = _mm256_loadu_ps(strip + 8);
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      const __m256 value = _mm256_set1_ps(a[static_cast<index_t>(r) * a_stride]);
      sum[r][0] = _mm256_fmadd_ps(value, low, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(value, high, sum[r][1]);
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
