// elements_overlap() against counting: every small shape and stride, and layouts that users have.
#include <gtest/gtest.h>

#include <set>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "amx_sft_moe/core/overlap.hpp"

namespace {

using amx_sft_moe::elements_overlap;
using amx_sft_moe::Extent;
using amx_sft_moe::index_t;

bool overlap_by_counting(const Extent& a, const Extent& b, const Extent& c) {
  std::set<index_t> offsets;
  for (index_t i = 0; i < a.count; ++i) {
    for (index_t j = 0; j < b.count; ++j) {
      for (index_t k = 0; k < c.count; ++k) {
        if (!offsets.insert(i * a.stride + j * b.stride + k * c.stride).second) return true;
      }
    }
  }
  return false;
}

TEST(Overlap, AgreesWithCounting) {
  int overlapping = 0, apart = 0;
  for (const index_t n : {0, 1, 2, 3}) {
    for (const index_t m : {1, 2, 4}) {
      for (const index_t l : {1, 3, 5}) {
        for (index_t sn = -7; sn <= 7; ++sn) {
          for (index_t sm = 0; sm <= 11; ++sm) {
            for (index_t sl = 0; sl <= 6; ++sl) {
              const Extent a{n, sn}, b{m, sm}, c{l, sl};
              const bool wanted = overlap_by_counting(a, b, c);
              (wanted ? overlapping : apart)++;
              ASSERT_EQ(elements_overlap({a, b, c}), wanted)
                  << "[" << n << ", " << m << ", " << l << "] (" << sn << ", " << sm << ", " << sl << ")";
              ASSERT_EQ(elements_overlap({c, a, b}), wanted);
            }
          }
        }
      }
    }
  }
  EXPECT_GT(overlapping, 10000);
  EXPECT_GT(apart, 10000);
}

TEST(Overlap, LayoutsOfGradients) {
  EXPECT_FALSE(elements_overlap({Extent{128, 16 * 2048}, {16, 2048}, {2048, 1}}));  // contiguous
  EXPECT_FALSE(elements_overlap({Extent{128, 16}, {2048, 128 * 16}, {16, 1}}));   // [out, E, r] as [E, out, r]
  EXPECT_FALSE(elements_overlap({Extent{128, 1}, {2048, 128 * 16}, {16, 128}}));  // [out, r, E] as [E, out, r]
  EXPECT_FALSE(elements_overlap({Extent{128, 2 * 16 * 768}, {768, 32}, {16, 1}}));     // every second row
  EXPECT_FALSE(elements_overlap({Extent{2, 3}, {3, 2}, {1, 0}}));                      // 0 2 4 3 5 7
  EXPECT_TRUE(elements_overlap({Extent{128, 16 * 2048 - 1}, {16, 2048}, {2048, 1}}));  // the last with the next
  EXPECT_TRUE(elements_overlap({Extent{128, 0}, {16, 2048}, {2048, 1}}));              // expanded
  EXPECT_TRUE(elements_overlap({Extent{3, 1}, {6, 9}, {33, 3}}));  // 3 x 3 columns are a row
}

}  // namespace
