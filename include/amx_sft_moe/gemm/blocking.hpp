// The sizes of the operator's tasks, panels and products, with their derivation (those within a product:
// arch/blocking.hpp). They change speed, never bits, but for kGradTokens and, as tiles sum few rows in an order of their own
// (gemm/streams.hpp), kTokensPerTask, which are the same on every machine. Tokens of two chains of sums (arch/avx512/
// token_lanes.hpp) are never more tasks than one.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/gemm/tokens.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// What the tasks of a region share out: active experts, their rows in all, and among how many threads.
struct Load {
  index_t experts, rows;
  int threads;
};

struct Blocking {
  // Half of L2 for packed B; the other half is for the rows of A passing by and for C. 1 MiB where the system
  // does not say (virtual machines): the smallest L2 of a server CPU with AVX512-BF16.
  index_t panel_bytes = index_t{1} << 19;

  // gemm_nt: rows of a weight per task, at least and at most. Multiples of the kernel's blocks (strips: 64; AMX tiles: 32
  // and 96): no tail but the last. Few, so that few experts still make enough tasks; many where there are enough: a task
  // begins with weights that nobody asked memory for, kernels of strips pack its first strip before they multiply
  // (benchmarks/LOG.md, "Wide tasks of gemm_nt"), and the more rows, the longer are the streams that they are read in
  // (gemm/streams.hpp).
  template <class Kernel>
  static constexpr index_t kOutRows = MultipliesStrips<Kernel> ? 128 : 96;
  template <class Kernel>
  static constexpr index_t kMaxOutRows = MultipliesStrips<Kernel> ? 1024
                                         : FewRowsInPlace<Kernel> ? 384
                                                                  : 192;
  // Rows of an expert that one task packs, projects or differentiates; a multiple of a panel's columns.
  static constexpr index_t kRowChunk = 64;
  // gemm_nn and gemm_nt: tokens of a task, see even_tokens(). From here on packing a panel of weights (once per
  // task) costs less than 2 % of its products, and a single expert with all tokens still makes tasks for many
  // threads.
  static constexpr index_t kTokensPerTask = 256;
  static constexpr index_t kMinCols = 32;
  // Wider panels than this make too few tasks; reading 512 bytes of each row is enough for the prefetchers.
  static constexpr index_t kMaxCols = 256;
  // Strips and products in place need no panel, so more columns cost nothing but C, and what of B was asked for ahead.
  // A row of a weight is a page of its own or half of one, and its address is translated once for all columns of a
  // task: at 256 columns eight tasks did so for the same rows (benchmarks/LOG.md). As long as each thread has tasks to
  // choose from. Products in place, which mostly wait for memory, take whole rows where B has so many that it is more
  // than C.
  static constexpr index_t kMaxStripCols = 2048;
  static constexpr index_t kMaxInPlaceCols = 8192;
  static constexpr index_t kManyRows = 64;
  // Kernels of tiles take whole rows too: of pieces memory is slower, most of all while they are packed. Of few rows of A up
  // to kMaxInPlaceCols columns, in equal parts; of up to kRowsOfWholeRows rows kWholeRowCols; of more, whose C takes more of L2,
  // rows of no more than kMaxRowCols, or halves, which two threads read at the same time, and equal parts of up to
  // kMaxStripCols of longer ones and where these are whole (benchmarks/LOG.md, "Whole rows for tiles", "Halves of rows",
  // "Stores that miss L1").
  static constexpr index_t kMaxRowCols = 3584;
  static constexpr index_t kWholeRowCols = 4096;
  static constexpr index_t kRowsOfWholeRows = 64;
  static constexpr index_t kTasksPerThread = 8;
  // Where tasks are alike, and threads end together, or where more of them would be short pieces of rows, slow to pack.
  static constexpr index_t kFewTasksPerThread = 4;
  // Tokens of a task of gemm_nt with strips, of whose x only a block of K stays in L2 while a strip meets it: packing
  // strips, 9 % of the time at 64 tokens, is half of that. With tokens along the lanes the same, without packing: the more
  // tokens, the less memory is asked for. Of gemm_nn too where strips are made ahead.
  static constexpr index_t kStripTokens = 128;
  // Gradients of base weights, gemm_tn at full width. Rows of a gradient that share a task's packed x or h: packing
  // them costs a thousandth of an element a multiply-add, and a gradient still makes tens of tasks.
  static constexpr index_t kGradRowsPerTask = 512;
  // Rows of one product: as tall as those of gemm_nn, so that A^T and C stay in L2. Of those that are finished in registers
  // (gemm/finished_strips.hpp) there is no C: as many rows of A^T as are transposed before they are used, in whole register
  // tiles of 6, beside strips that take half of L2.
  static constexpr index_t kGradRows = 256;
  static constexpr index_t kFinishedRows = 96;
  // Columns of a task with tiles: few tokens mostly write the gradient, and do it in whole rows (kMaxStripCols;
  // benchmarks/LOG.md, "AMX, natively").
  static constexpr index_t kWideGradTokens = 128;
  static constexpr index_t kGradTileCols = 512;
  // Tokens that one product of a parameter's gradient contracts. An expert with more sums its products in fp32, so that a
  // task's memory has a bound; the sum passes through the cache once in 512 multiply-adds. Part of the order of summation.
  static constexpr index_t kGradTokens = 512;
  // Times L2 of all threads that are never kept.
  static constexpr index_t kPastCaches = 4;
  // Tokens whose sums one task makes at most.
  static constexpr index_t kTokenChunk = 16;

  // Tokens whose sums one task makes: four tasks a thread, so that many threads have work and end together.
  static constexpr index_t tokens_per_sum(index_t tokens, int threads) {
    return std::clamp<index_t>(tokens / (4 * index_t{threads}), 1, kTokenChunk);
  }

  static Blocking of_this_machine() {
    Blocking blocking;
#ifdef _SC_LEVEL2_CACHE_SIZE  // glibc's
    const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (l2 > 0) blocking.panel_bytes = std::max<index_t>(l2 / 2, index_t{1} << 17);
#endif
    return blocking;
  }

  // Rows of a weight [out, k] of a task of gemm_nt with `tokens` of an expert. Each column of C is finished before the next and
  // need not stay in a cache; but where rows are read in streams, C of gate and up is finished when both are whole.
  template <class Kernel>
  index_t nt_rows(index_t tokens, index_t out, const Load& load) const {
    const index_t kept = FewRowsInPlace<Kernel> ? 2 * tokens : 0;
    return task_width(kMaxOutRows<Kernel>, kOutRows<Kernel>, {.kept = kept, .tokens = tokens, .cols = out},
                      load);
  }
  // Columns of a task of gemm_nn over k steps, [rows, cols] of an expert: what of B, packed, stays in L2; or, where B is
  // used at once or packed in parts, what of C does, unless each of its columns is finished before the next; of
  // fewer than kRowsOfDeepStrips rows that pass from part to part of K, kMaxStripCols are 382 KiB.
  template <class Kernel>
  index_t nn_cols(index_t k, index_t rows, index_t cols, const Load& load) const {
    if constexpr (!MultipliesStrips<Kernel> && !AddsToC<Kernel>) return resident_cols<Kernel>(k);
    const index_t kept = MakesRowsAhead<Kernel> ? 0 : rows;
    const index_t most = most_nn_cols<Kernel>(k, rows, cols);
    // What few rows wait for is the weights: experts take as long as one another, whatever tokens they have. More rows have
    // panels packed, from wide pieces if they can.
    if (few_rows<Kernel>(rows)) {
      return task_width(
          most, kMaxCols,
          {.kept = kept, .tokens = load.rows / load.experts, .cols = cols, .balance = Balance::kAlike}, load);
    }
    const Balance balance = AddsToC<Kernel> ? Balance::kWide : Balance::kMany;
    return task_width(most, kMaxCols, {.kept = kept, .tokens = rows, .cols = cols, .balance = balance}, load);
  }
  // Columns of a task of gemm_tn with LoRA's factors, B [tokens, cols]: what of a chunk of B stays in L2 while the factors
  // meet it, packed together by kernels of tiles, and in grad_Ad made by the task itself.
  template <class Kernel>
  index_t tn_cols(index_t tokens, index_t cols, const Load& load) const {
    const index_t chunk = std::min(tokens, kGradTokens);
    const bool narrow = !MultipliesStrips<Kernel> && (!AddsToC<Kernel> || tokens > kTokensPerTask);
    if (narrow) return resident_cols<Kernel>(chunk);
    return task_width(kMaxStripCols, kMaxCols, {.kept = chunk, .tokens = tokens, .cols = cols}, load);
  }
  // Columns of the tasks of base weights' gradients, [rows, cols] of each expert, from so many tokens: as wide as what is
  // packed of these stays in L2, and each thread has tasks to choose from.
  template <class Kernel>
  index_t grad_cols(index_t tokens, index_t rows, index_t cols, const Load& load) const {
    if constexpr (!MultipliesStrips<Kernel> && !AddsToC<Kernel>) return resident_cols<Kernel>(tokens);
    constexpr index_t kElement = sizeof(typename Kernel::Compute);
    const index_t tall = load.experts * ceil_div(rows, kGradRowsPerTask);
    const auto fits = [&](index_t wide) {
      const bool cached = MultipliesStrips<Kernel> ? wide * tokens * kElement <= panel_bytes
                                                   : wide <= kGradTileCols || tokens <= kWideGradTokens;
      return cached && tall * ceil_div(cols, wide) >= kTasksPerThread * index_t{load.threads};
    };
    index_t wide = kMaxStripCols;
    while (wide > kMaxCols && !fits(wide)) wide /= 2;
    return wide;
  }
  // Tokens of each task of gemm_nt where an expert has `tokens`: their x, of strips as much of it as one meets, stays in
  // L2 while the weights pass by.
  template <class Kernel>
  index_t tokens_for(index_t k, index_t tokens) const {
    index_t fit = MultipliesStrips<Kernel> ? kStripTokens : index_t{0};
    if constexpr (FewRowsInPlace<Kernel>) fit = cuts_k<Kernel>(k, tokens) ? kTokensPerTask : fit;
    return even_tokens(tokens, std::clamp(resident_cols<Kernel>(k), fit, kTokensPerTask));
  }
  // Tokens of each task of gemm_nn where an expert has `tokens`. Where strips are made ahead they are fewer:
  // with 192 rows and more by 512 columns, which C has room for in L2, they had 0.74 of the peak, with 128 to 192 by 2048
  // 0.90 (benchmarks/LOG.md, "Columns of gemm_nn").
  template <class Kernel>
  static constexpr index_t nn_tokens(index_t tokens) {
    return std::min(tokens, even_tokens(tokens, MakesRowsAhead<Kernel> ? kStripTokens : kTokensPerTask));
  }
  // Whether rows over the routes, `bytes` in all, pass the caches where gemm_nt leaves blocks of tokens, a line here and a line
  // there: when a line's turn comes memory would be asked for it, only for it to be overwritten. Where caches hold them until
  // they are read that takes longer (benchmarks/LOG.md, "Lines past the caches"). For data gradients' rows the same.
  template <class Kernel>
  bool past_caches(index_t bytes, int threads) const {
    constexpr bool kLeavesBlocks = AddsToC<Kernel> || LanesOfTokens<Kernel>;
    return kLeavesBlocks && bytes > kPastCaches * 2 * panel_bytes * threads;
  }
  // `tokens` in parts of about `fit`, half as many again rather than one part more: each part has all weights streamed and
  // packed for it. Parts are whole panels, so that of many the last may have few.
  static constexpr index_t even_tokens(index_t tokens, index_t fit) {
    const index_t parts = ceil_div(2 * tokens, 3 * fit);
    return round_up(ceil_div(tokens, std::max<index_t>(parts, 1)), kMinCols);
  }

 private:
  template <class Kernel>
  static constexpr bool whole_rows(index_t k, index_t rows) {
    using Micro = typename Kernel::Microkernel;
    if (k < kManyRows) return false;
    if constexpr (BlocksOfRows<Kernel>) {
      if (Micro::RowBlocks::in_place(k, rows)) return true;
    }
    if constexpr (SumsInPlace<Kernel>) return Micro::in_place(k, rows);
    return false;
  }

  // Whether K of tasks of up to kTokensPerTask tokens is cut, also of the last task, which may have fewer.
  template <class Kernel>
  static constexpr bool cuts_k(index_t k, index_t tokens) {
    const index_t each = std::max(even_tokens(tokens, kTokensPerTask), kMinCols);
    const index_t last = tokens - (ceil_div(tokens, each) - 1) * each;
    return arch::streamed_depth<typename Kernel::Compute>(k, last) < k;
  }

  template <class Kernel>
  static constexpr bool few_rows(index_t rows) {
    if constexpr (FewRowsInPlace<Kernel>) return rows <= Kernel::Microkernel::FewRows::kRows;
    return false;
  }

  template <class Kernel>
  static constexpr index_t most_nn_cols(index_t k, index_t rows, index_t cols) {
    if (whole_rows<Kernel>(k, rows)) return kMaxInPlaceCols;
    if constexpr (AddsToC<Kernel>) {
      const auto part = [&](index_t wide) {
        return round_up(ceil_div(cols, ceil_div(cols, wide)), arch::kStripCols);
      };
      if (few_rows<Kernel>(rows)) return part(kMaxInPlaceCols);
      if (rows <= kRowsOfWholeRows && cols <= kWholeRowCols) return part(kWholeRowCols);
      const bool equal = cols > 2 * kMaxRowCols || cols % kMaxStripCols == 0;
      return part(equal ? kMaxStripCols : kMaxRowCols);
    }
    return kMaxStripCols;
  }

  // What tasks are like: of unlike experts, so that each thread should have many to choose from; as long as one another; or
  // better wide than many.
  enum class Balance : std::uint8_t { kMany, kAlike, kWide };

  // A product of an expert: rows of fp32 that a column of a task keeps, tokens, its columns in all.
  struct Product {
    index_t kept, tokens, cols;
    Balance balance = Balance::kMany;
  };
  // Whether the tasks of that width are enough: each thread has some to choose from, none of them more than its share of all
  // tokens' products (experts have as many tokens as routing gives them); where they are alike, also if threads end together;
  // of wide ones a few, if none is too much for a thread.
  static bool enough(index_t wide, const Product& of, const Load& load) {
    const index_t threads = load.threads, tasks = kTasksPerThread * threads;
    const index_t count = load.experts * ceil_div(of.cols, wide);
    const bool few = count >= kFewTasksPerThread * threads;
    if (of.balance == Balance::kWide) return few;
    if (of.balance == Balance::kAlike && few && 10 * round_up(count, threads) <= 11 * count) return true;
    return count >= tasks && of.tokens * std::min(wide, of.cols) * tasks <= load.rows * of.cols;
  }
  // Columns of a task: `most`, halved until what it keeps stays in L2 and the tasks are enough, or down to about `least`; less
  // for experts that would keep the other threads waiting.
  index_t task_width(index_t most, index_t least, const Product& of, const Load& load) const {
    // Rather a quarter more of C than pieces of half the length.
    const index_t room = of.balance == Balance::kWide ? panel_bytes + panel_bytes / 4 : panel_bytes;
    const auto fits = [&](index_t wide) {
      return of.kept * wide * index_t{sizeof(float)} <= room && enough(wide, of, load);
    };
    const auto half = [](index_t wide) { return round_up(wide / 2, kMinCols); };
    index_t wide = most;
    while (wide > least && !fits(wide)) wide = half(wide);
    // Of an expert with so many tokens that a task of it is more than half of a thread's share, the others would wait for
    // its last one: narrower, down to one strip.
    const auto too_much = [&] {
      const index_t all = load.rows * of.cols;
      return load.threads > 1 && 2 * of.tokens * std::min(wide, of.cols) * load.threads > all;
    };
    while (wide > arch::kStripCols && too_much()) wide = half(wide);
    return wide;
  }

  template <class Kernel>
  index_t resident_cols(index_t k) const {
    constexpr index_t kElement = sizeof(typename Kernel::Compute);
    const index_t fit = panel_bytes / (std::max<index_t>(k, 1) * kElement);
    return std::clamp(fit / kMinCols * kMinCols, kMinCols, kMaxCols);
  }
};

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
