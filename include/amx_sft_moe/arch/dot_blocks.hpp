// Dot products of some tokens in which both operands stay where they are near: rows of W by blocks, which stay in L2 while all
// tokens pass over them and memory is asked for the next one; K in parts, whose x stays in L1 while all rows of a block pass
// over it. x from L2 takes the line fill buffers that W's memory needs: 8 tokens of K = 2048 had 65 GFLOP/s of a thread, and 76
// by parts (benchmarks/LOG.md, "Dot products by blocks"). Sums are continued as vectors of lanes, so parts change no bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/row_bytes.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Rows of W, of each the elements of a part of K. Sums of dot products are vectors of lanes, [rows / 3][3][tokens] of them: begun
// by the first part, finished by the last, else from `sums` and there, aligned by a cache line.
template <class S>
struct DotPart {
  const S* w = nullptr;
  index_t row_stride = 0, rows = 0, k = 0;
  float* sums = nullptr;
  bool first = true, last = true;
};

// Adds to C [tokens, rows], the last rows of a block, what a whole tile has made of them.
inline void add_last_rows(const SumRows& tile, index_t tokens, index_t rows, const SumRows& c) {
  for (index_t t = 0; t < tokens; ++t) {
    const float* from = tile.data + t * tile.stride;
    float* to = c.data + t * c.stride;
    for (index_t r = 0; r < rows; ++r) to[r] = c.fresh ? from[r] : to[r] + from[r];
  }
}

// What a tile of dot products asks memory for, into L2: so many lines a turn, 1 to 3, each time `step` bytes further.
template <int Lines>
struct LinesOfTile {
  std::uintptr_t at = 0;
  std::uintptr_t second = 0, third = 0;  // bytes behind it
  std::uintptr_t step = 0;

  AMX_SFT_MOE_INLINE void turn() {
    ask_for_line(at);
    if constexpr (Lines > 1) ask_for_line(at + second);
    if constexpr (Lines > 2) ask_for_line(at + third);
    at += step;
  }
};

// Which lines of the block that is next the tiles of this one ask for, tile after tile: in the order in which they lie where
// its rows adjoin, else side by side, as they will be read. Each pass over this block asks for its share.
class NextBlockOfDots {
 public:
  static constexpr index_t kRows = 3;  // of a tile, a line of each in a turn of a single pass

  // Which of a turn's three lines a pass asks for: of more than three passes the last ones ask for none.
  struct Share {
    index_t first = 0, lines = 0;
  };
  static constexpr Share share_of(index_t pass, index_t passes) {
    if (passes == 1) return {0, 3};
    if (passes == 2) return pass == 0 ? Share{0, 2} : Share{2, 1};
    return {pass, pass < kRows ? 1 : 0};
  }

  explicit NextBlockOfDots(const RowBytes& bytes)
      : bytes_(bytes),
        at_(bytes.first),
        end_(bytes.first + number(bytes.stride * (bytes.rows - 1) + bytes.row_bytes)) {}

  // Of a part of K whose rows have bytes [begin, begin + 64 turns). Where nothing is left to ask for it is x, which is in L1.
  void part(Share share, index_t begin, index_t turns, const float* x) {
    share_ = share;
    begin_ = begin;
    turns_ = turns;
    idle_ = reinterpret_cast<std::uintptr_t>(x);
  }

  // For the tile of rows from `row` of this block on: as many as the share has, one where it has none.
  template <int Lines>
  AMX_SFT_MOE_INLINE LinesOfTile<Lines> lines(index_t row) {
    if (bytes_.rows == 0 || share_.lines == 0) return {idle_, 0, 0, 0};
    return bytes_.adjacent() ? in_order<Lines>() : side_by_side<Lines>(row + share_.first);
  }

 private:
  static constexpr std::uintptr_t number(index_t bytes) { return static_cast<std::uintptr_t>(bytes); }

  template <int Lines>
  AMX_SFT_MOE_INLINE LinesOfTile<Lines> in_order() {
    if (at_ >= end_) return {idle_, 0, 0, 0};
    const LinesOfTile<Lines> tile{at_, number(kLineBytes), number(2 * kLineBytes), number(Lines * kLineBytes)};
    at_ += tile.step * number(turns_);
    return tile;
  }

  template <int Lines>
  AMX_SFT_MOE_INLINE LinesOfTile<Lines> side_by_side(index_t row) const {
    const auto row_at = [&](index_t i) {
      return bytes_.first + number(std::min(row + i, bytes_.rows - 1) * bytes_.stride + begin_);
    };
    const std::uintptr_t at = row_at(0);
    return {at, row_at(1) - at, row_at(2) - at, number(kLineBytes)};
  }

  RowBytes bytes_;
  std::uintptr_t at_, end_, idle_ = 0;
  Share share_;
  index_t begin_ = 0, turns_ = 0;
};

// Tiles has, with its own target attribute, for 1 <= T <= DotTokens, beside order() (arch/in_place_dots.hpp):
//   template <int T, int Lines, class S>  // C [T, rows] += X [T, k] x rows^T; x ordered
//   static void dot_part(const DotPart<S>& part, const float* x, const SumRows& c, NextBlockOfDots& ahead);
// which has, for each three rows, or what is left of them, turn() of ahead.lines<Lines>(row) with each cache line of a row but
// the last few elements, and vectors of kSumLanes sums.
template <class Tiles, int DotTokens>
struct DotBlocks {
  // C [tokens, outs] += X [tokens, k] x W^T, W [outs, k] with its columns adjacent, not gathered; x ordered, in passes.
  template <class S>
  static void multiply(const RowSource<S>& w, index_t outs, const float* ordered, index_t tokens, index_t k,
                       const SumRows& c) {
    const index_t most = rows_of_block(k * index_t{sizeof(S)});
    // Memory is asked for during the block before, so the first ones are small.
    for (index_t o = 0, here = std::min(kRows, outs); o < outs;) {
      const index_t next = std::min({2 * here, most, outs - o - here});
      // Where there is none its first row is not thought of: one row may have any distance from a second.
      NextBlockOfDots ahead(next > 0 ? bytes_of(w.from_row(o + here), next, k) : RowBytes{});
      multiply_block(Block<S>{w.from_row(o), here, k}, ordered, tokens, c.from(0, o), ahead);
      o += here;
      here = next;
    }
  }

 private:
  static constexpr index_t kRows = NextBlockOfDots::kRows;
  static constexpr index_t kTileSums = kRows * DotTokens * Tiles::kSumLanes;

  // W [outs, k], rows that stay in L2.
  template <class S>
  struct Block {
    RowSource<S> w;
    index_t outs, k;
  };

  static constexpr index_t rows_of_block(index_t row_bytes) {
    const index_t fit = kDotBlockBytes / row_bytes / kRows * kRows;
    return std::clamp(fit, kRows, kDotBlockRows);
  }
  // Steps of K whose x, of so many tokens, stays in L1 beside W's lines.
  static constexpr index_t part_of_k(index_t tokens, index_t k) {
    const index_t bytes = tokens * k * index_t{sizeof(float)};
    const index_t parts = bytes <= kSumsBytes ? 1 : ceil_div(bytes, kDotPartBytes);
    return round_up(ceil_div(k, parts), Tiles::kLine);
  }

  template <class S>
  static void multiply_block(const Block<S>& block, const float* ordered, index_t tokens, const SumRows& c,
                             NextBlockOfDots& ahead) {
    const index_t passes = ceil_div(tokens, DotTokens);
    index_t pass = 0;
    for_each_part(tokens, DotTokens, [&](index_t t, index_t count) {
      const float* x = ordered + t * round_up(block.k, Tiles::kLine);
      const SumRows to = c.from(t, 0);
      const NextBlockOfDots::Share share = NextBlockOfDots::share_of(pass++, passes);
      if (share.lines == 3) {
        multiply_pass<3>(block, x, count, to, share, ahead);
      } else if (share.lines == 2) {
        multiply_pass<2>(block, x, count, to, share, ahead);
      } else {
        multiply_pass<1>(block, x, count, to, share, ahead);
      }
    });
  }

  template <int Lines, class S>
  static void multiply_pass(const Block<S>& block, const float* x, index_t tokens, const SumRows& c,
                            NextBlockOfDots::Share share, NextBlockOfDots& ahead) {
    alignas(kLineBytes) float sums[std::size_t{kDotBlockRows / kRows * kTileSums}];
    constexpr index_t kSize = sizeof(S);
    const index_t steps = part_of_k(tokens, block.k);
    for (index_t kk = 0; kk < block.k; kk += steps) {
      const index_t here = std::min(steps, block.k - kk);
      ahead.part(share, kk * kSize, here * kSize / kLineBytes, x + kk * tokens);
      const DotPart<S> part{block.w.data + kk, block.w.row_stride,  block.outs, here, sums,
                            kk == 0,           kk + here == block.k};
      part_of<S, Lines>(tokens)(part, x + kk * tokens, c, ahead);
    }
  }

  template <class S>
  using Part = void (*)(const DotPart<S>&, const float*, const SumRows&, NextBlockOfDots&);
  template <class S, int Lines>
  static Part<S> part_of(index_t tokens) {
    constexpr int kLeast = Lines == 3 ? 1 : (DotTokens + 1) / 2;  // tokens of one of several passes
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Part<S> kOf[] = {&Tiles::template dot_part<N + kLeast, Lines, S>...};
      return kOf[n];
    }(tokens - kLeast, std::make_integer_sequence<int, DotTokens - kLeast + 1>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
