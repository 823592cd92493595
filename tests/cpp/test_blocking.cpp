// Sizes of tasks: how wide those of gemm_nn are with tiles, and what passes the caches.
#include <gtest/gtest.h>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using Kernel = kernels::AmxBf16;

constexpr index_t kK = 2048;

gemm::Blocking with_l2(index_t bytes) {
  gemm::Blocking blocking;
  blocking.panel_bytes = bytes / 2;
  return blocking;
}
const gemm::Blocking kBlocking = with_l2(index_t{2} << 20);

// Of tasks with so many rows of one of many experts, on two threads: there are always enough.
index_t columns(index_t rows, index_t cols) {
  return kBlocking.nn_cols<Kernel>(kK, rows, cols, {128, 128 * rows, 2});
}

TEST(Blocking, FewRowsOfTilesTakeWholeRowsOfWeights) {
  EXPECT_EQ(columns(1, 2880), 2880);
  EXPECT_EQ(columns(16, 7168), 7168);
  EXPECT_EQ(columns(32, 7168), 7168);
  EXPECT_EQ(columns(16, 14336), 7168) << "or equal parts";
  EXPECT_EQ(columns(8, 20000), 6720);
}

TEST(Blocking, FewExpertsOfFewRowsAreAlike) {
  const auto wide = [](index_t rows, index_t experts, int threads) {
    return kBlocking.nn_cols<Kernel>(kK, rows, 4096, {experts, 16, threads});
  };
  EXPECT_EQ(wide(1, 8, 2), 4096) << "four tasks a thread";
  EXPECT_EQ(wide(9, 8, 2), 4096) << "whatever tokens an expert has";
  EXPECT_EQ(wide(1, 7, 2), 2048) << "or twice as many";
  EXPECT_EQ(wide(1, 8, 16), 512);
  EXPECT_EQ(wide(1, 251, 60), 2048) << "of 251 tasks some threads have five";
  EXPECT_EQ(wide(1, 236, 59), 4096);
}

TEST(Blocking, MoreRowsTakeWholeRowsThatAreShortOrHalves) {
  EXPECT_EQ(columns(33, 2880), 2880);
  EXPECT_EQ(columns(64, 3584), 3584);
  EXPECT_EQ(columns(65, 3584), 3584);
  EXPECT_EQ(columns(33, 4096), 4096);
  EXPECT_EQ(columns(64, 4096), 4096);
  EXPECT_EQ(columns(65, 4096), 2048) << "C takes more of L2";
  EXPECT_EQ(columns(65, 3648), 1856);
  EXPECT_EQ(columns(33, 7168), 3584);
}

// Pieces of 2 KiB are what memory is slowest for: rather four tasks a thread than eight.
TEST(Blocking, FewExpertsOfMoreRowsHaveFewWideTasks) {
  const auto wide = [](index_t experts, int threads) {
    return kBlocking.nn_cols<Kernel>(kK, 40, 4096, {experts, 40 * experts, threads});
  };
  EXPECT_EQ(wide(8, 2), 4096);
  EXPECT_EQ(wide(7, 2), 2048);
  EXPECT_EQ(wide(4, 2), 2048);
  EXPECT_EQ(wide(8, 8), 1024);
  const auto busy = [](index_t all) { return kBlocking.nn_cols<Kernel>(kK, 64, 4096, {8, all, 2}); };
  EXPECT_EQ(busy(256), 4096);
  EXPECT_EQ(busy(255), 2048) << "more than half of a thread's share";
}

TEST(Blocking, MoreRowsTakeEqualPartsOfLongRows) {
  EXPECT_EQ(columns(33, 7232), 1856) << "a quarter";
  EXPECT_EQ(columns(33, 14336), 2048);
  EXPECT_EQ(columns(33, 6144), 2048) << "a third, whole pages, and no half";
}

TEST(Blocking, SumsStayInFiveEighthsOfL2) {
  EXPECT_EQ(columns(160, 2048), 2048);
  EXPECT_EQ(columns(161, 2048), 1024);
  EXPECT_EQ(columns(128, 2880), 1440) << "half of a row";
  EXPECT_EQ(columns(256, 2880), 736) << "whole pairs of panels";
  EXPECT_EQ(columns(256, 2048), 1024);
}

TEST(Blocking, ManyThreadsGetNarrowTasksOfWholePairsOfPanels) {
  for (const index_t cols : {768, 2048, 2880, 7168, 14336}) {
    index_t before = cols + gemm::Blocking::kMaxStripCols;
    for (const int threads : {1, 2, 8, 60, 400}) {
      const index_t wide = kBlocking.nn_cols<Kernel>(kK, 40, cols, {4, 160, threads});
      EXPECT_EQ(wide % gemm::Blocking::kMinCols, 0) << cols << " columns, " << threads << " threads";
      EXPECT_GT(wide, 0);
      EXPECT_LE(wide, before);
      before = wide;
    }
  }
}

// Of gate and up, C of both is kept until it is whole.
TEST(Blocking, RowsOfWeightsInStreams) {
  const auto rows = [](index_t tokens, int threads) {
    return kBlocking.nt_rows<Kernel>(tokens, 2048, {128, 128 * tokens, threads});
  };
  EXPECT_EQ(rows(1, 2), 384);
  EXPECT_EQ(rows(340, 2), 384);
  EXPECT_EQ(rows(352, 2), 192);
  EXPECT_EQ(rows(1, 400), 96) << "many threads";
}

// Tokens that share a task of gemm_nt; where 64 of them have no room in half of L2, K is cut instead.
TEST(Blocking, TokensOfLongRows) {
  const auto tokens = [](index_t k, index_t all) { return kBlocking.tokens_for<Kernel>(k, all); };
  EXPECT_EQ(tokens(2048, 1024), 352);
  EXPECT_EQ(tokens(7168, 128), 64);
  EXPECT_EQ(tokens(arch::kLongK, 128), 64);
  EXPECT_EQ(tokens(arch::kLongK + 1, 128), 128);
  EXPECT_EQ(tokens(14336, 300), 320) << "all of them, whole panels";
  EXPECT_EQ(tokens(14336, 1024), 352) << "as of short rows";
}

TEST(Blocking, WhatPassesTheCaches) {
  const index_t most = index_t{4} * 2 * (index_t{2} << 20);  // L2 of two threads, four times
  EXPECT_FALSE(kBlocking.past_caches<Kernel>(most, 2));
  EXPECT_TRUE(kBlocking.past_caches<Kernel>(most + 1, 2));
  EXPECT_FALSE(kBlocking.past_caches<Kernel>(most + 1, 3));
  EXPECT_FALSE(kBlocking.past_caches<kernels::Avx512Bf16>(8 * most, 2)) << "strips write long pieces of rows";
}

}  // namespace
