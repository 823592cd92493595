// The fp32 microkernel of AVX512: broadcast an element of A's row, fused multiply-add with a strip, of floats or of bf16.
#pragma once

#include "amx_sft_moe/arch/avx512/finish.hpp"
#include "amx_sft_moe/arch/avx512/in_place.hpp"
#include "amx_sft_moe/arch/avx512/pack_strip.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Strips of bf16. 12 rows x 32 columns: 24 accumulators, 2 registers of pairs, 2 of one element of each, 1 broadcast of the
// 32 zmm. To widen a pair is 2 instructions of the units that multiply, for 24 products: at 6 rows x 64 columns for 12.
// Against strips of floats, half as many lines are written and read, and a strip of rows leaves room in L1.
struct Avx512PairTiles : StripTiles<Avx512PairTiles, float, bf16, 12, 2, 64, 16> {
  static constexpr index_t kRowsDepth = kWidenedRowsDepth, kColumnsDepth = kWidenedColumnsDepth;
  static constexpr index_t kPieceCols = kWidenedPieceCols;
  static_assert(kBlock == kStripCols);  // a strip is one block, for what packs it

  template <class S>
  static void strip_of_rows(const RowSource<S>& src, index_t k, index_t cols, bf16* strip) {
    avx512::strip_of_rows(src, k, cols, strip);
    if (k % 2 != 0) close_last_pairs(strip + (k - 1) * kStripCols);
  }
  template <class S>
  static void strip_of_columns(const RowSource<S>& src, index_t cols, index_t k, bf16* strip) {
    avx512::strip_of_columns(src, cols, k, strip);
    if (k % 2 != 0) close_last_pairs(strip + (k - 1) * kStripCols);
  }

  template <int Rows, int Panels, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512 static void tile(const float* a, index_t a_stride, const bf16* strip, index_t steps,
                                             const SumRows& c, Ahead& ahead) {
    constexpr std::size_t kGroups = ceil_div(Rows, kRowsOfPointer);
    const float* row[kGroups];
    AMX_SFT_MOE_UNROLL
    for (std::size_t g = 0; g < kGroups; ++g) {
      row[g] = a + static_cast<index_t>(g) * kRowsOfPointer * a_stride;
      AMX_SFT_MOE_HIDE_ADDRESS(row[g]);
    }
    __m512 sum[std::size_t{Rows}][std::size_t{Panels}];
    avx512::load_sums(c, sum);
    for (index_t begin = 0; begin < steps; begin += kStepsATurn) {
      ahead.turn();
      const index_t end = begin + kStepsATurn < steps ? begin + kStepsATurn : steps;
      for (index_t k = begin; k < end; ++k, strip += 2 * kStripCols) {
        __m512i pairs[std::size_t{Panels}];
        AMX_SFT_MOE_UNROLL
        for (int p = 0; p < Panels; ++p) {
          pairs[p] = _mm512_loadu_si512(strip + 2 * p * kPanelCols);
          AMX_SFT_MOE_HIDE_ORIGIN(pairs[p]);
        }
        add_half<0>(row, a_stride, pairs, sum);
        add_half<1>(row, a_stride, pairs, sum);
        AMX_SFT_MOE_UNROLL
        for (std::size_t g = 0; g < kGroups; ++g) row[g] += 2;
      }
    }
    avx512::store_sums(sum, c);
  }

 private:
  // What is missing of pairs of an odd K is -0: with A's zero there a product is -0, which, rounded to nearest, leaves any
  // sum as it is, like products in place and strips of floats, which have none. That of +0 would make +0 of a sum of -0.
  static void close_last_pairs(bf16* pairs) {
    for (index_t i = 0; i < kStripCols; ++i) pairs[2 * i + 1] = bf16{0x8000};
  }

  // Of 12 rows one offset each would have to be in a register, more than there are, and the compiler would load them anew
  // in every step. From a pointer, once and twice the distance of rows are part of an instruction.
  static constexpr int kRowsOfPointer = 3;

  // The products with one element of each pair.
  template <int Half, std::size_t Rows, std::size_t Panels, std::size_t Groups>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void add_half(const float* const (&row)[Groups],
                                                                    index_t a_stride,
                                                                    const __m512i (&pairs)[Panels],
                                                                    __m512 (&sum)[Rows][Panels]) {
    __m512 line[Panels];
    AMX_SFT_MOE_UNROLL
    for (std::size_t p = 0; p < Panels; ++p) line[p] = avx512::half_of_pairs<Half>(pairs[p]);
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      const index_t within = static_cast<index_t>(r % kRowsOfPointer) * a_stride;
      const __m512 value = _mm512_set1_ps(row[r / kRowsOfPointer][within + Half]);
      AMX_SFT_MOE_UNROLL
      for (std::size_t p = 0; p < Panels; ++p) sum[r][p] = _mm512_fmadd_ps(value, line[p], sum[r][p]);
    }
  }
};

// Strips of floats. 6 rows x 64 columns: 24 accumulators, 4 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B
// serves 6 products, each broadcast 4. Latency times rate is 8: 12 accumulators would do.
// In place: dot products of 3 rows x 8 tokens, 24 accumulators, 3 registers of W, 1 of x.
struct Avx512Microkernel : StripTiles<Avx512Microkernel, float, float, 6, 4, 64, 4>,
                           avx512::MakesStrips<float>,
                           InPlaceBlocks<avx512::InPlaceTiles, 36>,
                           InPlaceDots<avx512::InPlaceTiles, 16, 32, 3, 8> {
  static_assert(kBlock == kStripCols);  // a strip is one block, for what packs it
  template <class S>
  using TilesFor = std::conditional_t<std::is_same_v<S, bf16>, Avx512PairTiles, Avx512Microkernel>;
  template <class S>
  using FloatTilesFor = Avx512Microkernel;
  static constexpr index_t kKUnit = Avx512PairTiles::kKUnit;

  template <int Rows, int Panels, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512 static void tile(const float* a, index_t a_stride, const float* strip,
                                             index_t steps, const SumRows& c, Ahead& ahead) {
    __m512 sum[std::size_t{Rows}][std::size_t{Panels}];
    avx512::load_sums(c, sum);
    add_products(a, a_stride, strip, steps, sum, ahead);
    avx512::store_sums(sum, c);
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
