// What sizes choose: an expert's tokens their form, and how wide tasks are, of gemm_nt with strips and of gemm_nn with tiles too,
// and what passes the caches.
#include <gtest/gtest.h>

#include <algorithm>

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

// Steps along K that tokens meet together in gemm_nt, in streams: all, or whole pages whose x has room.
TEST(Blocking, PartsOfK) {
  const auto depth = [](index_t k, index_t tokens) { return arch::streamed_depth<bf16>(k, tokens); };
  EXPECT_EQ(depth(2048, 384), 2048) << "a page is never cut";
  EXPECT_EQ(depth(4096, 136), 4096);
  EXPECT_EQ(depth(4096, 137), 2048);
  EXPECT_EQ(depth(14336, 64), 8192);
  EXPECT_EQ(depth(14336, 128), 4096);
  EXPECT_EQ(depth(14336, 384), 2048) << "at least a page";
  EXPECT_EQ(depth(7168, 155), 7168) << "no whole pages: cut for twice as many tokens";
  EXPECT_EQ(depth(7168, 156), 2048);
  EXPECT_EQ(depth(0, 100), 0);
}

// Tokens that share a task of gemm_nt: as many as x has room for; where K is cut, all.
TEST(Blocking, TokensOfLongRows) {
  const auto tokens = [](index_t k, index_t all) { return kBlocking.tokens_for<Kernel>(k, all); };
  EXPECT_EQ(tokens(2048, 1024), 352);
  EXPECT_EQ(tokens(7168, 128), 64);
  EXPECT_EQ(tokens(7168, 192), 192);
  EXPECT_EQ(tokens(8192, 64), 64) << "whole";
  EXPECT_EQ(tokens(8192, 128), 128);
  EXPECT_EQ(tokens(14336, 300), 320) << "all of them, whole panels";
  EXPECT_EQ(tokens(14336, 1024), 352) << "as of short rows";
}

// More tokens together than x has room for only where each task's K is cut, the last one's too.
TEST(Blocking, WhatIsNotSplitByTokensIsCut) {
  for (const index_t k : {2880, 3584, 4096, 5120, 7168, 8192, 14336}) {
    const index_t room = std::max<index_t>(kBlocking.panel_bytes / (2 * k), 32);
    for (index_t all = 1; all <= 1500; ++all) {
      const index_t each = kBlocking.tokens_for<Kernel>(k, all);
      if (2 * each <= 3 * round_up(room, 32)) continue;  // half as many again rather than one part more
      for (index_t rest = all; rest > 0; rest -= each) {
        ASSERT_LT(arch::streamed_depth<bf16>(k, std::min(each, rest)), k) << all << " tokens, K " << k;
      }
    }
  }
}

TEST(Blocking, WhatPassesTheCaches) {
  const index_t most = index_t{4} * 2 * (index_t{2} << 20);  // L2 of two threads, four times
  EXPECT_FALSE(kBlocking.past_caches<Kernel>(most, 2));
  EXPECT_TRUE(kBlocking.past_caches<Kernel>(most + 1, 2));
  EXPECT_FALSE(kBlocking.past_caches<Kernel>(most + 1, 3));
  EXPECT_TRUE(kBlocking.past_caches<kernels::Avx512Bf16>(most + 1, 2)) << "tokens along the lanes";
  EXPECT_FALSE(kBlocking.past_caches<kernels::Avx512<bf16>>(8 * most, 2)) << "strips write long pieces of rows";
}

// By all the expert's tokens.
TEST(TokenForm, DotProductsAreForFewTokens) {
  using Lanes = kernels::Avx512Bf16;
  using Strips = kernels::Avx512<bf16>;
  EXPECT_EQ(gemm::TokenForm::kDots, gemm::token_form<Lanes>(1));
  EXPECT_EQ(gemm::TokenForm::kDots, gemm::token_form<Lanes>(12));
  EXPECT_EQ(gemm::TokenForm::kFewPanels, gemm::token_form<Lanes>(13));
  EXPECT_EQ(gemm::TokenForm::kFewPanels, gemm::token_form<Lanes>(24));
  EXPECT_EQ(gemm::TokenForm::kPanels, gemm::token_form<Lanes>(25));
  EXPECT_EQ(gemm::TokenForm::kDots, gemm::token_form<Strips>(16));
  EXPECT_EQ(gemm::TokenForm::kShortDots, gemm::token_form<Strips>(17));
  EXPECT_EQ(gemm::TokenForm::kShortDots, gemm::token_form<Strips>(32));
  EXPECT_EQ(gemm::TokenForm::kStrips, gemm::token_form<Strips>(33));
  EXPECT_EQ(gemm::TokenForm::kDots, gemm::token_form<kernels::Avx2<bf16>>(16));
  EXPECT_EQ(gemm::TokenForm::kShortDots, gemm::token_form<kernels::Avx2<bf16>>(24));
  EXPECT_EQ(gemm::TokenForm::kStrips, gemm::token_form<kernels::Avx2<bf16>>(25));
  EXPECT_EQ(gemm::TokenForm::kPanels, gemm::token_form<kernels::AmxBf16>(1));
  EXPECT_EQ(gemm::TokenForm::kStrips, gemm::token_form<kernels::Portable<bf16>>(1));
}

TEST(TokenForm, DotProductsOfMoreTokensAreForRowsOfWhichXHasRoom) {
  using Form = gemm::TokenForm;
  for (const Form form : {Form::kDots, Form::kShortDots}) {
    EXPECT_FALSE(gemm::by_dots(form, 63));
    EXPECT_TRUE(gemm::by_dots(form, 64));
    EXPECT_TRUE(gemm::by_dots(form, 4096));
  }
  EXPECT_TRUE(gemm::by_dots(Form::kDots, 4097));
  EXPECT_FALSE(gemm::by_dots(Form::kShortDots, 4097));
  EXPECT_FALSE(gemm::by_dots(Form::kStrips, 64));
  EXPECT_FALSE(gemm::by_dots(Form::kFewPanels, 64));
  EXPECT_FALSE(gemm::by_dots(Form::kPanels, 64));
}

// Parts of K whose sums they end with follow from a task's tokens, which must be all of the expert's, whatever caches there are.
TEST(TokenForm, TokensOfTwoChainsAreOneTask) {
  using Lanes = kernels::Avx512Bf16;
  for (const index_t panel_bytes : {index_t{1} << 17, index_t{1} << 19, index_t{1} << 22}) {
    const gemm::Blocking blocking{panel_bytes};
    for (index_t tokens = 1; tokens <= 100; ++tokens) {
      if (gemm::token_form<Lanes>(tokens) != gemm::TokenForm::kFewPanels) continue;
      EXPECT_LE(tokens, gemm::Blocking::kRowChunk);
      for (const index_t k : {1, 2048, 14336, 100000}) EXPECT_LE(tokens, blocking.tokens_for<Lanes>(k, tokens));
    }
  }
}

// Tasks begin where a panel does, none is much larger than what fits, and there are no more than parts of half as many again.
TEST(EvenTokens, PartsAreAlignedBoundedAndFew) {
  for (const index_t fit : {32, 64, 128, 256}) {
    for (index_t tokens = 1; tokens <= 40 * fit; ++tokens) {
      const index_t step = gemm::Blocking::even_tokens(tokens, fit);
      const index_t parts = ceil_div(tokens, step);
      EXPECT_EQ(0, step % arch::kPanelCols) << tokens << " of " << fit;
      EXPECT_LE(step, fit + fit / 2 + gemm::Blocking::kMinCols) << tokens << " of " << fit;
      EXPECT_LE(parts, ceil_div(2 * tokens, 3 * fit)) << tokens << " of " << fit;
    }
  }
}

// Of a region's tasks: whether one with so many rows of a weight leaves enough of them, and not too large ones.
bool leaves_enough(index_t rows, index_t tokens, index_t out, const gemm::Load& load) {
  const index_t tasks = gemm::Blocking::kTasksPerThread * index_t{load.threads};
  const auto share = static_cast<double>(tokens) * static_cast<double>(std::min(rows, out)) /
                     (static_cast<double>(load.rows) * static_cast<double>(out));
  return load.experts * ceil_div(out, rows) >= tasks && share <= 1.0 / static_cast<double>(tasks) * (1 + 1e-12);
}

// Whether such a task is more than half of a thread's share of the region.
bool keeps_others_waiting(index_t rows, index_t tokens, index_t out, const gemm::Load& load) {
  const auto task = static_cast<double>(tokens) * static_cast<double>(std::min(rows, out));
  const auto share = static_cast<double>(load.rows) * static_cast<double>(out) / load.threads;
  return load.threads > 1 && task > 0.5 * share * (1 + 1e-12);
}

// As wide as that allows, in whole strips; narrower than otherwise where the other threads would wait for a task. An expert
// may have as many tokens as all, or four times its share.
TEST(Blocking, TasksOfGemmNtAreAsWideAsEveryThreadHasEnoughOf) {
  using Strips = kernels::Portable<bf16>;
  constexpr index_t kLeast = gemm::Blocking::kOutRows<Strips>;
  constexpr index_t kMost = gemm::Blocking::kMaxOutRows<Strips>;
  const gemm::Blocking blocking;
  int wide = 0, narrow = 0;
  for (const index_t experts : {1, 8, 128}) {
    for (const int threads : {1, 2, 60}) {
      for (const index_t tokens : {1, 8, 33, 128, 256}) {
        for (const index_t out : {96, 768, 2880, 14336}) {
          const gemm::Load load{experts, std::max(tokens, experts * tokens / 4), threads};
          const index_t rows = blocking.nt_rows<Strips>(tokens, out, load);
          SCOPED_TRACE(testing::Message() << experts << " experts, " << threads << " threads, " << tokens
                                          << " tokens, out " << out << ": " << rows);
          EXPECT_EQ(0, rows % arch::kStripCols);
          EXPECT_TRUE(rows <= kLeast || leaves_enough(rows, tokens, out, load));
          EXPECT_TRUE(rows == kMost || !leaves_enough(2 * rows, tokens, out, load));
          EXPECT_TRUE(rows >= kLeast || keeps_others_waiting(2 * rows, tokens, out, load));
          EXPECT_TRUE(rows == arch::kStripCols || !keeps_others_waiting(rows, tokens, out, load));
          (rows > kLeast ? wide : narrow) += 1;
        }
      }
    }
  }
  EXPECT_GT(wide, 20);
  EXPECT_GT(narrow, 20);
}

// Routing that gives one expert a ninth of all tokens, on 60 threads: with 256 columns each of its tasks took longer than a
// thread's share of all others (benchmarks/LOG.md, "Zipf routing on 60 threads").
TEST(Blocking, TasksOfGemmNnOfAnExpertWithManyTokensAreNarrow) {
  const gemm::Blocking blocking;
  const auto cols = [&](index_t tokens, int threads) {
    return blocking.nn_cols<kernels::Portable<bf16>>(2048, tokens, 768, {128, 1024, threads});
  };
  EXPECT_EQ(256, cols(16, 60));
  EXPECT_EQ(128, cols(48, 60));
  EXPECT_EQ(64, cols(112, 60));
  EXPECT_EQ(256, cols(112, 2));
}

}  // namespace
