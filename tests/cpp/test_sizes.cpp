// Arithmetic of sizes: parts of a range, strides of the library's own matrices, strides that an address space holds.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "amx_sft_moe/core/element.hpp"
#include "amx_sft_moe/core/overlap.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::addressable;
using amx_sft_moe::bf16;
using amx_sft_moe::Extent;
using amx_sft_moe::index_t;

std::vector<index_t> parts(index_t all, index_t most) {
  std::vector<index_t> counts;
  index_t end = 0;
  amx_sft_moe::for_each_part(all, most, [&](index_t first, index_t count) {
    EXPECT_EQ(first, end) << "of " << all;
    end += count;
    counts.push_back(count);
  });
  EXPECT_EQ(end, all);
  return counts;
}

TEST(Sizes, PartsAreFewAndEven) {
  EXPECT_EQ(parts(0, 6), (std::vector<index_t>{}));
  EXPECT_EQ(parts(1, 6), (std::vector<index_t>{1}));
  EXPECT_EQ(parts(6, 6), (std::vector<index_t>{6}));
  EXPECT_EQ(parts(7, 6), (std::vector<index_t>{4, 3}));
  EXPECT_EQ(parts(31, 6), (std::vector<index_t>{6, 5, 5, 5, 5, 5}));
  EXPECT_EQ(parts(32, 6), (std::vector<index_t>{6, 6, 5, 5, 5, 5}));
  EXPECT_EQ(parts(5, 1), (std::vector<index_t>{1, 1, 1, 1, 1}));
}

TEST(Sizes, StridesAreWholeLinesAndNoMultipleOfAKibibyte) {
  EXPECT_EQ(amx_sft_moe::spread_row_stride<bf16>(0), 0) << "an adapter that is not there takes no memory";
  EXPECT_EQ(amx_sft_moe::spread_row_stride<float>(0), 0);
  EXPECT_EQ(amx_sft_moe::spread_row_stride<bf16>(1), 32);
  EXPECT_EQ(amx_sft_moe::spread_row_stride<float>(17), 32);
  EXPECT_EQ(amx_sft_moe::spread_row_stride<float>(256), 272);
  EXPECT_EQ(amx_sft_moe::spread_row_stride<bf16>(2048), 2080);
}

TEST(Sizes, StridesBeyondAnAddressSpace) {
  constexpr index_t kMost = index_t{1} << 57, kLargest = std::numeric_limits<index_t>::max();
  const auto reaches = [](Extent a, Extent b, Extent c) { return addressable({a, b, c}); };
  EXPECT_TRUE(reaches({2, kMost}, {1, 0}, {1, 0}));
  EXPECT_TRUE(reaches({2, -kMost}, {1, 0}, {1, 0}));
  EXPECT_FALSE(reaches({2, kMost + 1}, {1, 0}, {1, 0}));
  EXPECT_FALSE(reaches({2, -kMost - 1}, {1, 0}, {1, 0}));
  EXPECT_FALSE(reaches({3, kMost}, {1, 0}, {1, 0}));
  EXPECT_TRUE(reaches({1, kLargest}, {0, kLargest}, {2, 1})) << "steps that nobody takes";
  EXPECT_FALSE(reaches({1, 0}, {2, kMost}, {2, 1}));
  EXPECT_FALSE(reaches({2, -kMost}, {2, 1}, {1, 0}));
  EXPECT_TRUE(reaches({2, kMost - 1}, {1, 0}, {2, 1}));
  EXPECT_FALSE(reaches({2, std::numeric_limits<index_t>::min()}, {1, 0}, {1, 0}));
}

TEST(Sizes, CopiesBeyondAnAddressSpace) {
  constexpr index_t kMost = index_t{1} << 57, kLargest = std::numeric_limits<index_t>::max();
  EXPECT_TRUE(addressable({{{kMost, 0}, {1, 0}, {1, 0}}}));
  EXPECT_TRUE(addressable({{{2, 0}, {kMost / 2, 0}, {0, 1}}}));
  EXPECT_FALSE(addressable({{{kMost + 1, 0}, {1, 0}, {1, 0}}}));
  EXPECT_FALSE(addressable({{{2, 0}, {kMost / 2 + 1, 0}, {1, 1}}}));
  EXPECT_FALSE(addressable({{{kLargest, 0}, {kLargest, 0}, {kLargest, 0}}}));
}

}  // namespace
}  // namespace sft_test
