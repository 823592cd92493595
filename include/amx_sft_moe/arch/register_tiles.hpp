// What the microkernels of vector registers share: how a block of C is cut into register tiles.
#pragma once

#include <utility>

#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Micro has, with its own target attribute, for 1 <= R <= Rows and C = Cols, and for 1 <= R <= NarrowRows and
// C = Cols / 2:
//   template <int R, int C>
//   static void tile(const Segments<E>&, index_t row, index_t col, float* c, index_t c_stride);
// Blocks of C are BlockRows x 32, two panels; NarrowBlockRows where a narrow tile takes all columns: so few
// rows that what is staged of them stays in the nearest caches.
template <class Micro, class E, int Rows, int Cols, int BlockRows, int NarrowRows = Rows,
          int NarrowBlockRows = BlockRows>
struct RegisterTiles {
  static_assert(BlockRows % Rows == 0 && NarrowBlockRows % NarrowRows == 0 && NarrowBlockRows <= BlockRows);
  using Element = E;
  static constexpr index_t kKUnit = kPairing<E>;  // A and B are padded with zeros to multiples of it
  struct Session {};                              // nothing to keep per thread

  static constexpr index_t kMaxRows = BlockRows;
  static constexpr index_t kMaxCols = 2 * kPanelCols;
  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    return uniform_plan(rows, cols, cols <= Cols / 2 ? NarrowBlockRows : BlockRows, kMaxCols);
  }
  static constexpr index_t fitted_k_tile(index_t) { return kKUnit; }

  // C [rows, cols] = sum of the segments; rows and cols as the driver's block shape allows. C's rows have room
  // for whole panels.
  static void block(Session&, int /*pattern*/, const Segments<E>& segments, index_t rows, index_t cols,
                    float* c, index_t c_stride) {
    Segments<E> left = segments;
    for (index_t j = 0; j < cols; j += Cols) {
      if (j + Cols / 2 < cols) {
        strip<Rows, Cols>(left, rows, j, c, c_stride);
      } else {
        strip<NarrowRows, Cols / 2>(left, rows, j, c, c_stride);
      }
      left.ahead = {};
    }
  }

 private:
  // Tiles of equal height: a last one of few rows would have too few accumulators to hide the latency.
  template <int Most, int Wide>
  static void strip(const Segments<E>& segments, index_t rows, index_t j, float* c, index_t c_stride) {
    const index_t step = ceil_div(rows, ceil_div(rows, Most));
    for (index_t i = 0; i < rows; i += step) {
      tile_of<Most, Wide>(rows - i < step ? rows - i : step)(segments, i, j, c + i * c_stride + j, c_stride);
    }
  }

  using Tile = void (*)(const Segments<E>&, index_t, index_t, float*, index_t);
  template <int Most, int Wide>
  static Tile tile_of(index_t rows) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr Tile kTiles[] = {&Micro::template tile<Less + 1, Wide>...};
      return kTiles[n - 1];
    }(rows, std::make_integer_sequence<int, Most>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
