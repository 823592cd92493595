// Products with strips: a strip is 64 columns of B, some steps of K deep, packed from B where it lies and used at once by
// all rows of A; those of a base weight's gradient are kept for a task (gemm/finished_strips.hpp). It is made of blocks, as
// wide as a register tile or wider:
//
//     strip, float: [64 / kBlock][K][kBlock]        strip, bf16: [64 / kBlock][K / 2][kBlock][2]
//
// What microkernels over strips share: how rows are cut into register tiles, and what is done meanwhile: the strip that is
// next is made (arch/strip_ahead.hpp), or its memory asked for (PacedPrefetch).
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Micro has, with its own target attribute, for 1 <= R <= Rows and 1 <= P <= Panels:
//   template <int R, int P, class Ahead>
//   static void tile(const E* a, index_t a_stride, const T* strip, index_t steps, const SumRows& c, Ahead& ahead);
// which adds to C [R, 16 P] the products of `steps` pairings (arch/operands.hpp) along K, and before every StepsATurn
// of them, or the rest, has ahead.turn(), neither more often nor less: what Ahead makes is whole after that many turns; and
// for finish()
//   template <int R, class To>
//   static void finished_tile(const E* a, index_t a_stride, const T* strip, index_t steps, const FinishedRows<To>& to);
// whose products, of all Panels, go to rows of To from registers, with the same bits as by way of C.
//
// E is A's element, T the strip's: strips of bf16 that are multiplied with floats are half as large, and are widened anew for
// each register tile.
template <class Micro, class E, class T, int Rows, int Panels, index_t Block, index_t StepsATurn>
struct StripTiles {
  using Element = E;
  using StripElement = T;
  static constexpr index_t kCols = Panels * kPanelCols, kBlock = Block;
  static_assert(kStripCols % kBlock == 0 && kBlock % kCols == 0);
  static constexpr index_t kStepsATurn = StepsATurn;
  static constexpr index_t kKUnit = kPairing<T>;  // A and strips are padded with zeros to multiples of it
  // Steps along K of strips of rows of B, unless they are made ahead, and of its columns.
  static constexpr index_t kRowsDepth = kStripDepth<T>, kColumnsDepth = kStripDepth<T>;
  // Columns of rows of B that memory is asked for together where strips follow along them.
  static constexpr index_t kPieceCols = kStripCols;
  static constexpr bool kStrips = true;
  struct Session {};  // nothing to keep per thread

  // The tiles for strips that are made from rows of S.
  template <class S>
  using TilesFor = Micro;
  // Those for the same strips of floats, where there is a choice.
  template <class S>
  using FloatTilesFor = Micro;

  // C [rows, cols] += A [rows, k] x strip; k a multiple of kPairing<T>. Ahead: PacedPrefetch, or where cols are all of a
  // strip's, what makes another one.
  template <class Ahead>
  static void multiply(const E* a, index_t a_stride, index_t rows, const T* strip, index_t k, index_t cols,
                       const SumRows& c, Ahead ahead) {
    const index_t steps = k / kPairing<T>;
    ahead.spread(ceil_div(rows, index_t{Rows}) * ceil_div(cols, kCols) * ceil_div(steps, kStepsATurn));
    for (index_t j = 0; j < cols; j += kCols) {
      const index_t panels = cols - j < kCols ? ceil_div(cols - j, kPanelCols) : Panels;
      // A tile of few rows would not hide the latency of its products.
      for_each_part(rows, Rows, [&](index_t i, index_t height) {
        tile_of<Ahead>(height, panels)(a + i * a_stride, a_stride, at_column(strip, j, k), steps, c.from(i, j),
                                       ahead);
      });
    }
  }

  // `to` [rows, cols] = A [rows, k] x strips that lie one behind the other; cols a multiple of kCols. Few rows meet all
  // strips before the next: rows of `to` are written whole.
  template <class To>
  static void finish(const E* a, index_t a_stride, index_t rows, const T* strips, index_t k, index_t cols,
                     const FinishedRows<To>& to) {
    for_each_part(rows, Rows, [&](index_t i, index_t height) {
      const auto tile = finished_tile_of<To>(height);
      for (index_t j = 0; j < cols; j += kCols) {
        tile(a + i * a_stride, a_stride, at_column(strips, j, k), k / kPairing<T>, to.from(i, j));
      }
    });
    if (to.past_caches) _mm_sfence();  // such stores are not in order with those that tell that a task is done
  }

  // Whether tiles that go to rows of To there are whole cache lines.
  template <class To>
  static bool whole_lines(const To* data, index_t row_stride) {
    constexpr index_t kLineElements = kLineBytes / index_t{sizeof(To)};
    return kCols % kLineElements == 0 && row_stride % kLineElements == 0 &&
           reinterpret_cast<std::uintptr_t>(data) % kLineBytes == 0;
  }

 private:
  // Column j, the first of a register tile, of strips k deep that lie one behind the other.
  static const T* at_column(const T* strips, index_t j, index_t k) {
    return strips + j / kBlock * kBlock * k + j % kBlock * kPairing<T>;
  }

  template <class To>
  using FinishedTile = void (*)(const E*, index_t, const T*, index_t, const FinishedRows<To>&);
  template <class To>
  static FinishedTile<To> finished_tile_of(index_t rows) {
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr FinishedTile<To> kTiles[] = {&Micro::template finished_tile<N + 1, To>...};
      return kTiles[n];
    }(rows - 1, std::make_integer_sequence<int, Rows>{});
  }

  template <class Ahead>
  using Tile = void (*)(const E*, index_t, const T*, index_t, const SumRows&, Ahead&);
  template <class Ahead>
  static Tile<Ahead> tile_of(index_t rows, index_t panels) {
    using Narrowest = std::conditional_t<std::is_same_v<Ahead, PacedPrefetch>, std::integral_constant<int, 1>,
                                         std::integral_constant<int, Panels>>;
    constexpr int kNarrowest = Narrowest::value;
    constexpr int kWidths = Panels - kNarrowest + 1;
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Tile<Ahead> kTiles[] = {
          &Micro::template tile<N / kWidths + 1, N % kWidths + kNarrowest, Ahead>...};
      return kTiles[n];
    }((rows - 1) * kWidths + panels - kNarrowest, std::make_integer_sequence<int, Rows * kWidths>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
