// Register tiles of bf16 products of gemm_nn whose C stays in registers for a block of B's rows: arch/in_place_blocks.hpp.
#pragma once

#include "amx_sft_moe/arch/avx512/in_place_bf16.hpp"
#include "amx_sft_moe/arch/in_place_blocks.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Up to 12 rows are one tile x 32 columns: up to 24 accumulators, 2 registers of pairs, 1 broadcast of the 32 zmm; with 64 columns
// up to 6 rows took as long or longer. More are two tiles, up to 16 accumulators each, which hide the latency of a product. The
// first keeps the pairs that it makes of two rows of B for the second: B's lines, which lie 4 KiB apart or more, come from L2 once.
struct PairBlockTiles {
  using Element = bf16;
  static constexpr index_t kLeastRows = 5, kRows = 16;
  static constexpr index_t kSteps = 2 * kBlockSteps;  // of a block; the pairs that are kept take 4 KiB
  static constexpr index_t most_cols(index_t rows) { return kPairBlockSums / rows; }

  template <int Rows, class S, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void block(const bf16* from, index_t from_stride, const S* const* b,
                                                   index_t steps, index_t cols, const SumRows& c,
                                                   BlockEnds /*ends*/, Ahead& ahead) {
    alignas(kLineBytes) std::int32_t a[std::size_t{Rows}][kPairs];
    copy_block(from, from_stride, steps, a);
    Ahead asked = ahead;
    index_t j = 0;
    for (; cols - j >= kLine; j += kLine) add_columns<Rows, true>(a, b, steps, j, kLine, c.from(0, j), asked);
    if (j < cols) add_columns<Rows, false>(a, b, steps, j, cols - j, c.from(0, j), asked);
    ahead = asked;
  }

 private:
  static constexpr std::size_t kPairs = std::size_t{kSteps} / 2;
  static constexpr int kRowsOfOneTile = 12;

  template <std::size_t Rows>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void copy_block(const bf16* from, index_t stride,
                                                                           index_t steps,
                                                                           std::int32_t (&a)[Rows][kPairs]) {
    static_assert(kSteps == 2 * kLine);
    const __mmask32 low = mask32(steps), high = mask32(steps > kLine ? steps - kLine : 0);
    const index_t second = steps > kLine ? kLine : 0;  // no address behind the end of what is there
    for (std::size_t r = 0; r < Rows; ++r) {
      const bf16* row = from + static_cast<index_t>(r) * stride;
      _mm512_storeu_si512(a[r], _mm512_maskz_loadu_epi16(low, row));
      _mm512_storeu_si512(a[r] + kPairs / 2, _mm512_maskz_loadu_epi16(high, row + second));
    }
  }

  // Of memory that is asked for a line with each line that is read: half of what two rows of S have.
  template <class S, class Ahead>
  AMX_SFT_MOE_INLINE static void ask_half(Ahead& ahead) {
    AMX_SFT_MOE_UNROLL
    for (index_t bytes = 0; bytes < kLine * index_t{sizeof(S)}; bytes += kLineBytes) ahead.turn();
  }

  // C [Rows, 32] += a x columns [j, j + n) of rows of B.
  template <int Rows, bool Whole, class S, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void add_columns(const std::int32_t (*a)[kPairs],
                                                                            const S* const* b, index_t steps,
                                                                            index_t j, index_t n,
                                                                            const SumRows& c, Ahead& ahead) {
    if constexpr (Rows <= kRowsOfOneTile) {
      tile<Rows, Whole, false>(a, b, steps, j, n, c, nullptr, ahead);
    } else {
      constexpr int kFirst = (Rows + 1) / 2;
      alignas(kLineBytes) __m512i kept[2 * kPairs];
      tile<kFirst, Whole, true>(a, b, steps, j, n, c, kept, ahead);
      second_tile<Rows - kFirst, S>(a + kFirst, steps, kept, c.from(kFirst, 0), ahead);
    }
  }

  // The same of a tile's rows; where Keeps, pairs are kept for the tile that asks for the other half of memory.
  template <int Rows, bool Whole, bool Keeps, class S, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void tile(const std::int32_t (*a)[kPairs],
                                                                     const S* const* b, index_t steps,
                                                                     index_t j, index_t n, const SumRows& c,
                                                                     __m512i* kept, Ahead& ahead) {
    __m512 sum[std::size_t{Rows}][2];
    load_sums(c, sum);
    for (index_t k = 0; k < steps; k += 2) {
      ask_half<S>(ahead);
      if constexpr (!Keeps) ask_half<S>(ahead);
      __m512bh line[2];
      pair_rows<Whole>(line, b[k], b[k + 1], true, j, n);
      if constexpr (Keeps) {
        kept[k] = reinterpret_cast<__m512i>(line[0]);
        kept[k + 1] = reinterpret_cast<__m512i>(line[1]);
      }
      add_pair(a, k / 2, line, sum);
    }
    store_sums(sum, c);
  }
  // And of the rows behind them, from what was kept.
  template <int Rows, class S, class Ahead>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void second_tile(const std::int32_t (*a)[kPairs],
                                                                            index_t steps, const __m512i* kept,
                                                                            const SumRows& c, Ahead& ahead) {
    __m512 sum[std::size_t{Rows}][2];
    load_sums(c, sum);
    for (index_t k = 0; k < steps; k += 2) {
      ask_half<S>(ahead);
      const __m512bh line[2] = {reinterpret_cast<__m512bh>(kept[k]), reinterpret_cast<__m512bh>(kept[k + 1])};
      add_pair(a, k / 2, line, sum);
    }
    store_sums(sum, c);
  }

  template <std::size_t Rows>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void add_pair(const std::int32_t (*a)[kPairs],
                                                                         index_t d, const __m512bh (&line)[2],
                                                                         __m512 (&sum)[Rows][2]) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      const __m512bh pair = broadcast_pair(a[r][d]);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], pair, line[0]);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], pair, line[1]);
    }
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
