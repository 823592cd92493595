// Sizes and distances within products, with what they follow from: the caches of a core, and how many lines it asks
// memory for at a time. Those of tasks and panels are gemm/blocking.hpp's. Compiled in, as L1 is 32 or 48 KiB in all CPUs
// with AVX2 or more; L2, which differs more, is asked for at run time there. They change speed, never bits, but for
// kLongDot, kShortDot, kAheadDepth, kLanesBytes and rows_of_stream(), which are the same on every machine.
#pragma once

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Strips (arch/strips.hpp).
//
// A piece of a row of bf16 is two cache lines, which hardware fetches in pairs anyway, and a product of 6 rows needs
// so few row pointers that none is spilled: with 12 rows x 32 columns the compiler kept four of them in vector
// registers, whose moves compete with the arithmetic.
inline constexpr index_t kStripCols = 64;
// Of a strip: an L1 of 32 KiB, two thirds of one of 48. The deeper, the less often C passes through registers; but with
// 64 KiB of floats made of rows of B few rows of A take up to 1.4 times as long (benchmarks/LOG.md, "Strips of floats").
inline constexpr index_t kStripBytes = index_t{32} << 10;
// Elements along K: 128 of fp32, 256 of bf16.
template <class E>
inline constexpr index_t kStripDepth = kStripBytes / kStripCols / index_t{sizeof(E)};
// Of strips of bf16 that are made while the one before is multiplied: 128 KiB, from which products read 11 bytes a cycle,
// as L2 delivers them. Two take a quarter of 1 MiB of L2, the block of 128 rows of A that they meet another one
// (benchmarks/LOG.md, "Deeper strips").
inline constexpr index_t kMostAheadDepth = 1024;
inline constexpr index_t kMostStripBytes = kMostAheadDepth * kStripCols * index_t{sizeof(bf16)};
// Strips of bf16 that are multiplied with floats (benchmarks/LOG.md, "Strips of bf16 for floats"). Of rows: half
// of an L1 of 32 KiB, beside rows of A and C. Of columns: as deep as strips that are made ahead, since longer pieces
// of W's rows come faster than short ones, and a strip is read from L2 as fast as it is multiplied. Few rows of A: as long
// pieces of B's rows are asked for together, 128 rows of them a fifth of 1 MiB of L2.
inline constexpr index_t kWidenedRowsDepth = 128, kWidenedColumnsDepth = kMostAheadDepth;
inline constexpr index_t kWidenedPieceCols = 768;
// Rows of A from which strips of gemm_nn are kMostAheadDepth deep: with fewer, lines of a strip that has left L1 come back more
// slowly than it is written (benchmarks/LOG.md, "Zen 5"). And from which no pieces of kWidenedPieceCols are asked for, and
// strips of bf16 are widened once, as they are made, where L1 has room (roomy_l1()).
inline constexpr index_t kRowsOfDeepStrips = 48;
// Steps of K that few rows of A (fewer than kRowsOfDeepStrips) have with all columns of B before the next: a step is a row
// of B, often on a page of its own, and so many pages stay translated from one strip of columns to the next
// (benchmarks/LOG.md, "Pages translated together").
inline constexpr index_t kStepsTranslated = 1024;
// Rows of B that strips which lie one behind the other are made from at a time: hardware follows as many streams.
inline constexpr index_t kStripRowsTogether = 8;
// From here on a strip of bf16 is made while the one before is multiplied. Products of shallower ones (few tokens of
// gemm_tn, LoRA's terms) are over before memory that was asked for one strip ahead has come. Shallower products with
// tokens along the lanes go together with the one before them.
inline constexpr index_t kAheadDepth = 64;
// How many rows of 64 columns before it is read a row of B is asked for, times rows of A; longer rows, fewer of them. A
// row's products with 64 columns take rows of A x 0.55 ns at 230 GFLOP/s, so memory has 1.1 us, three times what it takes
// under load. At least so many rows (benchmarks/LOG.md, "Rows asked for later").
inline constexpr index_t kLeadProducts = 2048;
inline constexpr index_t kLeastLead = 8;

// Of x, as many steps of K as products with tokens along the lanes (arch/avx512/token_lanes.hpp) go together: half of the
// smallest L2. Of few tokens, which have two chains of sums, each part ends with the sum of both.
inline constexpr index_t kLanesBytes = index_t{512} << 10;

// Products in place (arch/in_place.hpp). They are as fast as memory delivers, so it is asked twice. Far ahead into L2: a
// core waits for some ten to sixteen lines at a time on their way to L1, for 48 on their way to L2; but into L1 where requests
// into L2 are lost (rows_asked_into()). Then near, into L1, twice as far along a row of W there.
// gemm_nn: rows of B, far ahead the next block and a bit. gemm_nt: bytes along a row of W, far ahead the rows that come
// next, in order and a bit, or side by side (FarRows). Where the CPU follows rows by itself (asks_in_order()) gemm_nn asks
// near only, whatever rows of A there are. Blocks of B's rows (in_place_blocks.hpp) are asked for once and in order; so are, into
// L2, those of W's in gemm_nt that computes in fp32 where the CPU follows rows, or tokens are many (dot_blocks.hpp).
inline constexpr index_t kFarRows = 8;
// Of A, up to which two rows of B are read at a time where memory is asked in order (benchmarks/LOG.md, "Two chains").
inline constexpr index_t kRowsOfPairs = 2;
inline constexpr index_t kFarBytes = 4096;
inline constexpr index_t kNearRows = 4;
inline constexpr index_t kNearBytes = 512;
inline constexpr index_t kWaitingRows = 6;  // of A, up to which L1 is asked: more have work until L2 delivers
// Of C that takes in a block of B's rows: half of an L1 of 48 KiB, three quarters of one of 32. The rest is for the lines
// of B that pass by.
inline constexpr index_t kSumsBytes = index_t{24} << 10;
// Blocks of B's rows whose products keep C in registers (arch/in_place_blocks.hpp): steps along K at most, as many pages
// as an L1 TLB of 64 holds beside those of C, and of the first; bytes of each, two of which take half of 1 MiB of L2; of
// each row at most, for pieces of 4 KiB of rows of 6 or 14 come at 0.7 of the rate (benchmarks/LOG.md, "C in registers,
// again"). Of few rows of A fewer steps where the CPU likes memory in order: C's passes cost little then, and rows are the
// longer in their order the fewer of them are read side by side ("Blocks of few rows"). Of pairs twice as many at most.
inline constexpr index_t kBlockSteps = 32, kFirstBlockSteps = 8, kBlockStepsOfARow = 4;
inline constexpr index_t kBlockBytes = index_t{256} << 10;
inline constexpr index_t kBlockRowBytes = index_t{16} << 10;
// Of pairs of rows (arch/avx512/pair_blocks.hpp), which meet 5 to 16 rows of A: so many sums or a few more, three eighths of 1 MiB
// of L2, pass through registers with each block (benchmarks/LOG.md, "Pairs that are kept", "Requests that are lost").
inline constexpr index_t kPairBlockSums = index_t{96} << 10;
// Blocks of W's rows whose dot products have K in parts (arch/dot_blocks.hpp): rows and bytes at most, two blocks and x beside
// them in 1 MiB of L2; bytes of the x of a part, where all of it takes more than kSumsBytes. And tokens up to which CPUs that
// like memory in order have dot products without blocks: as that was measured.
inline constexpr index_t kDotBlockRows = 24;
inline constexpr index_t kDotBlockBytes = index_t{96} << 10;
inline constexpr index_t kDotPartBytes = index_t{16} << 10;
inline constexpr index_t kDotsInOrder = 16;
// Steps along K up to which any number of rows is multiplied in place: making so shallow a strip takes longer than
// reading B once more for every few of them. Where B is read so often, twice as many take as long either way, except in
// gradients of LoRA's factors (kFewTokens).
inline constexpr index_t kFewSteps = 8;
// The same of up to kFewFactorRows rows, where B's are held in registers (InPlaceSums::multiply_held): beyond, C passes
// through these too often. And how far along each of B's rows is asked for, into L1 (benchmarks/LOG.md, "B in registers").
inline constexpr index_t kHeldSteps = 48;
inline constexpr index_t kAlongBytes = 128;
// Tokens up to which gemm_tn, in place, finishes a block of C before the next, and that block: 16 KiB of sums stay in L1
// until they are stored. 16 rows, for a gradient that is stored transposed is written by lines of 16 floats; of fewer
// more columns. Up to 64 rows of C (benchmarks/LOG.md, "Gradients of few tokens").
inline constexpr index_t kFewTokens = 16;
inline constexpr index_t kFewFactorRows = 64;
inline constexpr index_t kFactorBlockRows = 16;
inline constexpr index_t kFactorBlockSums = 4096;
// K from which gemm_nt multiplies in place: a dot product ends with a sum over lanes, which costs as much as several
// vectors of products.
inline constexpr index_t kLongDot = 64;
// And K up to which it does for so many tokens (up to 32) that x takes half of the smallest L2.
inline constexpr index_t kShortDot = 4096;

// Panels (pack_rows of each instruction set): rows asked for ahead. Rows of a weight are 4 to 28 KiB apart, which
// hardware prefetchers do not follow. Eight is what served; it follows from nothing.
inline constexpr index_t kPackRowsAhead = 8;
// With AVX512, for AMX, eight pairs of rows, or four of what is left, are packed side by side, far from one another, and nothing
// is asked for: hardware follows the sixteen by itself, into the next page too where the row behind is not another one of them;
// and lines asked for take the buffers that L2 answers through. Pieces of rows are 2 to 8 KiB then (benchmarks/LOG.md, "AMX,
// natively", "Pairs far apart", "Stores that miss L1").
inline constexpr index_t kPackPairsTogether = 8;
inline constexpr index_t kPackPairsOfFew = 4;
// Of panels of gemm_nn, in bytes and at least in steps along K: less than half of the 2 MiB of L2 that every CPU with AMX
// has. Fewer steps, and C passes through registers too often.
inline constexpr index_t kPackedBytes = index_t{768} << 10;
inline constexpr index_t kLeastPackedDepth = 64;
// Rows of a weight that meet few tokens together, a tile, each from where it was read on in a stream of its own
// (gemm/streams.hpp).
inline constexpr index_t kStreams = 16;
// Of n rows, those of a stream: an odd number, for lines an even number of rows apart, rows often being whole pages, would be
// in few sets of L2, or in one.
constexpr index_t rows_of_stream(index_t n, index_t streams = kStreams) {
  const index_t rows = n / streams;
  return rows % 2 == 0 && rows > 0 ? rows - 1 : rows;
}
// Of x, up to which that is so in gemm_nt: half of the 2 MiB of L2 that every CPU with AMX has, and LoRA's u beside it.
inline constexpr index_t kStreamedBytes = index_t{1088} << 10;
// Steps of a part of K in gemm_nt, K where it is not cut. Where x of all K has no room it is, in parts of whole pages, as many as
// have room, or one: behind a part that ends within a page hardware reads on, for nothing. Rows that are no whole pages, whose
// parts cannot all begin with one, are cut only where x takes kRoomsUncut times the room (benchmarks/LOG.md, "K in parts of
// whole pages").
inline constexpr index_t kPageSteps = 2048;  // elements of bf16
inline constexpr index_t kRoomsUncut = 2;
template <class E>
constexpr index_t streamed_depth(index_t k, index_t tokens) {
  constexpr index_t kElement = sizeof(E);
  const index_t rooms = k % kPageSteps == 0 ? 1 : kRoomsUncut;
  if (k <= kPageSteps || k * tokens * kElement <= rooms * kStreamedBytes) return k;
  const index_t pages = kStreamedBytes / (tokens * kElement) / kPageSteps;
  return (pages > 1 ? pages : 1) * kPageSteps;
}
// Elements of a row from which, where tokens take more than one block of tiles, memory is asked for the next tile of rows
// while one is multiplied: a page (benchmarks/LOG.md, "Next rows asked for").
inline constexpr index_t kLongRow = kPageSteps;
// What of C is finished together then, in L1: columns of gemm_nn, whose up to 32 rows are 32 KiB; rows of C^T of gemm_nt, whole
// lines of what they are stored to.
inline constexpr index_t kFinishedCols = 256;
inline constexpr index_t kFinishedRows = 32;

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
