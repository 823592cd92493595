// The loop nest that all three GEMM forms of kernels of tiles share, and gemm_nt with tokens along the lanes, on one thread:
//
//   for each class of a block plan of the kernel's              (at most four, one block shape each)
//     for each group of rows                                   stage what of A cannot be used where it lies
//       for each group of columns
//         microkernel over all of K, base product and LoRA in the same accumulators (arch/*/microkernel.hpp)
//         epilogue: the caller's                                                           (while C is in L1)
//
// Where K is split, C is the accumulators' own fp32, loaded and gone on with: a result depends neither on block sizes nor
// on threads (of two chains of sums on parts of K, which follow from the tokens and K: arch/avx512/token_lanes.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "amx_sft_moe/gemm/operand.hpp"
#include "amx_sft_moe/gemm/scratch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// One product of a sum: A [M, k] x B [k, N]; B's panels hold zeros from k to the next multiple of the kernel's
// K unit.
template <class E>
struct Term {
  AnyRows a;
  index_t k = 0;
  Panels<const E> b;
};

// Of one output, at most: each may have a staged tail of K.
inline constexpr std::size_t kMaxTerms = arch::kMaxSegments / 2;

// A block of C [rows, cols] at (row, col) of the whole, fp32, valid during the epilogue.
struct Block {
  index_t row, rows;
  index_t col, cols;
  float* c;
  index_t stride;
};

// How much of rows of A, K = k, the kernel can use where they lie: all but what its unit leaves over; or, where
// it wants dense rows (Microkernel::kDenseRows, oneDNN's matmul), all or nothing.
template <class Microkernel>
constexpr index_t k_in_place(index_t k, index_t row_stride, index_t k_tile) {
  if constexpr (requires { Microkernel::kDenseRows; }) {
    return k % k_tile == 0 && k == row_stride ? k : 0;
  } else {
    return k / k_tile * k_tile;
  }
}

template <class Kernel, class Micro>
class RowGroup {
  using E = typename Kernel::Compute;

 public:
  RowGroup(Scratch& scratch, index_t k_tile) : scratch_(scratch), k_tile_(k_tile) {}

  // Room for the staged parts of all terms of all outputs.
  template <std::size_t Outputs>
  void reserve(const std::array<std::span<const Term<E>>, Outputs>& outputs, index_t rows) {
    index_t k = 0;
    for (const auto& terms : outputs) {
      for (const Term<E>& term : terms) {
        const index_t tail = term.k - in_place(term);
        if (tail > 0) k += staged_stride(round_up(tail, k_tile_));
      }
    }
    arena_ = scratch_.a_rows.as<E>(k * rows);
  }
  void restart() { used_ = 0; }

  // Appends the segments of `term` for the rows [row, row + rows) of those up to row_end: what is used where it lies, and what is
  // not, in a copy.
  void append(const Term<E>& term, index_t row, index_t rows, index_t row_end, arch::Segments<E>& segments) {
    const AnyRows a = term.a.from(row, 0);
    const E* direct = a.template direct<E>();
    const index_t begin = in_place(term);
    // One row may have any distance from a second that is not there, and its bytes no number.
    const index_t a_stride = row_end - row > 1 ? a.row_stride() : term.k;
    segments.add({direct, a_stride, term.b.data, term.b.panel_stride, begin, row_end - row});
    if (begin == term.k) return;
    const index_t tail = term.k - begin;
    const index_t padded = round_up(tail, k_tile_);
    const index_t stride = staged_stride(padded);
    E* staged = arena_ + used_;
    used_ += stride * rows;
    a.from(0, begin).visit([&](const auto& source) {
      Kernel::Rows::template stage<E>(source, rows, tail, padded, staged, stride);
    });
    const arch::Segment<E> copy{staged, stride, term.b.data + begin * arch::kPanelCols, term.b.panel_stride,
                                padded};
    const index_t whole = tail / k_tile_ * k_tile_;
    if (!cuts_copies() || whole == padded) return segments.add(copy);
    segments.add(copy.steps(0, whole));
    segments.add(copy.steps(whole, padded - whole));
  }

 private:
  // Of a term's K, what is used where it lies.
  index_t in_place(const Term<E>& term) const {
    if (term.a.template direct<E>() == nullptr) return 0;
    return k_in_place<Micro>(term.k, term.a.row_stride(), k_tile_);
  }
  // Whether copies are segments like those that lie: where sums are chains that begin with each segment, so that no bit depends on
  // how A is stored.
  static constexpr bool cuts_copies() {
    return requires { Micro::two_chains(1); };
  }
  static constexpr index_t staged_stride(index_t padded) {
    if constexpr (requires { Micro::kDenseRows; }) return padded;
    return spread_row_stride<E>(padded);
  }

  Scratch& scratch_;
  index_t k_tile_;
  E* arena_ = nullptr;
  index_t used_ = 0;
};

// C_o [M, N] = sum of the terms of output o, for all outputs block by block of the plan; epilogue(std::array<Block,
// Outputs>). k_tile divides the staged K (the kernel's K unit, or what gemm_tn fitted to its tokens). A single output
// may be made in `sums` [M, N], and added to what is there; else each block is made where the one before it was, in L1.
template <class Kernel, class Micro = typename Kernel::Microkernel, std::size_t Outputs, class Epilogue>
void for_each_block(typename Kernel::Session& session, Scratch& scratch, const arch::BlockPlan& plan,
                    index_t k_tile,
                    const std::array<std::span<const Term<typename Kernel::Compute>>, Outputs>& outputs,
                    Epilogue&& epilogue, const arch::SumRows& sums = {}) {
  using E = typename Kernel::Compute;
  constexpr index_t kBlockFloats = Micro::kMaxRows * Micro::kMaxCols;
  float* c = sums.data == nullptr ? scratch.c_blocks.as<float>(kBlockFloats * index_t{Outputs}) : nullptr;
  const auto c_of = [&](std::size_t output, index_t row, index_t col, index_t wide) -> arch::SumRows {
    if (sums.data != nullptr) return sums.from(row, col);
    return {c + static_cast<index_t>(output) * kBlockFloats, round_up(wide, arch::kPanelCols), true};
  };
  RowGroup<Kernel, Micro> group(scratch, k_tile);
  group.reserve(outputs, Micro::kMaxRows);

  for (int p = 0; p < plan.count; ++p) {
    const arch::BlockClass& shape = plan.classes[p];
    for (index_t row = shape.row_begin; row < shape.row_end; row += shape.row_step) {
      const index_t here = std::min(shape.row_step, shape.row_end - row);
      std::array<arch::Segments<E>, Outputs> segments;
      group.restart();
      for (std::size_t o = 0; o < Outputs; ++o) {
        segments[o].k_tile = k_tile;
        for (const Term<E>& term : outputs[o]) group.append(term, row, here, shape.row_end, segments[o]);
        segments[o].skip_columns(shape.col_begin);
      }
      for (index_t col = shape.col_begin; col < shape.col_end; col += shape.col_step) {
        const index_t wide = std::min(shape.col_step, shape.col_end - col);
        std::array<Block, Outputs> blocks;
        for (std::size_t o = 0; o < Outputs; ++o) {
          const arch::SumRows to = c_of(o, row, col, wide);
          blocks[o] = {row, here, col, wide, to.data, to.stride};
          Micro::block(session, shape.pattern, segments[o], here, wide, to);
          segments[o].skip_columns(shape.col_step);
        }
        epilogue(blocks);
      }
    }
  }
}

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
