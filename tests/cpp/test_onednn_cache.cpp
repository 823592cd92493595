// The compiled products that threads keep for kernel onednn: bounded, and started anew by all threads together.
#include <gtest/gtest.h>

#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "amx_sft_moe/kernels/onednn.hpp"

namespace {

using amx_sft_moe::DType;
using amx_sft_moe::index_t;
using amx_sft_moe::arch::onednn::Layout;
using amx_sft_moe::arch::onednn::MatmulCache;

constexpr index_t kK = 16;
constexpr index_t kCols = 16;
constexpr index_t kMost = 1024;  // products that a cache holds

// [rows, 16] of ones times [16, 16] of ones.
void expect_product(MatmulCache& cache, index_t rows) {
  const amx_sft_moe::parallel::SingleThreaded single_threaded;
  const auto size = static_cast<std::size_t>(rows * kK);
  const std::vector<float> a(size, 1.0F);
  const std::vector<float> b(kK * kCols, 1.0F);
  std::vector<float> c(size, -1.0F);
  cache.run({rows, kCols, kK, DType::kFp32, Layout::kRows, false}, a.data(), b.data(), c.data());
  ASSERT_EQ(c.front(), 16.0F);
  ASSERT_EQ(c.back(), 16.0F);
}

void fill(MatmulCache& cache) {
  for (index_t rows = 1; rows <= kMost; ++rows) expect_product(cache, rows);
}

// What threads do before each parallel region (moe/workspace.hpp).
void level(MatmulCache& first, MatmulCache& second) {
  first.grow_to(second);
  second.grow_to(first);
}

TEST(OneDnnCache, ThreadsTakeOverWhatTheOthersMade) {
  MatmulCache first, second;
  expect_product(first, 3);
  expect_product(second, 5);
  level(first, second);
  EXPECT_EQ(first.bytes(), second.bytes());
  const index_t bytes = first.bytes();
  for (MatmulCache* cache : {&first, &second}) {
    expect_product(*cache, 3);
    expect_product(*cache, 5);
    EXPECT_EQ(cache->bytes(), bytes) << "made again";
  }
}

TEST(OneDnnCache, StartsAnewWhenItIsFull) {
  MatmulCache cache;
  expect_product(cache, 1);
  const index_t one = cache.bytes();
  fill(cache);
  const index_t full = cache.bytes();
  EXPECT_GT(full, 100 * one);
  expect_product(cache, kMost);
  EXPECT_EQ(cache.bytes(), full);
  expect_product(cache, kMost + 1);
  EXPECT_LT(cache.bytes(), full / 100);
}

void expect_both_start_anew(MatmulCache& first, MatmulCache& second, MatmulCache& emptied) {
  fill(second);
  level(first, second);
  const index_t full = first.bytes();
  EXPECT_EQ(second.bytes(), full);
  expect_product(emptied, kMost + 1);
  level(first, second);
  EXPECT_LT(first.bytes(), full / 100);
  EXPECT_EQ(second.bytes(), first.bytes());
  const index_t few = first.bytes();
  expect_product(first, 7);
  expect_product(second, 9);
  level(first, second);
  EXPECT_EQ(second.bytes(), first.bytes());
  EXPECT_GT(first.bytes(), few);
}

TEST(OneDnnCache, NotFilledAgainFromTheOthers) {
  {
    SCOPED_TRACE("the first one was full");
    MatmulCache first, second;
    expect_both_start_anew(first, second, first);
  }
  SCOPED_TRACE("the second one was full");
  MatmulCache first, second;
  expect_both_start_anew(first, second, second);
}

}  // namespace
