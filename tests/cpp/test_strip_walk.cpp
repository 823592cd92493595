// Strips cover a product once, in order, whatever their depths, and each is announced twice before its turn.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using gemm::Strip;

constexpr index_t kFirst = 256, kMost = 1024, kLine = 32;  // of bf16 in a cache line
constexpr index_t kAll = 1 << 20, kTogether = 576;         // steps of K

template <class Order>
std::vector<Strip> all_strips(const Order& order) {
  std::vector<Strip> strips;
  for (gemm::StripWalk walk(order); !walk.done(); walk.advance()) strips.push_back(walk.here());
  return strips;
}
std::vector<Strip> strips_along_k(index_t k, index_t cols) {
  return all_strips(gemm::StripsAlongK(k, cols, {kFirst, kMost, kAll}));
}

template <class Check>
void for_each_product(Check&& check) {
  std::vector<index_t> ks{2048, 2064, 2128, 2880, 7168, 18432};
  for (index_t k = 0; k < 1500; k += k < 300 ? 1 : 37) ks.push_back(k);
  for (const index_t k : ks) {
    for (const index_t cols : {0, 1, 63, 64, 65, 200, 768, 2048}) check(k, cols);
  }
}

bool same(const Strip& a, const Strip& b) {
  return a.kk == b.kk && a.col == b.col && a.depth == b.depth && a.cols == b.cols;
}

TEST(StripsAlongK, FollowOneAnotherAndCoverTheirColumnsBeforeTheNext) {
  for_each_product([](index_t k, index_t cols) {
    index_t kk = 0, col = 0;
    for (const Strip& strip : strips_along_k(k, cols)) {
      ASSERT_EQ(std::pair(kk, col), std::pair(strip.kk, strip.col)) << k << " x " << cols;
      ASSERT_GT(strip.depth, 0) << k << " x " << cols;
      ASSERT_EQ(std::min(arch::kStripCols, cols - col), strip.cols);
      kk += strip.depth;
      if (kk < k) continue;
      ASSERT_EQ(k, kk) << k << " x " << cols;
      kk = 0;
      col += arch::kStripCols;
    }
    EXPECT_EQ(0, kk);
    if (k > 0) {
      EXPECT_GE(col, cols) << k << " x " << cols;
    }
  });
}

TEST(StripsAlongK, FinishAllColumnsOfAPartOfKBeforeTheNext) {
  for_each_product([](index_t k, index_t cols) {
    index_t begin = 0, end = 0, parts = ceil_div(k, kTogether);
    index_t kk = 0, col = cols;
    for (const Strip& strip : all_strips(gemm::StripsAlongK(k, cols, {kFirst, kFirst, kTogether}))) {
      if (col >= cols) {
        begin = end;
        end += gemm::even_part(k - end, parts--);
        ASSERT_LE(end - begin, kTogether) << k << " x " << cols;
        kk = begin;
        col = 0;
      }
      ASSERT_EQ(std::pair(kk, col), std::pair(strip.kk, strip.col)) << k << " x " << cols;
      ASSERT_GT(strip.depth, 0) << k << " x " << cols;
      ASSERT_LE(strip.depth, kFirst);
      ASSERT_EQ(std::min(arch::kStripCols, cols - col), strip.cols);
      kk += strip.depth;
      ASSERT_LE(kk, end) << k << " x " << cols;
      if (kk < end) continue;
      kk = begin;
      col += arch::kStripCols;
    }
    EXPECT_GE(col, cols) << k << " x " << cols;
    if (cols > 0) {
      EXPECT_EQ(k, end) << k << " x " << cols;
    }
  });
}

TEST(StripsAlongK, BeginShallowAndAreAtMostTwiceAsDeepAsTheOneBefore) {
  for_each_product([](index_t k, index_t cols) {
    index_t before = kFirst / 2, limit = kFirst;
    for (const Strip& strip : strips_along_k(k, cols)) {
      if (strip.kk == 0 && strip.col > 0) limit = std::min(kMost, 2 * limit);
      ASSERT_LE(strip.depth, limit) << k << " x " << cols << " at " << strip.kk << ", " << strip.col;
      // Parts of K are even but for a line, the last one but for two.
      ASSERT_LE(strip.depth, 2 * (before + 2 * kLine))
          << k << " x " << cols << " at " << strip.kk << ", " << strip.col;
      before = strip.depth;
    }
  });
}

TEST(StripsAlongK, AreAsFewAsTheirDepthsAllow) {
  for_each_product([](index_t k, index_t cols) {
    std::vector<index_t> parts(static_cast<std::size_t>(ceil_div(cols, arch::kStripCols)));
    for (const Strip& strip : strips_along_k(k, cols))
      ++parts[static_cast<std::size_t>(strip.col / arch::kStripCols)];
    index_t limit = kFirst;
    for (const index_t of_columns : parts) {
      EXPECT_EQ(ceil_div(k, limit), of_columns) << k << " x " << cols;
      limit = std::min(kMost, 2 * limit);
    }
  });
}

TEST(StripsAlongK, AreOfOneDepthWhereNoneMayBeDeeperThanTheFirst) {
  for (const Strip& strip : all_strips(gemm::StripsAlongK(512, 1024, {128, 128, kAll})))
    EXPECT_EQ(128, strip.depth);
}

TEST(StripsAcross, FollowOneAnotherAndCoverTheirStepsOfKBeforeTheNext) {
  for_each_product([](index_t k, index_t cols) {
    index_t kk = 0, col = 0;
    for (const Strip& strip : all_strips(gemm::StripsAcross(k, cols, kFirst))) {
      ASSERT_EQ(std::pair(kk, col), std::pair(strip.kk, strip.col)) << k << " x " << cols;
      ASSERT_EQ(std::min(kFirst, k - kk), strip.depth);
      ASSERT_EQ(std::min(arch::kStripCols, cols - col), strip.cols);
      col += arch::kStripCols;
      if (col < cols) continue;
      col = 0;
      kk += kFirst;
    }
    EXPECT_EQ(0, col);
    if (cols > 0) {
      EXPECT_GE(kk, k) << k << " x " << cols;
    }
  });
}

// All of B but the first piece, once, in the order in which it is multiplied.
TEST(PieceAhead, EachPieceIsSharedOutAmongTheStripsOfTheOneBefore) {
  for (const index_t wide : {64, 768}) {
    for_each_product([wide](index_t k, index_t cols) {
      index_t kk = 0, col = std::min(wide, cols), row = 0;  // where the next piece is, and its row that is next
      if (col == cols) kk = std::min(kFirst, k), col = 0;
      for (const Strip& strip : all_strips(gemm::StripsAcross(k, cols, kFirst))) {
        const Strip part = gemm::piece_ahead(strip, k, cols, wide);
        const index_t depth = std::min(kFirst, k - kk);
        if (depth == 0) {
          ASSERT_EQ(0, part.depth) << k << " x " << cols;
          continue;
        }
        ASSERT_EQ(std::pair(kk + row, col), std::pair(part.kk, part.col)) << k << " x " << cols;
        ASSERT_EQ(std::min(wide, cols - col), part.cols) << k << " x " << cols;
        row += part.depth;
        ASSERT_LE(row, depth) << k << " x " << cols;
        const bool last =
            strip.col / wide != (strip.col + arch::kStripCols) / wide || strip.col + arch::kStripCols >= cols;
        if (!last) continue;
        ASSERT_EQ(depth, row) << k << " x " << cols << " at " << strip.kk << ", " << strip.col;
        row = 0;
        col += wide;
        if (col >= cols) kk = std::min(kk + kFirst, k), col = 0;
      }
    });
  }
}
template <class Order>
void expect_announced(const Order& order) {
  const std::vector<Strip> strips = all_strips(order);
  gemm::StripWalk walk(order);
  for (std::size_t i = 0; i < strips.size(); ++i, walk.advance()) {
    const auto at = [&](std::size_t n) { return n < strips.size() ? strips[n] : Strip{}; };
    ASSERT_TRUE(same(at(i + 1), walk.next())) << "strip " << i;
    ASSERT_TRUE(same(at(i + 2), walk.later())) << "strip " << i;
  }
  EXPECT_TRUE(walk.done());
}

TEST(StripWalk, AnnouncesTheNextTwo) {
  for_each_product([](index_t k, index_t cols) {
    expect_announced(gemm::StripsAlongK(k, cols, {kFirst, kMost, kAll}));
    expect_announced(gemm::StripsAlongK(k, cols, {kFirst, kFirst, kTogether}));
    expect_announced(gemm::StripsAcross(k, cols, kFirst));
  });
}

bool same(const arch::BlockOfRows& a, const arch::BlockOfRows& b) {
  return a.kk == b.kk && a.col == b.col && a.steps == b.steps && a.cols == b.cols;
}

// Each element once, all steps along K of as many columns as a block has before the next; blocks of which each is announced, and
// twice as large as the one before until two of them take half of L2, or have so many steps.
void expect_all_blocks(index_t k, index_t cols, index_t element, index_t most_steps, index_t most_cols) {
  const index_t wide = std::min(cols, most_cols);
  const index_t fit = wide > 0 ? arch::kBlockBytes / (wide * element) : 0;
  index_t kk = 0, col = 0, full = std::min(arch::kFirstBlockSteps, most_steps);
  const index_t most = std::clamp(fit / arch::kFirstBlockSteps * arch::kFirstBlockSteps, full, most_steps);
  arch::BlockOfRows announced{0, 0, std::min(full, cols > 0 ? k : 0), wide};
  for (arch::BlockWalk walk(k, cols, element, most_steps, most_cols); !walk.done(); walk.advance()) {
    const arch::BlockOfRows& block = walk.here();
    const arch::BlockOfRows expected{kk, col, std::min(full, k - kk), std::min(wide, cols - col)};
    ASSERT_TRUE(same(expected, block))
        << k << " x " << cols << ", block from " << block.kk << ", " << block.col;
    ASSERT_TRUE(same(announced, block))
        << k << " x " << cols << ", block from " << block.kk << ", " << block.col;
    announced = walk.next();
    kk += block.steps;
    full = std::min(most, 2 * block.steps);
    if (kk == k) kk = 0, col += block.cols;
  }
  EXPECT_EQ(0, announced.steps);
  EXPECT_EQ(k > 0 ? cols : 0, col) << k;
}

TEST(BlockWalk, MeetsEachElementOnce) {
  for (const index_t element : {2, 4}) {
    for (const index_t cols : {0, 1, 64, 2880, 4096, 8192, 8193, 20000}) {
      for (const index_t k : {0, 1, 8, 9, 24, 57, 1536}) {
        for (const index_t most : {4, 8, 12, 32, 64}) {
          for (const index_t wide : {64, 2880, 8192}) expect_all_blocks(k, cols, element, most, wide);
        }
      }
    }
  }
}

TEST(EvenPart, PartsAreOfWholeLinesAndDifferByOne) {
  for (index_t k = 1; k <= 4096; ++k) {
    const index_t parts = ceil_div(k, kFirst);
    index_t rest = k, least = k, most = 0;
    for (index_t left = parts; left > 1; --left) {
      const index_t part = gemm::even_part(rest, left);
      ASSERT_EQ(0, part % kLine) << k;
      rest -= part;
      least = std::min(least, part);
      most = std::max(most, part);
    }
    if (parts == 1) continue;
    ASSERT_LE(most, kFirst) << k;
    ASSERT_LE(most - least, kLine) << k;
    ASSERT_EQ(rest, gemm::even_part(rest, 1)) << k;
    ASSERT_LE(rest, most) << k;
    ASSERT_GT(rest, most - 2 * kLine) << k;
  }
}

}  // namespace
