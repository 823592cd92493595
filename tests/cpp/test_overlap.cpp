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

using amx_sft_moe::Footprint;
using amx_sft_moe::memory_overlaps;

// Of 2-byte elements, a tensor that begins `begin` elements into some memory.
Footprint at(index_t begin, std::array<Extent, 3> dims) {
  static const char memory[1 << 16] = {};
  return {memory + 4096 + 2 * begin, 2, dims};
}

std::set<index_t> elements(index_t begin, const std::array<Extent, 3>& dims) {
  std::set<index_t> found;
  for (index_t i = 0; i < dims[0].count; ++i) {
    for (index_t j = 0; j < dims[1].count; ++j) {
      for (index_t k = 0; k < dims[2].count; ++k) {
        found.insert(begin + i * dims[0].stride + j * dims[1].stride + k * dims[2].stride);
      }
    }
  }
  return found;
}

// What shares an element is always seen; what does not may be refused only where strides are unlike.
TEST(MemoryOverlap, AgreesWithCounting) {
  int sharing = 0, apart = 0, undecided = 0;
  for (const index_t rows : {1, 2, 3}) {
    for (index_t expert = 4; expert <= 20; expert += 4) {
      for (index_t row = -6; row <= 6; row += 2) {
        for (const index_t col : {1, 2}) {
          const std::array<Extent, 3> a{Extent{2, expert}, {rows, row}, {2, col}};
          for (const std::array<Extent, 3>& b :
               {a, std::array<Extent, 3>{Extent{3, expert}, {2, 4}, {3, 1}}, {Extent{1, 0}, {2, 3}, {2, 1}}}) {
            for (index_t begin = -30; begin <= 40; ++begin) {
              std::set<index_t> both = elements(0, a);
              const std::size_t own = both.size();
              const std::set<index_t> other = elements(begin, b);
              both.insert(other.begin(), other.end());
              const bool shares = both.size() < own + other.size();
              const bool found = memory_overlaps(at(0, a), at(begin, b));
              ASSERT_EQ(memory_overlaps(at(begin, b), at(0, a)), found);
              if (shares) {
                ASSERT_TRUE(found) << rows << " " << expert << " " << row << " " << col << " " << begin;
              }
              (shares ? sharing : found ? undecided : apart)++;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(sharing, 10000);
  EXPECT_GT(apart, 10000);
  EXPECT_LT(undecided, apart / 4);
}

// Tensors of unlike sizes within the dimensions of one buffer, of elements side by side: nothing is undecided.
TEST(MemoryOverlap, PartsOfOneBuffer) {
  int sharing = 0, apart = 0;
  for (const index_t rows : {1, 2, 3}) {
    for (const index_t wide_a : {1, 2, 5}) {
      for (const index_t wide_b : {1, 3, 6}) {
        for (const index_t experts : {1, 2}) {
          for (index_t begin = -50; begin <= 50; ++begin) {
            const std::array<Extent, 3> a{Extent{2, 21}, {rows, 7}, {wide_a, 1}};
            const std::array<Extent, 3> b{Extent{experts, 21}, {2, 7}, {wide_b, 1}};
            std::set<index_t> both = elements(0, a);
            const std::set<index_t> other = elements(begin, b);
            const std::size_t all = both.size() + other.size();
            both.insert(other.begin(), other.end());
            const bool shares = both.size() < all;
            ASSERT_EQ(memory_overlaps(at(0, a), at(begin, b)), shares)
                << rows << " " << wide_a << " " << wide_b << " " << experts << " " << begin;
            ASSERT_EQ(memory_overlaps(at(begin, b), at(0, a)), shares);
            (shares ? sharing : apart)++;
          }
        }
      }
    }
  }
  EXPECT_GT(sharing, 1000);
  EXPECT_GT(apart, 1000);
}

TEST(MemoryOverlap, LayoutsOfGradients) {
  const std::array<Extent, 3> half{Extent{8, 2 * 6 * 10}, {6, 10}, {10, 1}};  // rows of [8, 12, 10]
  EXPECT_FALSE(memory_overlaps(at(0, half), at(60, half)));
  EXPECT_TRUE(memory_overlaps(at(0, half), at(50, half)));
  const std::array<Extent, 3> by_turns{Extent{8, 120}, {6, 20}, {10, 1}};
  EXPECT_FALSE(memory_overlaps(at(0, by_turns), at(10, by_turns)));
  EXPECT_TRUE(memory_overlaps(at(0, by_turns), at(20, by_turns)));
  const std::array<Extent, 3> transposed{Extent{8, 120}, {6, 2}, {10, 12}};  // columns of [8, 10, 12] by turns
  EXPECT_FALSE(memory_overlaps(at(0, transposed), at(1, transposed)));
  // Gate [6, 10] and down [10, 6] of each expert one behind the other.
  EXPECT_FALSE(memory_overlaps(at(0, half), at(60, {Extent{8, 120}, {10, 6}, {6, 1}})));
  EXPECT_TRUE(memory_overlaps(at(0, half), at(59, {Extent{8, 120}, {10, 6}, {6, 1}})));
  EXPECT_FALSE(memory_overlaps(at(0, half), Footprint{}));
  EXPECT_FALSE(memory_overlaps(at(0, half), at(5, {Extent{8, 120}, {0, 10}, {10, 1}})));
  // Factors of ranks 2 and 5 side by side in rows of 7; rows of numbers of 2 and of 4 bytes in one buffer.
  const std::array<Extent, 3> two{Extent{8, 42}, {6, 7}, {2, 1}}, five{Extent{8, 42}, {6, 7}, {5, 1}};
  EXPECT_FALSE(memory_overlaps(at(0, two), at(2, five)));
  EXPECT_FALSE(memory_overlaps(at(5, two), at(0, five)));
  EXPECT_TRUE(memory_overlaps(at(4, two), at(0, five)));
  const Footprint of_four(reinterpret_cast<const void*>(at(10, two).begin), 4, {Extent{1, 0}, {9, 7}, {2, 1}});
  EXPECT_FALSE(memory_overlaps(at(0, {Extent{1, 0}, {9, 14}, {10, 1}}), of_four));
  EXPECT_TRUE(memory_overlaps(at(0, {Extent{1, 0}, {9, 14}, {11, 1}}), of_four));
  // A [8, 3, 5] and B [8, 7, 3], which is stored as [8, 3, 7], side by side in rows of 12.
  const std::array<Extent, 3> a{Extent{8, 36}, {3, 12}, {5, 1}}, b{Extent{8, 36}, {7, 1}, {3, 12}};
  EXPECT_FALSE(memory_overlaps(at(0, a), at(5, b)));
  EXPECT_TRUE(memory_overlaps(at(0, a), at(4, b)));
  EXPECT_FALSE(memory_overlaps(at(7, a), at(0, b)));
  EXPECT_TRUE(memory_overlaps(at(6, a), at(0, b)));
  // The same memory as elements of another size.
  EXPECT_TRUE(memory_overlaps(at(0, half), Footprint(reinterpret_cast<const void*>(at(9, half).begin), 4,
                                                     {Extent{1, 0}, {1, 0}, {1, 1}})));
}

}  // namespace
