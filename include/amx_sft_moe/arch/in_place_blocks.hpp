// Products of few rows of A, or few steps along K, that read B where it lies and keep C in registers: some rows of B, a
// block, meet all of A in one register tile of C after the other, while memory is asked for the block that is next, row
// after row (for half of it where it is twice as large). Against arch/in_place.hpp, where four rows of B meet the sums of
// many columns in L1, C passes through registers an eighth as often, and memory is read in the order in which it lies
// while arithmetic finds what it needs in L2.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/of_this_cpu.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/row_bytes.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Rows [kk, kk + steps) of B, of each columns [col, col + cols). steps 0: there is none.
struct BlockOfRows {
  index_t kk = 0, col = 0, steps = 0, cols = 0;
};

// The blocks of B [k, cols], elements of so many bytes, one after the other: all steps along K of as many columns as are
// asked for together before the next, at most so many of either. Memory is asked for during the block before, so the first ones
// are small.
class BlockWalk {
 public:
  BlockWalk(index_t k, index_t cols, index_t element, index_t most_steps, index_t most_cols)
      : k_(k), cols_(cols), wide_(std::min(cols, most_cols)) {
    const index_t fit = kBlockBytes / std::max<index_t>(wide_ * element, 1);
    const index_t first = std::min(kFirstBlockSteps, most_steps);
    most_ = std::clamp(fit / kFirstBlockSteps * kFirstBlockSteps, first, most_steps);
    next_ = {0, 0, cols > 0 ? std::min(first, k) : 0, wide_};
    advance();
  }

  const BlockOfRows& here() const { return here_; }
  const BlockOfRows& next() const { return next_; }
  bool done() const { return here_.steps == 0; }

  void advance() {
    here_ = next_;
    const bool below = here_.kk + here_.steps < k_;
    const index_t kk = below ? here_.kk + here_.steps : 0;
    const index_t col = below ? here_.col : std::min(here_.col + wide_, cols_);
    const index_t steps = col < cols_ ? std::min({most_, 2 * here_.steps, k_ - kk}) : 0;
    next_ = {kk, col, steps, std::min(wide_, cols_ - col)};
  }

 private:
  index_t k_, cols_, wide_, most_;
  BlockOfRows here_, next_;
};

// Whether a block is the first or the last along K. Before the first and after the last columns of C stand as in memory; between
// them a tile has its sums in what order it likes, as long as blocks of the same columns agree.
struct BlockEnds {
  bool first = true, last = true;
};

// Products of gemm_nn and gemm_tn. Tiles has, with its own target attribute, for kLeastRows <= R <= kRows, with A of its type
// Element:
//   template <int R, class S, class Ahead>
//   static void block(const Element* a, index_t a_stride, const S* const* b, index_t steps, index_t cols, const SumRows& c,
//                     BlockEnds ends, Ahead& ahead);
// which adds to C [R, cols] the products of A [R, steps], 1 <= steps <= kSteps, with the first `cols` elements of rows b, behind
// the last of which is a null, and has ahead.turn() with each line of B, but for the last columns. And perhaps most_cols(rows):
// columns whose sums have room.
template <class Tiles, int MostRows>
struct InPlaceBlocks {
  using A = typename Tiles::Element;
  static constexpr index_t kLeastRows = Tiles::kLeastRows;
  // Whether B is read in place: for few rows of A, or few steps along K. Tiles that are not for every number of rows leave few
  // steps to others, which hold them in registers (InPlaceSums).
  static constexpr bool in_place(index_t k, index_t rows) {
    if constexpr (kLeastRows > 1) return k > kHeldSteps && rows >= kLeastRows && rows <= MostRows;
    return rows <= MostRows || k <= kFewSteps;
  }

  // C [rows, cols] += A [rows, k] x B [k, cols], B's columns adjacent.
  template <class S>
  static void multiply_in_place(const A* a, index_t a_stride, index_t rows, const RowSource<S>& b, index_t k,
                                index_t cols, const SumRows& c, bool in_order = asks_in_order()) {
    const index_t most_cols = columns_of_part(rows, cols, kBlockRowBytes / index_t{sizeof(S)});
    for (BlockWalk walk(k, cols, sizeof(S), most_steps(rows, in_order), most_cols); !walk.done();
         walk.advance()) {
      const BlockOfRows& here = walk.here();
      const BlockOfRows& next = walk.next();
      const LinesInOrder lines(bytes_of(b.from_row(next.kk).from_column(next.col), next.steps, next.cols),
                               rows_asked_into());
      Ahead ahead = ahead_of(lines, rows);
      multiply_block(a + here.kk, a_stride, rows, b.from_row(here.kk).from_column(here.col), here,
                     c.after(here.kk).from(0, here.col), {here.kk == 0, here.kk + here.steps == k}, ahead);
    }
  }

 private:
  static constexpr index_t kRows = Tiles::kRows;
  static constexpr bool kOnePass = MostRows <= kRows;
  using Ahead = std::conditional_t<kOnePass, LinesInOrder, SharedLines>;

  static Ahead ahead_of(const LinesInOrder& lines, index_t rows) {
    if constexpr (kOnePass) {
      return lines;
    } else {
      return {lines, rows};
    }
  }

  // Equal parts of a row of C.
  static constexpr index_t columns_of_part(index_t rows, index_t cols, index_t most) {
    if constexpr (requires { Tiles::most_cols(rows); }) most = std::min(most, Tiles::most_cols(rows));
    return cols <= most ? most : round_up(ceil_div(cols, ceil_div(cols, most)), kStripCols);
  }

  static constexpr index_t most_steps(index_t rows, bool in_order) {
    if (!in_order) return Tiles::kSteps;
    const auto steps = kBlockStepsOfARow * static_cast<index_t>(std::bit_floor(static_cast<std::size_t>(rows)));
    return std::min(steps, Tiles::kSteps);
  }

  // C [rows, block.cols] += A [rows, block.steps] x b. Tiles share out what is asked for as they share out the rows. Whole tiles
  // and the rest, not parts as large as one another: two tiles of 8 rows take longer than one of 12 and one of 4.
  template <class S>
  static void multiply_block(const A* a, index_t a_stride, index_t rows, const RowSource<S>& b,
                             const BlockOfRows& block, const SumRows& c, BlockEnds ends, Ahead& ahead) {
    const S* row[std::size_t{Tiles::kSteps} + 1];
    for (index_t k = 0; k < block.steps; ++k) row[k] = b.row(k);
    row[block.steps] = nullptr;
    const auto tile = [&](index_t r, auto& asked) {
      block_of<S>(std::min(kRows, rows - r), asked)(a + r * a_stride, a_stride, row, block.steps, block.cols,
                                                    c.from(r, 0), ends, asked);
    };
    NothingAhead nothing;
    for (index_t r = 0; r < rows; r += kRows) {
      if constexpr (!kOnePass) ahead.begin_pass(std::min(kRows, rows - r));
      ahead.any() ? tile(r, ahead) : tile(r, nothing);
    }
  }

  template <class S, class Asked>
  using Block = void (*)(const A*, index_t, const S* const*, index_t, index_t, const SumRows&, BlockEnds,
                         Asked&);
  template <class S, class Asked>
  static Block<S, Asked> block_of(index_t rows, const Asked&) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr Block<S, Asked> kOf[] = {&Tiles::template block<Less + int{kLeastRows}, S, Asked>...};
      return kOf[n];
    }(rows - kLeastRows, std::make_integer_sequence<int, int{kRows - kLeastRows + 1}>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
