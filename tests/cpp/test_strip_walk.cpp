// Strips cover a product once, in order, whatever their depths, and each is announced twice before its turn.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using gemm::Order;
using gemm::Strip;

constexpr index_t kMost = 1024;

template <Order kOrder>
std::vector<Strip> all_strips(index_t k, index_t cols) {
  std::vector<Strip> strips;
  for (gemm::StripWalk<kOrder> walk(k, cols, kMost); !walk.done(); walk.advance())
    strips.push_back(walk.here());
  return strips;
}

bool same(const Strip& a, const Strip& b) {
  return a.kk == b.kk && a.col == b.col && a.depth == b.depth && a.cols == b.cols;
}

template <Order kOrder>
class StripWalkOf : public testing::Test {
 protected:
  template <class Check>
  void for_each_product(Check&& check) {
    for (const index_t k :
         {0, 1, 16, 63, 64, 255, 256, 257, 768, 1023, 1024, 1025, 1408, 2048, 2880, 7168, 18432}) {
      for (const index_t cols : {0, 1, 63, 64, 65, 200, 768, 2048}) check(k, cols);
    }
  }
};

class StripsAlongK : public StripWalkOf<Order::kAlongK> {};
class StripsAcross : public StripWalkOf<Order::kAcross> {};

TEST_F(StripsAlongK, FollowOneAnotherAndCoverEachColumnBeforeTheNext) {
  for_each_product([](index_t k, index_t cols) {
    index_t kk = 0, col = 0;
    for (const Strip& strip : all_strips<Order::kAlongK>(k, cols)) {
      ASSERT_EQ(std::pair(kk, col), std::pair(strip.kk, strip.col)) << k << " x " << cols;
      ASSERT_GT(strip.depth, 0);
      ASSERT_LE(strip.depth, kMost);
      ASSERT_EQ(std::min(arch::kStripCols, cols - col), strip.cols);
      kk += strip.depth;
      if (kk < k) continue;
      ASSERT_EQ(k, kk) << k << " x " << cols;
      kk = 0;
      col += arch::kStripCols;
    }
    if (k > 0) {
      EXPECT_GE(col, cols) << k << " x " << cols;
    }
  });
}

TEST_F(StripsAcross, FollowOneAnotherAndCoverEachBlockOfKBeforeTheNext) {
  for_each_product([](index_t k, index_t cols) {
    index_t kk = 0, col = 0;
    for (const Strip& strip : all_strips<Order::kAcross>(k, cols)) {
      ASSERT_EQ(std::pair(kk, col), std::pair(strip.kk, strip.col)) << k << " x " << cols;
      ASSERT_EQ(std::min(kMost, k - kk), strip.depth);
      ASSERT_EQ(std::min(arch::kStripCols, cols - col), strip.cols);
      col += arch::kStripCols;
      if (col < cols) continue;
      col = 0;
      kk += kMost;
    }
    if (cols > 0) {
      EXPECT_GE(kk, k) << k << " x " << cols;
    }
  });
}

template <Order kOrder>
void expect_announced(index_t k, index_t cols) {
  const std::vector<Strip> strips = all_strips<kOrder>(k, cols);
  gemm::StripWalk<kOrder> walk(k, cols, kMost);
  for (std::size_t i = 0; i < strips.size(); ++i, walk.advance()) {
    const auto at = [&](std::size_t n) { return n < strips.size() ? strips[n] : Strip{}; };
    ASSERT_TRUE(same(at(i + 1), walk.next())) << k << " x " << cols << ", strip " << i;
    ASSERT_TRUE(same(at(i + 2), walk.later())) << k << " x " << cols << ", strip " << i;
  }
  EXPECT_TRUE(walk.done()) << k << " x " << cols;
}

TEST_F(StripsAlongK, TheNextTwoAreAnnounced) {
  for_each_product(expect_announced<Order::kAlongK>);
}
TEST_F(StripsAcross, TheNextTwoAreAnnounced) {
  for_each_product(expect_announced<Order::kAcross>);
}

// A strip is made during the one before it: that one must not be much shallower.
TEST_F(StripsAlongK, BeginShallowAndAreAtMostTwiceAsDeepAsInTheColumnBefore) {
  constexpr index_t kLine = 32;
  for_each_product([](index_t k, index_t cols) {
    const std::vector<Strip> strips = all_strips<Order::kAlongK>(k, cols);
    index_t before = arch::kFirstStripDepth / 2, of_column = 0;
    for (const Strip& strip : strips) {
      if (strip.kk == 0) {
        if (of_column > 0) before = of_column;
        of_column = strip.depth;
      }
      ASSERT_LE(strip.depth, 2 * before + kLine)
          << k << " x " << cols << " at " << strip.kk << ", " << strip.col;
      ASSERT_GT(strip.depth, of_column - kLine * ceil_div(k, of_column))
          << k << " x " << cols << " at " << strip.kk;
    }
  });
}

TEST(StripDepth, PartsOfKAreEvenAndOfWholeLines) {
  EXPECT_EQ(0, gemm::strip_depth(0, kMost));
  EXPECT_EQ(32, gemm::strip_depth(1, kMost));
  EXPECT_EQ(768, gemm::strip_depth(768, kMost));
  EXPECT_EQ(1024, gemm::strip_depth(1024, kMost));
  EXPECT_EQ(544, gemm::strip_depth(1025, kMost));
  EXPECT_EQ(960, gemm::strip_depth(2880, kMost));
  EXPECT_EQ(1024, gemm::strip_depth(7168, kMost));
  EXPECT_EQ(384, gemm::strip_depth(768, 512));
  EXPECT_EQ(128, gemm::strip_depth(7168, 128));
}

}  // namespace
