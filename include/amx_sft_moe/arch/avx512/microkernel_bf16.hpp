// The AVX512-BF16 microkernel: broadcast a pair of A's row, VDPBF16PS with a strip.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/avx512/finish.hpp"
#include "amx_sft_moe/arch/avx512/pair_blocks.hpp"
#include "amx_sft_moe/arch/avx512/strip_ahead.hpp"
#include "amx_sft_moe/arch/avx512/token_lanes.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 6 rows x 64 columns: 24 accumulators, 4 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B serves 6
// products, each broadcast 4. Latency times rate is 8 to 12: 12 accumulators would do.
// gemm_nt has tokens along the lanes; with up to 12 of them that is mostly no faster than dot products of 4 rows x 6
// tokens, 24 accumulators, 4 registers of W, 1 of x, for which no lane is left over.
struct Avx512Bf16Microkernel : StripTiles<Avx512Bf16Microkernel, bf16, bf16, 6, 4, 64, 4>,
                               avx512::MakesStrips<bf16>,
                               InPlaceSums<avx512::InPlacePairTiles, 12>,
                               InPlaceDots<avx512::InPlacePairTiles, 12, 12, 4, 6> {
  static_assert(kBlock == kStripCols);  // a strip is one block, for what packs it
  using RowsAhead = avx512::RowsAhead;
  using TokenLanes = avx512::TokenLanes;
  // Of gemm_nn, whose B comes from memory, before InPlaceSums.
  using RowBlocks = InPlaceBlocks<avx512::PairBlockTiles, avx512::PairBlockTiles::kRows>;
  static_assert(InPlaceSums::in_place(kHeldSteps, RowBlocks::kLeastRows) &&
                InPlaceSums::in_place(kHeldSteps + 1, RowBlocks::kLeastRows - 1));

  template <int Rows, int Panels, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void tile(const bf16* a, index_t a_stride, const bf16* strip,
                                                  index_t steps, const SumRows& c, Ahead& ahead) {
    __m512 sum[std::size_t{Rows}][std::size_t{Panels}];
    avx512::load_sums(c, sum);
    add_products(a, a_stride, strip, steps, sum, ahead);
    avx512::store_sums(sum, c);
  }

  template <int Rows, class T>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void finished_tile(const bf16* a, index_t a_stride, const bf16* strip,
                                                           index_t steps, const FinishedRows<T>& to) {
    __m512 sum[std::size_t{Rows}][4] = {};
    NothingAhead ahead;
    add_products(a, a_stride, strip, steps, sum, ahead);
    const bool as_they_are = !to.accumulate && to.scale == 1.0F;
    if (!as_they_are) avx512::scale_sums(sum, to);
    __m512i line[std::size_t{Rows}][avx512::kLinesOf<T, 4>];
    if constexpr (std::is_same_v<T, bf16>) {
      if (as_they_are || !avx512::any_denormal(sum)) {
        round_natively(sum, line);
        return avx512::write_lines(line, to);
      }
    }
    avx512::lines_of<T>(sum, line);
    avx512::write_lines(line, to);
  }

 private:
  // The bits of round_bf16_pair(), unless there are denormals, which are zeros to VCVTNE2PS2BF16; VDPBF16PS makes none.
  template <std::size_t Rows>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void round_natively(const __m512 (&value)[Rows][4],
                                                                               __m512i (&line)[Rows][2]) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (std::size_t n = 0; n < 2; ++n) {
        line[r][n] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(value[r][2 * n + 1], value[r][2 * n]));
      }
    }
  }

  template <std::size_t Rows, std::size_t Panels, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void add_products(const bf16* a, index_t a_stride,
                                                                             const bf16* strip, index_t steps,
                                                                             __m512 (&sum)[Rows][Panels],
                                                                             Ahead& ahead) {
    for (index_t begin = 0; begin < steps; begin += kStepsATurn) {
      ahead.turn();
      const index_t end = begin + kStepsATurn < steps ? begin + kStepsATurn : steps;
      for (index_t k = begin; k < end; ++k, strip += 2 * kStripCols) {
        __m512bh line[Panels];
        AMX_SFT_MOE_UNROLL
        for (std::size_t p = 0; p < Panels; ++p) {
          line[p] =
              reinterpret_cast<__m512bh>(_mm512_loadu_si512(strip + 2 * static_cast<index_t>(p) * kPanelCols));
        }
        AMX_SFT_MOE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
          std::int32_t pair;
          std::memcpy(&pair, a + static_cast<index_t>(r) * a_stride + 2 * k, sizeof(pair));
          const __m512bh both = avx512::broadcast_pair(pair);
          AMX_SFT_MOE_UNROLL
          for (std::size_t p = 0; p < Panels; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], both, line[p]);
        }
      }
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
