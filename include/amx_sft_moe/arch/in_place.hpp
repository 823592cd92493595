// Products for few rows of A, or few steps along K, that read B where it lies: making a strip would cost as much as its
// products. How they are cut into register tiles; the tiles are the microkernels'. Sums in fp32 of gemm_nn and gemm_tn
// have a way of their own, in_place_blocks.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/cpu_features.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"
#include "amx_sft_moe/arch/pages_ahead.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// What may lie behind a row's end, and behind all memory that there is: a number until it is asked for.
inline const char* bytes_behind(const void* from, index_t bytes) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing is read through it
  return reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) +
                                       static_cast<std::uintptr_t>(bytes));
}

// Whether rows to come are asked for in the order in which they lie: memory is the faster the less it jumps (benchmarks/LOG.md,
// "Zen 5"). Else side by side, as they are read, which hardware follows ("Rows side by side, for Intel"). Asked of the CPU once.
inline bool asks_in_order() {
  static const bool in_order = !read_cpu_features().follows_rows;
  return in_order;
}

// Asks for rows [lead, rows) of a source, row after row. Gathered rows are not asked for.
template <class S>
LeadingPrefetch rows_in_order(const RowSource<S>& source, index_t rows, index_t cols, index_t lead) {
  constexpr index_t kSize = sizeof(S);
  if (source.row_index != nullptr || lead >= rows) return {BytesAhead{}, 0};
  const auto first = reinterpret_cast<std::uintptr_t>(source.data);
  return {BytesAhead{first, 0, source.row_stride * kSize, rows, cols * kSize}, lead};
}

// C [Rows, cols] += a [Rows, Depth] x rows of B, with rows to be asked for. `a` holds pairs, and the last of 2 Depth rows is
// null where K is odd.
template <class E, std::size_t Rows, std::size_t Depth, class S>
struct InPlaceSteps {
  static_assert(kPairing<E> == 2);  // else in_place_blocks.hpp
  static constexpr std::size_t kRows = Depth * kPairing<E>;
  std::int32_t a[Rows][Depth];
  const S* b[kRows];
  const S* near[kRows];
  bool asks_near;
};

// Products of gemm_nn and gemm_tn. Tiles has, with its own target attribute, for 1 <= R <= MostRows and 1 <= D <= 4 (steps
// and C by value, so that these may stay in registers), with A of its type Element:
//   template <std::size_t R, std::size_t D, class S>
//   static void add_steps(InPlaceSteps<Element, R, D, S> steps, index_t cols, SumRows c, LeadingPrefetch* ahead);
// which has ahead->turn(), unless that is null, for every kTurnColumns columns, or most of the last, and asks for each of `near`
// there if asks_near or R <= kWaitingRows. With a kDeepest, also for 1 <= D <= kDeepest and any number of rows
//   template <std::size_t D, class S>  // b: of the rows of B, the last null where K is odd
//   static void add_few_steps(const Element* a, index_t a_stride, index_t rows, const S* const* b, index_t cols,
//                             const SumRows& c);
template <class Tiles, int MostRows>
struct InPlaceSums {
  using A = typename Tiles::Element;
  // Whether B is read in place: for few rows of A, or few steps along K.
  static constexpr bool in_place(index_t k, index_t rows) {
    return rows <= MostRows || k <= kFewSteps || held(k, rows);
  }

  // C [rows, cols] += A [rows, k] x B [k, cols], B's columns adjacent. Of more than few steps a block of B's rows at a
  // time, whose addresses stay translated while parts of C, small enough for L1, take it in: a row is a page or more,
  // so the fewer times it is begun with the better.
  template <class S>
  static void multiply_in_place(const A* a, index_t a_stride, index_t rows, const RowSource<S>& b, index_t k,
                                index_t cols, const SumRows& c, bool in_order = asks_in_order()) {
    if constexpr (kHoldsSteps) {
      if (k <= kFewSteps || held(k, rows)) return multiply_held(a, a_stride, rows, b, k, cols, c);
    }
    constexpr index_t kSize = sizeof(S);
    const index_t lead = kFarRows + ceil_div(kFarBytes, cols * kSize);
    const bool far = lead < k && in_order;
    const bool near = lead < k && !in_order;
    for_each_part(rows, MostRows, [&](index_t r, index_t height) {
      const auto add = rows_of<S>(height);
      const index_t wide = part_of_columns(height, cols);
      LeadingPrefetch ahead = rows_in_order(b, k, cols, lead);
      ahead.spread(ceil_div(k, kDepth * kPairing<A>) * ceil_div(cols, Tiles::kTurnColumns));
      PagesAhead pages(bytes_of(b, k, cols), kFarRows);
      for (index_t kk = 0; kk < k; kk += kFarRows) {
        pages.before(kk + lead);
        for (index_t j = 0; j < cols; j += wide) {
          const Product<S> product{a + r * a_stride,         a_stride, b.from_column(j), k,
                                   std::min(wide, cols - j), near};
          add(product, kk, std::min(kk + kFarRows, k), c.from(r, j), far ? &ahead : nullptr);
        }
      }
    });
  }

 private:
  static constexpr bool kHoldsSteps = requires { Tiles::kDeepest; };
  static constexpr index_t kDepth = 4;  // rows of B, or pairs of them, that meet in C's registers

  static constexpr bool held(index_t k, index_t rows) {
    return kHoldsSteps && k <= kHeldSteps && rows <= kFewFactorRows;
  }
  // Few steps along K: some rows of B are in registers while all of A meets them, as many as those that follow.
  template <class S>
  static void multiply_held(const A* a, index_t a_stride, index_t rows, const RowSource<S>& b, index_t k,
                            index_t cols, const SumRows& c) {
    constexpr index_t kGroup = kPairing<A>, kMost = Tiles::kDeepest;
    index_t kk = 0;
    for (index_t left = ceil_div(k, kMost * kGroup); left > 0; --left) {
      const index_t depth = ceil_div(ceil_div(k - kk, kGroup), left);
      const S* from[std::size_t{kMost * kGroup}];
      for (index_t i = 0; i < depth * kGroup; ++i) from[i] = kk + i < k ? b.row(kk + i) : nullptr;
      few_steps_of<S>(depth)(a + kk, a_stride, rows, from, cols, c.after(kk));
      kk += depth * kGroup;
    }
  }
  template <class S>
  using FewSteps = void (*)(const A*, index_t, index_t, const S* const*, index_t, const SumRows&);
  template <class S>
  static FewSteps<S> few_steps_of(index_t depth) {
    return []<std::size_t... Less>(index_t n, std::index_sequence<Less...>) {
      constexpr FewSteps<S> kOf[] = {&Tiles::template add_few_steps<Less + 1, S>...};
      return kOf[n];
    }(depth - 1, std::make_index_sequence<Tiles::kDeepest>{});
  }

  // A [rows, k] x B [k, cols].
  template <class S>
  struct Product {
    const A* a;
    index_t a_stride;
    RowSource<S> b;
    index_t k, cols;
    bool asks_near;  // for rows of B whatever rows of A there are
  };

  // Steps [kk, end) of K.
  template <int Rows, class S>
  static void add_product(const Product<S>& product, index_t kk, index_t end, const SumRows& c,
                          LeadingPrefetch* ahead) {
    constexpr index_t kGroup = kPairing<A>;
    for (; ceil_div(end - kk, kGroup) >= kDepth; kk += kDepth * kGroup) {
      add_steps<Rows, kDepth>(product, kk, c, ahead);
    }
    switch (ceil_div(end - kk, kGroup)) {
      case 3:
        return add_steps<Rows, 3>(product, kk, c, ahead);
      case 2:
        return add_steps<Rows, 2>(product, kk, c, ahead);
      case 1:
        return add_steps<Rows, 1>(product, kk, c, ahead);
      default:
        return;
    }
  }

  template <std::size_t Rows, std::size_t Depth, class S>
  static void add_steps(const Product<S>& product, index_t kk, const SumRows& c, LeadingPrefetch* ahead) {
    InPlaceSteps<A, Rows, Depth, S> steps;
    steps.asks_near = product.asks_near;
    for (std::size_t d = 0; d < steps.kRows; ++d) {
      const index_t at = kk + static_cast<index_t>(d);
      steps.b[d] = at < product.k ? product.b.row(at) : nullptr;
      steps.near[d] = product.b.row(at + kNearRows < product.k ? at + kNearRows : kk);
    }
    for (std::size_t r = 0; r < Rows; ++r) {
      const A* from = product.a + static_cast<index_t>(r) * product.a_stride + kk;
      std::memcpy(steps.a[r], from, sizeof(steps.a[r]));
    }
    Tiles::add_steps(steps, product.cols, c.after(kk), ahead);
  }

  static constexpr index_t part_of_columns(index_t rows, index_t cols) {
    constexpr index_t kFloats = kSumsBytes / index_t{sizeof(float)};
    const index_t parts = ceil_div(cols * rows, kFloats);
    return round_up(ceil_div(cols, parts), index_t{64});
  }

  template <class S>
  using Rows = void (*)(const Product<S>&, index_t, index_t, const SumRows&, LeadingPrefetch*);
  template <class S>
  static Rows<S> rows_of(index_t rows) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr Rows<S> kOf[] = {&add_product<Less + 1, S>...};
      return kOf[n];
    }(rows - 1, std::make_integer_sequence<int, MostRows>{});
  }
};

// W [outs, k] of dot products: groups of its rows meet x, in so many passes over each group some tokens.
template <class S>
struct DotRows {
  RowSource<S> w;
  index_t outs, k;
  index_t group, passes;
};

// What dot products ask memory for while they read a group of rows: before(o, t), of the first row and the first token, comes
// before each pass, turn<Rows>(row, kk, first) before a cache line of each of Rows rows, from element kk on, `first` once for
// the kLine elements of a tile.

// The next rows, each pass for its share: rows of a page or more side by side, as they are read, shorter ones in the order in
// which they lie. For fp32 on CPUs whose hardware follows rows by itself, to L1 too: there neither lines asked for in L1 nor
// pages translated together are worth what they take (benchmarks/LOG.md, "Asked for once").
template <class S>
class NextRowsOfDots {
 public:
  explicit NextRowsOfDots(const DotRows<S>& rows)
      : rows_(rows), side_by_side_(rows.k * index_t{sizeof(S)} >= kPageBytes), lines_(bytes_from(0)) {}

  void before(index_t o, index_t t) {
    const index_t next = o + rows_.group;
    if (t > 0) return;
    if (next < rows_.outs) lines_ = LinesInOrder(bytes_from(next));
    for (index_t i = 0; i < rows_.group; ++i) {
      far_[i] = reinterpret_cast<std::uintptr_t>(rows_.w.row(std::min(next + i, rows_.outs - 1)));
    }
  }

  template <int Rows>
  AMX_SFT_MOE_INLINE void turn(const S* const* /*row*/, index_t /*kk*/, bool /*first*/) {
    if (++turns_ < rows_.passes) return;
    turns_ = 0;
    if (!side_by_side_) {
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < Rows; ++r) lines_.turn();
      return;
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      ask_for_line(far_[r]);
      far_[r] += std::uintptr_t{kLineBytes};
    }
  }

 private:
  RowBytes bytes_from(index_t o) const {
    return bytes_of(rows_.w.from_row(o), std::min(rows_.group, rows_.outs - o), rows_.k);
  }

  DotRows<S> rows_;
  bool side_by_side_;
  LinesInOrder lines_;
  std::uintptr_t far_[4] = {};  // what to ask for next of each
  index_t turns_ = 0;           // since some asked
};

// Rows further on, evenly over `turns`, where that is what the CPU likes. Else the next ones side by side, of each the
// elements [0, k >> shift). And what follows in the rows that are read, into L1.
template <class S>
class FarRows {
 public:
  FarRows(const DotRows<S>& rows, index_t turns, bool in_order)
      : rows_(rows),
        in_order_(in_order),
        shift_(rows.passes > 1 ? 1 : 0),
        lead_(rows.group + (in_order ? ceil_div(kFarBytes, rows.k * index_t{sizeof(S)}) : 0)),
        ahead_(rows_in_order(rows.w, in_order ? rows.outs : 0, rows.k, lead_)),
        pages_(bytes_of(rows.w, rows.outs, rows.k), rows.group) {
    ahead_.spread(turns);
  }

  void before(index_t o, index_t t) {
    if (t == 0) pages_.before(o + lead_);
    if (in_order_) return;
    for (index_t i = 0; i < rows_.group; ++i) {
      far_[i] = rows_.w.row(std::min(o + i + rows_.group, rows_.outs - 1)) + (t > 0 ? rows_.k / 2 : 0);
    }
  }

  template <int Rows>
  AMX_SFT_MOE_INLINE void turn(const S* const* row, index_t kk, bool first) {
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) __builtin_prefetch(bytes_behind(row[r] + kk, kNearBytes), 0, 3);
    if (far_[0] == nullptr) {
      if (first) ahead_.turn();
      return;
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) ask_for_line(reinterpret_cast<std::uintptr_t>(far_[r] + (kk >> shift_)));
  }

 private:
  DotRows<S> rows_;
  bool in_order_;
  index_t shift_;
  index_t lead_;  // rows that are asked for are so many behind those that are read
  LeadingPrefetch ahead_;
  PagesAhead pages_;
  const S* far_[4] = {};  // null: in order
};

// Products of gemm_nt, dot products along K. Tiles has, with its own target attribute, for 1 <= O <= DotOuts and 1 <= T <=
// DotTokens, and X of its type Element:
//   template <int O, int T, class S, class Ahead>   // C [T, O] += X [T, k] x rows^T; x ordered
//   static void dot(const S* const* rows, const Element* x, index_t k, const SumRows& c, Ahead& ahead);
//   template <class S>                 // X [tokens, k] -> [k / kLine][tokens][kLine], zeros behind k
//   static void order(const Element* x, index_t x_stride, index_t tokens, index_t k, Element* to);
// which has ahead.turn<O>(rows, kk, first) for each cache line of a row from kk on, `first` once for kLine elements. kLine
// elements of a row of W are one or two vectors of products, in an order that suits the type and the instructions.
template <class Tiles, int MostTokens, int DotOuts, int DotTokens>
struct InPlaceDots {
  using X = typename Tiles::Element;

  // Whether an expert with so many tokens in all has dot products. Not a task's tokens: each of them must choose alike.
  static constexpr bool dots(index_t all_tokens) { return all_tokens <= MostTokens; }

  // Elements of the copy of x that dot_in_place() reads.
  static constexpr index_t ordered_size(index_t tokens, index_t k) {
    return tokens * round_up(k, Tiles::kLine);
  }

  // That copy, for weights of type S: one stream for the tokens of a pass. Rows of x are wanted at once, and from
  // as many places they came no faster than L2 delivers.
  template <class S>
  static void order_tokens(const X* x, index_t x_stride, index_t tokens, index_t k, X* ordered) {
    for_each_part(tokens, DotTokens, [&](index_t t, index_t count) {
      Tiles::template order<S>(x + t * x_stride, x_stride, count, k, ordered + ordered_size(t, k));
    });
  }

  // C [tokens, outs] += X [tokens, k] x W^T, W [outs, k] with its columns adjacent. Each pass over some rows of W
  // asks for its share of the next ones: memory does not wait for arithmetic. Passes have as many tokens as one another:
  // one of few would not hide the latency of its products.
  template <class S>
  static void dot_in_place(const RowSource<S>& w, index_t outs, const X* ordered, index_t tokens, index_t k,
                           const SumRows& c, bool in_order = asks_in_order()) {
    const DotRows<S> rows{w, outs, k, DotOuts, ceil_div(tokens, DotTokens)};
    if constexpr (kPairing<X> == 1) {
      if (!in_order) {
        NextRowsOfDots<S> ahead(rows);
        return dot_groups(rows, ordered, tokens, c, ahead);
      }
    }
    // In order and with x on its way from L2 it took up to 1.2 times as long (benchmarks/LOG.md, "Zen 5").
    in_order = in_order && tokens * k * index_t{sizeof(X)} <= kSumsBytes;
    const index_t steps = k / std::max<index_t>(Tiles::kLine, kLineBytes / index_t{sizeof(S)});
    FarRows<S> ahead(rows, ceil_div(outs, DotOuts) * rows.passes * steps, in_order);
    dot_groups(rows, ordered, tokens, c, ahead);
  }

 private:
  template <class S, class Ahead>
  static void dot_groups(const DotRows<S>& rows, const X* ordered, index_t tokens, const SumRows& c,
                         Ahead& ahead) {
    for (index_t o = 0; o < rows.outs; o += DotOuts) {
      for_each_part(tokens, DotTokens, [&](index_t t, index_t count) {
        const S* row[std::size_t{DotOuts}];
        for (index_t i = 0; i < DotOuts; ++i) row[i] = rows.w.row(std::min(o + i, rows.outs - 1));
        ahead.before(o, t);
        dot_of<S, Ahead>(rows.outs - o, count)(row, ordered + ordered_size(t, rows.k), rows.k, c.from(t, o),
                                               ahead);
      });
    }
  }

  template <class S, class Ahead>
  using Dot = void (*)(const S* const*, const X*, index_t, const SumRows&, Ahead&);
  template <class S, class Ahead>
  static Dot<S, Ahead> dot_of(index_t outs, index_t tokens) {
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Dot<S, Ahead> kOf[] = {&Tiles::template dot<N / DotTokens + 1, N % DotTokens + 1, S, Ahead>...};
      return kOf[n];
    }((std::min<index_t>(outs, DotOuts) - 1) * DotTokens + tokens - 1,
           std::make_integer_sequence<int, DotOuts * DotTokens>{});
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
