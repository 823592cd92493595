// The fp32 microkernel of AVX512: broadcast an element of A's row, fused multiply-add with a strip.
#pragma once

#include "amx_sft_moe/arch/avx512/finish.hpp"
#include "amx_sft_moe/arch/avx512/in_place.hpp"
#include "amx_sft_moe/arch/avx512/pack_strip.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 6 rows x 64 columns: 24 accumulators, 4 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B serves 6
// products, each broadcast 4. Latency times rate is 8: 12 accumulators would do.
// In place: dot products of 3 rows x 8 tokens, 24 accumulators, 3 registers of W, 1 of x.
struct Avx512Microkernel : StripTiles<Avx512Microkernel, float, 6, 4, 4>,
                           InPlaceSums<avx512::InPlaceTiles, 12>,
                           InPlaceDots<avx512::InPlaceTiles, 12, 3, 8> {
  static_assert(kCols == kStripCols);  // a strip is one block, for what packs it
  template <class S>
  static void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, float* strip) {
    avx512::strip_of_rows(src, k, cols, strip);
  }
  template <class S>
  static void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, float* strip) {
    avx512::strip_of_columns(src, cols, k, strip);
  }

  template <int Rows, int Panels, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512 static void tile(const float* a, index_t a_stride, const float* strip,
                                             index_t steps, const SumRows& c, Ahead& ahead) {
    const __mmask16 there = avx512::lanes_there(c);
    __m512 sum[std::size_t{Rows}][std::size_t{Panels}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < Panels; ++p) {
        sum[r][p] = _mm512_maskz_loadu_ps(there, c.data + r * c.stride + p * kPanelCols);
      }
    }
    add_products(a, a_stride, strip, steps, sum, ahead);
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < Panels; ++p) _mm512_storeu_ps(c.data + r * c.stride + p * kPanelCols, sum[r][p]);
    }
  }

  template <int Rows, class T>
  AMX_SFT_MOE_TARGET_AVX512 static void finished_tile(const float* a, index_t a_stride, const float* strip,
                                                      index_t steps, const FinishedRows<T>& to) {
    __m512 sum[std::size_t{Rows}][4] = {};
    NothingAhead ahead;
    add_products(a, a_stride, strip, steps, sum, ahead);
    avx512::scale_sums(sum, to);
    __m512i line[std::size_t{Rows}][avx512::kLinesOf<T, 4>];
    avx512::lines_of<T>(sum, line);
    avx512::write_lines(line, to);
  }

 private:
  template <std::size_t Rows, std::size_t Panels, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void add_products(const float* a, index_t a_stride,
                                                                        const float* strip, index_t steps,
                                                                        __m512 (&sum)[Rows][Panels],
                                                                        Ahead& ahead) {
    for (index_t begin = 0; begin < steps; begin += kStepsATurn) {
      ahead.turn();
      const index_t end = begin + kStepsATurn < steps ? begin + kStepsATurn : steps;
      for (index_t k = begin; k < end; ++k, strip += kStripCols) {
        __m512 line[Panels];
        AMX_SFT_MOE_UNROLL
        for (std::size_t p = 0; p < Panels; ++p)
          line[p] = _mm512_loadu_ps(strip + static_cast<index_t>(p) * kPanelCols);
        AMX_SFT_MOE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
          const __m512 value = _mm512_set1_ps(a[static_cast<index_t>(r) * a_stride + k]);
          AMX_SFT_MOE_UNROLL
          for (std::size_t p = 0; p < Panels; ++p) sum[r][p] = _mm512_fmadd_ps(value, line[p], sum[r][p]);
        }
      }
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
