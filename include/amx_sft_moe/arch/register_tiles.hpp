// What the microkernels of vector registers share: how a block of C is cut into register tiles.
#pragma once

#include <utility>

#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Micro has, with its own target attribute, for 1 <= R <= Rows and C = Cols or Cols / 2:
//   template <int R, int C>
//   static void tile(const Segments<E>&, index_t row, index_t col, float* c, index_t c_stride);
// Blocks of C are BlockRows x 32: a multiple of Rows, and two panels.
template <class Micro, class E, int Rows, int Cols, int BlockRows>
struct RegisterTiles {
  static_assert(BlockRows % Rows == 0);
  using Element = E;
  static constexpr index_t kKUnit = kPairing<E>;  // A and B are padded with zeros to multiples of it
  struct Session {};                              // nothing to keep per thread

  static constexpr index_t kMaxRows = BlockRows;
  static constexpr index_t kMaxCols = 2 * kPanelCols;
  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    return uniform_plan(rows, cols, kMaxRows, kMaxCols);
  }
  static constexpr index_t fitted_k_tile(index_t) { return kKUnit; }

  // C [rows, cols] = sum of the segments; rows and cols as the driver's block shape allows. C's rows have room
  // for whole panels.
  static void block(Session&, int /*pattern*/, const Segments<E>& segments, index_t rows, index_t cols,
                    float* c, index_t c_stride) {
    index_t j = 0;
    for (; j + Cols / 2 < cols; j += Cols) strip<Cols>(segments, rows, j, c, c_stride);
    if (j < cols) strip<Cols / 2>(segments, rows, j, c, c_stride);
  }

 private:
  template <int Wide>
  static void strip(const Segments<E>& segments, index_t rows, index_t j, float* c, index_t c_stride) {
    for (index_t i = 0; i < rows; i += Rows) {
      tile_of<Wide>(rows - i)(segments, i, j, c + i * c_stride + j, c_stride);
    }
  }

  using Tile = void (*)(const Segments<E>&, index_t, index_t, float*, index_t);
  template <int Wide>
  static Tile tile_of(index_t rows) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr Tile kTiles[] = {&Micro::template tile<Less + 1, Wide>...};
      return kTiles[(n < Rows ? n : Rows) - 1];
    }(rows, std::make_integer_sequence<int, Rows>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
