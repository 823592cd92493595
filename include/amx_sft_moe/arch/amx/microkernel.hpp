// The AMX-BF16 microkernel: blocks of 2 x 2 tiles, and strips of six for outputs one tile wide or high.
//
//     pattern    accumulators   A       B       loads per product
//     2 x 2      tmm0-3         tmm4-5  tmm6-7  1
//     6 x 1      tmm0-5         tmm6    tmm7    7/6    B stays, A passes by
//     1 x 6      tmm0-5         tmm6    tmm7    7/6    A stays, B passes by
//
// Accumulators are loaded where C is added to, else never, and stored once. A tile configuration depends on a block's
// shape only and is loaded when it differs from the thread's last one; plans order blocks by shape, so that is once per
// shape.
#pragma once

#include <array>
#include <utility>

#include "amx_sft_moe/arch/amx/few_rows.hpp"
#include "amx_sft_moe/arch/amx/session.hpp"
#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct AmxMicrokernel {
  using Element = bf16;
  static constexpr index_t kKUnit = 32;
  static constexpr bool kAddsToC = true;
  static constexpr int kStrip = 6;
  static constexpr index_t kMaxRows = kStrip * amx::kTileRows;
  static constexpr index_t kMaxCols = kStrip * kPanelCols;

  enum Pattern : int { kSquare, kColumn, kRow };
  static_assert(kRow < amx::BlockShape::kFewRows, "kinds of blocks differ");

  using Session = amx::Session;
  using FewRows = AmxFewRows;

  // Whole pairs of tiles, then what is left of columns, of rows, of both. A remainder of up to 16 is one tile
  // wide and gets strips; a larger one is a pair with a shorter second tile.
  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    constexpr index_t kPair = 2 * kPanelCols;
    const index_t even_rows = rows / kPair * kPair;
    const index_t even_cols = cols / kPair * kPair;
    const bool row_strip = rows - even_rows <= kPanelCols;
    const bool col_strip = cols - even_cols <= kPanelCols;
    BlockPlan plan;
    plan.add({0, even_rows, kPair, 0, even_cols, kPair, kSquare});
    plan.add(
        {0, even_rows, col_strip ? kMaxRows : kPair, even_cols, cols, kPair, col_strip ? kColumn : kSquare});
    plan.add({even_rows, rows, kPair, 0, even_cols, row_strip ? kMaxCols : kPair, row_strip ? kRow : kSquare});
    plan.add({even_rows, rows, kPair, even_cols, cols, kPair, kSquare});
    return plan;
  }

  // The plan where A comes from memory and B from L2, gemm_nt of more tokens than are multiplied in streams (gemm/streams.hpp):
  // each tile of A is met by as many tiles of B as there are accumulators, and by 16 or 32 rows at a time, which hardware
  // prefetchers can follow; of 96 they lose track (benchmarks/LOG.md, "AMX, natively"). Two strips, one below the other, are
  // one block: of outputs that are stored for each token these are a line.
  static constexpr BlockPlan streamed_plan(index_t rows, index_t cols) {
    constexpr index_t kPair = 2 * kPanelCols;
    const index_t even = rows / kPair * kPair, wide = even_cols(cols);
    BlockPlan plan;
    plan.add({0, even, kPair, 0, cols, wide, kRow});
    plan.add({even, rows, kPanelCols, 0, cols, wide, kRow});
    return plan;
  }

  // Columns in parts of up to kMaxCols, as even as panels allow.
  static constexpr index_t even_cols(index_t cols) {
    return round_up(ceil_div(cols, ceil_div(cols, kMaxCols)), kPanelCols);
  }

  // gemm_tn contracts over tokens, often fewer than a tile's 32: equal steps of an even length instead of
  // padding.
  static constexpr index_t fitted_k_tile(index_t k) { return round_up(ceil_div(k, ceil_div(k, kKUnit)), 2); }

  // C [rows, cols] += the sum of the segments, or = it where C is fresh; one block of the plan.
  static void block(Session& session, int pattern, const Segments<bf16>& segments, index_t rows, index_t cols,
                    const SumRows& c) {
    constexpr index_t kTile = amx::kTileRows;
    if (pattern == kRow) return row_strips(session, segments, rows, cols, c);
    session.use(shape_of(pattern, rows, cols, segments.k_tile), config_for);
    if (pattern == kSquare) {
      kSquares[rows > kTile ? 1 : 0][cols > kTile ? 1 : 0](segments, c);
    } else {
      kColumns[static_cast<std::size_t>(ceil_div(rows, kTile) - 1)](segments, c);
    }
  }

 private:
  static constexpr index_t up_to_a_tile(index_t n) { return n < amx::kTileRows ? n : index_t{amx::kTileRows}; }

  // Of strips one tile's: the others are like it.
  AMX_SFT_MOE_INLINE static amx::BlockShape shape_of(int pattern, index_t rows, index_t cols, index_t k_tile) {
    const auto narrow = [](index_t n) { return static_cast<std::int16_t>(n); };
    const bool strip = pattern != kSquare;
    return {narrow(pattern), narrow(strip ? up_to_a_tile(rows) : rows),
            narrow(strip ? up_to_a_tile(cols) : cols), narrow(k_tile)};
  }

  static amx::TileConfig config_for(const amx::BlockShape& of) {
    amx::TileConfig config;
    auto shape = [&config](int tile, index_t tile_rows, index_t tile_elements, index_t element_bytes) {
      if (tile_rows <= 0 || tile_elements <= 0) return;  // an unused tile: its rows and bytes are zero
      config.rows[tile] = static_cast<std::uint8_t>(tile_rows);
      config.row_bytes[tile] = static_cast<std::uint16_t>(tile_elements * element_bytes);
    };
    auto part = [](index_t n, index_t i) { return up_to_a_tile(n - i * amx::kTileRows); };
    if (of.kind == kSquare) {
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) shape(2 * i + j, part(of.rows, i), part(of.cols, j), 4);
        shape(4 + i, part(of.rows, i), of.k_tile, 2);
        shape(6 + i, of.k_tile / 2, part(of.cols, i), 4);
      }
      return config;
    }
    for (int i = 0; i < kStrip; ++i) shape(i, of.rows, of.cols, 4);
    shape(6, of.rows, of.k_tile, 2);
    shape(7, of.k_tile / 2, of.cols, 4);
    return config;
  }

  // Calls f(a, b) for each step along K of each segment: a the first row of A there, b the first line of panel
  // 0.
  template <class F>
  AMX_SFT_MOE_INLINE static void for_each_step(const Segments<bf16>& segments, F f) {
    for (int s = 0; s < segments.count; ++s) {
      const Segment<bf16>& segment = segments.at[s];
      for (index_t k = 0; k < segment.k; k += segments.k_tile) {
        f(segment, segment.a + k, segment.b + k * kPanelCols);
      }
    }
  }

  static constexpr index_t kLine = 64;  // bytes between a panel's steps

  // f(std::integral_constant<int, i>) for each i: tile numbers are literals.
  template <int... Ids, class F>
  AMX_SFT_MOE_INLINE static void each(std::integer_sequence<int, Ids...>, F f) {
    (f(std::integral_constant<int, Ids>{}), ...);
  }

  template <int RowTiles, int ColTiles>
  static void square(const Segments<bf16>& segments, const SumRows& c) {
    constexpr auto kRowIds = std::make_integer_sequence<int, RowTiles>{};
    constexpr auto kColIds = std::make_integer_sequence<int, ColTiles>{};
    each(kRowIds, [&](auto i) {
      each(kColIds, [&](auto j) { amx::begin_sums<2 * i() + j()>(c, i() * amx::kTileRows, j() * kPanelCols); });
    });
    for_each_step(segments, [&](const Segment<bf16>& segment, const bf16* a, const bf16* b) {
      each(kColIds, [&](auto j) { amx::load<6 + j()>(b + j() * segment.panel_stride, kLine); });
      each(kRowIds, [&](auto i) {
        amx::load<4 + i()>(a + i() * amx::kTileRows * segment.a_stride, segment.a_stride * 2);
        each(kColIds, [&](auto j) { amx::dpbf16<2 * i() + j(), 4 + i(), 6 + j()>(); });
      });
    });
    each(kRowIds, [&](auto i) {
      each(kColIds, [&](auto j) { amx::end_sums<2 * i() + j()>(c, i() * amx::kTileRows, j() * kPanelCols); });
    });
  }

  template <int RowTiles>
  static void column(const Segments<bf16>& segments, const SumRows& c) {
    constexpr auto kIds = std::make_integer_sequence<int, RowTiles>{};
    each(kIds, [&](auto i) { amx::begin_sums<i()>(c, i() * amx::kTileRows, 0); });
    for_each_step(segments, [&](const Segment<bf16>& segment, const bf16* a, const bf16* b) {
      amx::load<7>(b, kLine);
      each(kIds, [&](auto i) {
        amx::load<6>(a + i() * amx::kTileRows * segment.a_stride, segment.a_stride * 2);
        amx::dpbf16<i(), 6, 7>();
      });
    });
    each(kIds, [&](auto i) { amx::end_sums<i()>(c, i() * amx::kTileRows, 0); });
  }

  // Strips one below the other.
  static void row_strips(Session& session, const Segments<bf16>& segments, index_t rows, index_t cols,
                         const SumRows& c) {
    const auto& strips = segments.ahead.rows > 0 ? kRowStripsOf<true> : kRowStripsOf<false>;
    const auto strip = strips[static_cast<std::size_t>(ceil_div(cols, kPanelCols) - 1)];
    for (index_t row = 0; row < rows; row += amx::kTileRows) {
      session.use(shape_of(kRow, rows - row, cols, segments.k_tile), config_for);
      strip(segments, row, c.from(row, 0));
    }
  }

  // A tile of rows from `row` on of A; perhaps lines of a later one's are asked for.
  template <int ColTiles, bool Ahead>
  static void row_strip(const Segments<bf16>& segments, index_t row, const SumRows& c) {
    constexpr auto kIds = std::make_integer_sequence<int, ColTiles>{};
    [[maybe_unused]] NextRows<bf16> ahead = segments.ahead;
    each(kIds, [&](auto j) { amx::begin_sums<j()>(c, 0, j() * kPanelCols); });
    for_each_step(segments, [&](const Segment<bf16>& segment, const bf16* a, const bf16* b) {
      amx::load<6>(a + row * segment.a_stride, segment.a_stride * 2);
      each(kIds, [&](auto j) {
        amx::load<7>(b + j() * segment.panel_stride, kLine);
        amx::dpbf16<j(), 6, 7>();
      });
      if constexpr (Ahead) {
        if (&segment != segments.at) return;
        for (index_t r = 0; r < ahead.rows; ++r) __builtin_prefetch(ahead.from + r * ahead.stride, 0, 3);
        ahead.from += kKUnit;
      }
    });
    each(kIds, [&](auto j) { amx::end_sums<j()>(c, 0, j() * kPanelCols); });
  }

  using Tiles = void (*)(const Segments<bf16>&, const SumRows&);
  static constexpr std::array<std::array<Tiles, 2>, 2> kSquares{
      {{square<1, 1>, square<1, 2>}, {square<2, 1>, square<2, 2>}}};
  static constexpr std::array<Tiles, kStrip> kColumns{column<1>, column<2>, column<3>,
                                                      column<4>, column<5>, column<6>};
  using RowStrip = void (*)(const Segments<bf16>&, index_t, const SumRows&);
  template <bool Ahead>
  static constexpr std::array<RowStrip, kStrip> kRowStripsOf{row_strip<1, Ahead>, row_strip<2, Ahead>,
                                                             row_strip<3, Ahead>, row_strip<4, Ahead>,
                                                             row_strip<5, Ahead>, row_strip<6, Ahead>};
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
