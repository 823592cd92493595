// The loop nests of kernels that multiply strips (arch/strips.hpp), on one thread. Both keep A in rows and add to
// C [rows, columns] in L1 or L2:
//
//   for each strip of 64 columns
//     for each block of K
//       pack it from rows of B                 gemm_nn, gemm_tn: along K; gemm_nt: columns, which are transposed
//       C += A's block x strip
//
// For gemm_nn and gemm_tn blocks of K are outermost, and strips follow along the same rows of B, unless the next strip is made
// ahead (MakesRowsAhead): others would take longer to read rows of each strip anew. So they are where A has to be staged, a
// block at a time. Few rows go through both loops for some steps of K before the next (kStepsTranslated).
//
// While a strip of rows is multiplied the next is made where the kernel can (arch/strip_ahead.hpp), and the memory of those
// that follow is on its way. An element of C is one chain of products along K whatever the block sizes: the same bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/arch/of_this_cpu.hpp"
#include "amx_sft_moe/arch/strips.hpp"
#include "amx_sft_moe/gemm/operand.hpp"
#include "amx_sft_moe/gemm/scratch.hpp"
#include "amx_sft_moe/gemm/strip_walk.hpp"
#include "amx_sft_moe/gemm/tokens.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// Floats from row to row of C: whole strips and two lines more, so that rows are never a multiple of 4 KiB apart, nor a line
// more or less: what is loaded of a row would seem to be, by the address within a page, what has just been stored of the row
// before, and wait for it.
constexpr index_t strips_stride(index_t cols) {
  return round_up(cols, arch::kStripCols) + 2 * arch::kPanelCols;
}

// Rows [0, rows) of A's columns [0, k), K adjacent and zeros up to a multiple of `unit`: where they lie, or in `staged`.
template <class Kernel>
arch::RowSource<typename Kernel::Compute> adjacent_rows(Buffer& staged, const AnyRows& a, index_t rows,
                                                        index_t k, index_t unit) {
  using E = typename Kernel::Compute;
  if (const E* direct = a.template direct<E>(); direct != nullptr && k % unit == 0) {
    // One row may have any distance from a second that is not there, and its bytes no number.
    return {direct, rows > 1 ? a.row_stride() : k, 1, nullptr};
  }
  const index_t stride = round_up(k, arch::kPanelCols);
  E* to = staged.as<E>(rows * stride);
  a.visit([&](const auto& source) {
    Kernel::Rows::template stage<E>(source, rows, k, round_up(k, unit), to, stride);
  });
  return {to, stride, 1, nullptr};
}

// A copy of rows [rows, cols] of S in T, its elements adjacent.
template <class Kernel, class T, class S>
arch::RowSource<T> adjacent_copy(Scratch& scratch, const arch::RowSource<S>& source, index_t rows,
                                 index_t cols) {
  T* staged = scratch.b_rows.template as<T>(rows * cols);
  Kernel::Rows::template stage<T>(source, rows, cols, cols, staged, cols);
  return {staged, cols, 1, nullptr};
}

// B's rows with their elements adjacent: themselves, or a copy of [rows, cols].
template <class Kernel, class F>
void with_adjacent_rows(Scratch& scratch, const AnyRows& b, index_t rows, index_t cols, F&& f) {
  b.visit([&](const auto& source) {
    source.col_stride == 1 ? f(source)
                           : f(adjacent_copy<Kernel, typename Kernel::Compute>(scratch, source, rows, cols));
  });
}
// The same with a copy in the type that is there: dot products of avx512 sum each type in an order of its own.
template <class Kernel, class F>
void with_adjacent_rows_as_stored(Scratch& scratch, const AnyRows& b, index_t rows, index_t cols, F&& f) {
  b.visit([&]<class S>(const arch::RowSource<S>& source) {
    f(source.col_stride == 1 ? source : adjacent_copy<Kernel, S>(scratch, source, rows, cols));
  });
}

// Where element [row, col] lies, or would: see arch::BytesAhead.
template <class S>
std::uintptr_t place(const arch::RowSource<S>& source, index_t row, index_t col) {
  constexpr index_t kSize = sizeof(S);
  return reinterpret_cast<std::uintptr_t>(source.data) +
         static_cast<std::uintptr_t>((row * source.row_stride + col) * kSize);
}

// What a source's rows are.
enum class RowsOfSource : std::uint8_t { kRowsOfB, kColumnsOfB };

// Where the next two strips of a walk lie.
template <class Order, class S>
arch::BytesAhead strips_ahead(const arch::RowSource<S>& source, const StripWalk<Order>& walk,
                              RowsOfSource rows) {
  constexpr index_t kSize = sizeof(S);
  if (source.row_index != nullptr) return {};
  const bool rows_of_b = rows == RowsOfSource::kRowsOfB;
  const auto place_of = [&](const Strip& strip) {
    return rows_of_b ? place(source, strip.kk, strip.col) : place(source, strip.col, strip.kk);
  };
  const Strip& next = walk.next();
  if (next.depth == 0) return {};
  const auto [count, length] = rows_of_b ? std::pair(next.depth, next.cols) : std::pair(next.cols, next.depth);
  const std::uintptr_t later = walk.later().depth == 0 ? 0 : place_of(walk.later());
  const index_t stride = count > 1 ? source.row_stride * kSize : 0;  // of one row any, and its bytes no number
  return {place_of(next), later, stride, count, length * kSize};
}

// The register tiles of a kernel for strips that are made from rows of S.
template <class Kernel, class S>
using TilesFor = typename Kernel::Microkernel::template TilesFor<S>;

// f<Tiles>(): those for strips of rows of B; `floats`: strips of floats where the kernel has the choice.
template <class Kernel, class S, class F>
decltype(auto) with_row_tiles(bool floats, F&& f) {
  using Tiles = TilesFor<Kernel, S>;
  using Floats = typename Kernel::Microkernel::template FloatTilesFor<S>;
  if constexpr (!std::is_same_v<Tiles, Floats>) {
    if (floats) return std::forward<F>(f).template operator()<Floats>();
  }
  return std::forward<F>(f).template operator()<Tiles>();
}

// What makes a strip from rows of S while another is multiplied: of bf16 from bf16, where the tiles have it, else void.
template <class Tiles, class S>
struct AheadOf {
  using Type = void;
};
template <class Tiles>
  requires requires { typename Tiles::RowsAhead; }
struct AheadOf<Tiles, bf16> {
  using Type = typename Tiles::RowsAhead;
};

// Of a product of `rows` rows over k > 0 steps: strips that Ahead makes while another is multiplied may be deeper than
// others.
template <class Tiles, class Ahead, class S>
StripDepths depths_of(const arch::RowSource<S>& source, index_t rows, index_t k) {
  const index_t together = rows < arch::kRowsOfDeepStrips ? arch::kStepsTranslated : k;
  StripDepths depths{Tiles::kRowsDepth, Tiles::kRowsDepth, together};
  if constexpr (!std::is_void_v<Ahead>) {
    if (source.row_index == nullptr && k % Ahead::kStep == 0) depths.most = Ahead::most_depth(rows);
  }
  return depths;
}

// The strips of a product, one after the other: the one that is multiplied, and room for the next.
template <class Kernel>
class Strips {
  using E = typename Kernel::Compute;
  static constexpr index_t kBytes = arch::kMostStripBytes;

 public:
  explicit Strips(Scratch& scratch)
      : strip_(scratch.b_panels.template as<std::byte>(2 * kBytes)), next_(strip_ + kBytes) {}

  // C [rows, cols] += A [rows, k] x the strip of what lies in rows at `from` (see place()): make(strip), unless that was
  // made while the one before was multiplied.
  template <class Tiles, class Ahead, class Make>
  void multiply(const E* a, index_t a_stride, index_t rows, std::uintptr_t from, index_t k, index_t cols,
                const arch::SumRows& c, const arch::BytesAhead& ahead, Make&& make) {
    using T = typename Tiles::StripElement;
    constexpr index_t kDepth = std::max(Tiles::kRowsDepth, Tiles::kColumnsDepth);
    static_assert(kDepth * arch::kStripCols * index_t{sizeof(T)} <= kBytes);
    if (std::exchange(next_from_, 0) == from) {
      std::swap(strip_, next_);
    } else {
      make(reinterpret_cast<T*>(strip_));
    }
    const T* strip = reinterpret_cast<const T*>(strip_);
    const index_t padded = round_up(k, arch::kPairing<T>);
    if constexpr (!std::is_void_v<Ahead>) {
      if (cols == arch::kStripCols && Ahead::fits(ahead)) {
        next_from_ = ahead.next;
        return Tiles::multiply(a, a_stride, rows, strip, padded, cols, c,
                               Ahead(ahead, rows, reinterpret_cast<T*>(next_)));
      }
    }
    Tiles::multiply(a, a_stride, rows, strip, padded, cols, c, arch::PacedPrefetch(ahead));
  }

 private:
  std::byte* strip_;
  std::byte* next_;
  std::uintptr_t next_from_ = 0;  // what next_ was made from; 0: nothing
};

// C [rows, n] += A [rows, k] x B [k, n] for the k steps and n columns of the strip at hand; a, source and c are all of
// theirs.
template <class Tiles, class Kernel, class S>
void multiply_strip_of_rows(Strips<Kernel>& strips, const arch::RowSource<typename Kernel::Compute>& a,
                            index_t rows, const arch::RowSource<S>& source, const Strip& strip,
                            const arch::BytesAhead& ahead, const arch::SumRows& c) {
  const auto from = source.from_row(strip.kk).from_column(strip.col);
  strips.template multiply<Tiles, typename AheadOf<Tiles, S>::Type>(
      a.data + strip.kk, a.row_stride, rows, place(from, 0, 0), strip.depth, strip.cols,
      c.after(strip.kk).from(0, strip.col), ahead,
      [&](auto* to) { Tiles::strip_of_rows(from, strip.depth, strip.cols, to); });
}

// C [rows, cols] += A [rows, k] x B [k, cols], A used where it lies, strip by strip of columns.
template <class Kernel>
void multiply_rows_by_columns(Scratch& scratch, const arch::RowSource<typename Kernel::Compute>& a,
                              index_t rows, const AnyRows& b, index_t k, index_t cols, const arch::SumRows& c) {
  Strips<Kernel> strips(scratch);
  b.visit([&]<class S>(const arch::RowSource<S>& source) {
    using Tiles = TilesFor<Kernel, S>;
    const StripDepths depths = depths_of<Tiles, typename AheadOf<Tiles, S>::Type>(source, rows, k);
    for (StripWalk walk(StripsAlongK{k, cols, depths}); !walk.done(); walk.advance()) {
      const arch::BytesAhead ahead = strips_ahead(source, walk, RowsOfSource::kRowsOfB);
      multiply_strip_of_rows<Tiles>(strips, a, rows, source, walk.here(), ahead, c);
    }
  });
}

// How deep a strip of B's rows is at most; with_adjacent_rows() copies them where they are not adjacent.
template <class Kernel>
index_t strip_depth(const AnyRows& b, bool floats) {
  const auto depth = []<class Tiles>() { return Tiles::kRowsDepth; };
  if (b.col_stride() != 1) return with_row_tiles<Kernel, typename Kernel::Compute>(floats, depth);
  return b.visit([&]<class S>(const arch::RowSource<S>&) { return with_row_tiles<Kernel, S>(floats, depth); });
}

// What memory is asked for, or the next strip made from, while `rows` rows meet one of StripsAcross. Many rows don't wait for
// memory, and their C needs the room in L2 that a piece would take. Of the last steps of K few columns are one piece, behind
// which there is none.
template <class Tiles, class S>
arch::BytesAhead ahead_across(index_t rows, const arch::RowSource<S>& source,
                              const StripWalk<StripsAcross>& walk, index_t k, index_t cols) {
  constexpr index_t kSize = sizeof(S);
  if constexpr (!std::is_void_v<typename AheadOf<Tiles, S>::Type>) {
    return strips_ahead(source, walk, RowsOfSource::kRowsOfB);
  }
  if (source.row_index != nullptr) return {};
  constexpr index_t kPieceCols = Tiles::kPieceCols;
  const bool pieces = rows < arch::kRowsOfDeepStrips && (cols > kPieceCols || walk.here().depth < k);
  const index_t wide = pieces ? kPieceCols : arch::kStripCols;
  const Strip piece = piece_ahead(walk.here(), k, cols, wide);
  if (piece.depth == 0) return {};
  const index_t stride = piece.depth > 1 ? source.row_stride * kSize : 0;
  return {place(source, piece.kk, piece.col), 0, stride, piece.depth, piece.cols * kSize};
}

// The same block of K by block of K, all columns of each: A may have to be staged, or B. Strips of bf16 that floats meet are
// widened for each few rows anew, so with many they are floats where L1 has room for these (benchmarks/LOG.md, "Strips of
// floats, again").
template <class Kernel>
void multiply_rows_by_blocks(Scratch& scratch, const AnyRows& a, index_t rows, const AnyRows& b, index_t k,
                             index_t cols, const arch::SumRows& c, bool roomy_l1 = arch::roomy_l1()) {
  const bool floats = roomy_l1 && rows >= arch::kRowsOfDeepStrips;
  const index_t depth = even_part(k, ceil_div(k, strip_depth<Kernel>(b, floats)));
  Strips<Kernel> strips(scratch);
  for (index_t kk = 0; kk < k; kk += depth) {
    const index_t here = std::min(depth, k - kk);
    const auto a_block =
        adjacent_rows<Kernel>(scratch.a_rows, a.from(0, kk), rows, here, Kernel::Microkernel::kKUnit);
    const index_t left = b.col_stride() == 1 ? k - kk : here;  // a copy is of one block
    with_adjacent_rows<Kernel>(
        scratch, b.from(kk, 0), here, cols, [&]<class S>(const arch::RowSource<S>& source) {
          with_row_tiles<Kernel, S>(floats, [&]<class Tiles>() {
            // Of the rest of K this block only: A's next is not there yet. B's next is announced.
            for (StripWalk walk(StripsAcross{left, cols, here}); !walk.done() && walk.here().kk == 0;
                 walk.advance()) {
              multiply_strip_of_rows<Tiles>(strips, a_block, rows, source, walk.here(),
                                            ahead_across<Tiles>(rows, source, walk, left, cols), c.after(kk));
            }
          });
        });
  }
}

// C [rows, cols] += A [rows, k] x B [k, cols], B where it lies: Products::multiply_in_place().
template <class Kernel, class Products>
void multiply_rows_in_place(Scratch& scratch, const NnTerm& term, index_t rows, index_t cols,
                            const arch::SumRows& c) {
  constexpr index_t kUnit = arch::kPairing<typename Kernel::Compute>;
  const auto a = adjacent_rows<Kernel>(scratch.a_rows, term.a, rows, term.k, kUnit);
  with_adjacent_rows<Kernel>(scratch, term.b, term.k, cols, [&](const auto& b) {
    Products::multiply_in_place(a.data, a.row_stride, rows, b, term.k, cols, c);
  });
}

// C [rows, cols] += the term's A [rows, k] x B [k, cols].
template <class Kernel>
void multiply_rows(Scratch& scratch, const NnTerm& term, index_t rows, index_t cols, const arch::SumRows& c) {
  using Micro = typename Kernel::Microkernel;
  const auto& [a, b, k, cached] = term;
  if constexpr (BlocksOfRows<Kernel>) {
    using Blocks = typename Micro::RowBlocks;
    // Where hardware follows rows it is asked for less if they are read side by side (arch/of_this_cpu.hpp).
    const bool first = arch::asks_in_order() || !Micro::in_place(k, rows);
    if (!cached && first && Blocks::in_place(k, rows))
      return multiply_rows_in_place<Kernel, Blocks>(scratch, term, rows, cols, c);
  }
  if constexpr (SumsInPlace<Kernel>) {
    if (Micro::in_place(k, rows)) return multiply_rows_in_place<Kernel, Micro>(scratch, term, rows, cols, c);
  }
  if constexpr (MakesRowsAhead<Kernel>) {
    using E = typename Kernel::Compute;
    const E* direct = a.template direct<E>();
    if (direct != nullptr && k % Micro::kKUnit == 0 && b.col_stride() == 1) {
      const arch::RowSource<E> rows_of_a{direct, a.row_stride(), 1, nullptr};
      return multiply_rows_by_columns<Kernel>(scratch, rows_of_a, rows, b, k, cols, c);
    }
  }
  multiply_rows_by_blocks<Kernel>(scratch, a, rows, b, k, cols, c);
}

// C [tokens, out] += X [tokens, k] x W^T, W [out, k]; X in rows `x_stride` apart, zeros up to the kernel's unit. A term
// that is not by_dots() goes by strips, whatever the form.
template <class Kernel>
void multiply_columns(Scratch& scratch, TokenForm form, const typename Kernel::Compute* x, index_t x_stride,
                      index_t tokens, const AnyRows& w, index_t out, index_t k, const arch::SumRows& c) {
  using Micro = typename Kernel::Microkernel;
  using E = typename Kernel::Compute;
  if constexpr (DotsInPlace<Kernel>) {
    if (by_dots(form, k)) {
      return with_adjacent_rows_as_stored<Kernel>(
          scratch, w, out, k, [&]<class S>(const arch::RowSource<S>& source) {
            E* ordered = scratch.a_rows.template as<E>(Micro::ordered_size(tokens, k));
            Micro::template order_tokens<S>(x, x_stride, tokens, k, ordered);
            Micro::dot_in_place(source, out, ordered, tokens, k, c);
          });
    }
  }
  Strips<Kernel> strips(scratch);
  with_adjacent_rows<Kernel>(scratch, w, out, k, [&]<class S>(const arch::RowSource<S>& source) {
    using Tiles = TilesFor<Kernel, S>;
    const StripDepths depths{Tiles::kColumnsDepth, Tiles::kColumnsDepth, k};
    for (StripWalk walk(StripsAlongK{k, out, depths}); !walk.done(); walk.advance()) {
      const Strip& strip = walk.here();
      const auto from = source.from_row(strip.col).from_column(strip.kk);
      strips.template multiply<Tiles, void>(
          x + strip.kk, x_stride, tokens, place(from, 0, 0), strip.depth, strip.cols,
          c.after(strip.kk).from(0, strip.col), strips_ahead(source, walk, RowsOfSource::kColumnsOfB),
          [&](auto* to) { Tiles::strip_of_columns(from, strip.cols, strip.depth, to); });
    }
  });
}

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
