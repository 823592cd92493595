// What the AVX512 microkernels share: the shape of a register tile, and how a block of C is cut into such
// tiles.
#pragma once

#include <utility>

#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Micro has, with its own target attribute:
//   template <int Rows, int Panels>
//   static void tile(const Segments<E>&, index_t row, index_t col, float* c, index_t c_stride);
template <class Micro, class E>
struct Avx512Tiles {
  using Element = E;
  static constexpr index_t kKUnit = kPairing<E>;  // A and B are padded with zeros to multiples of it
  struct Session {};                              // nothing to keep per thread

  // 12 rows x 2 panels: 24 accumulators, 2 registers of B, 1 broadcast of the 32 zmm. Each loaded line of B
  // serves 12 products, each broadcast 2. Latency times rate is 8 for FMA, up to 12 for VDPBF16PS: 12
  // accumulators would do.
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
  static void block(Session&, int /*pattern*/, const Segments<E>& segments, index_t rows, index_t cols,
                    float* c, index_t c_stride) {
    index_t j = 0;
    for (; j + kPanelCols < cols; j += 2 * kPanelCols) strip<2>(segments, rows, j, c, c_stride);
    if (j < cols) strip<1>(segments, rows, j, c, c_stride);
  }

 private:
  template <int Panels>
  static void strip(const Segments<E>& segments, index_t rows, index_t j, float* c, index_t c_stride) {
    for (index_t i = 0; i < rows; i += kRows) {
      tile_of<Panels>(rows - i)(segments, i, j, c + i * c_stride + j, c_stride);
    }
  }

  using Tile = void (*)(const Segments<E>&, index_t, index_t, float*, index_t);
  template <int Panels>
  static Tile tile_of(index_t rows) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr Tile kTiles[] = {&Micro::template tile<Less + 1, Panels>...};
      return kTiles[(n < kRows ? n : kRows) - 1];
    }(rows, std::make_integer_sequence<int, kRows>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
