// Products of gemm_nt for few tokens, as dot products along K: they read W where it lies, as arch/in_place.hpp does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "amx_sft_moe/arch/dot_blocks.hpp"
#include "amx_sft_moe/arch/in_place.hpp"
#include "amx_sft_moe/arch/of_this_cpu.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

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
        pages_(bytes_of(rows.w, rows.outs, rows.k), rows.group),
        near_(rows_asked_into() == AskedInto::kL1 ? 2 * kNearBytes : kNearBytes) {
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
    for (int r = 0; r < Rows; ++r) __builtin_prefetch(bytes_behind(row[r] + kk, near_), 0, 3);
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
  index_t near_;          // bytes, along the rows that are read
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
template <class Tiles, int MostTokens, int MostOfShort, int DotOuts, int DotTokens>
struct InPlaceDots {
  using X = typename Tiles::Element;

  // Whether an expert with so many tokens in all has dot products. Not a task's tokens: each of them must choose alike.
  static constexpr bool dots(index_t all_tokens) { return all_tokens <= MostTokens; }
  // Whether it has them up to kShortDot steps of K.
  static constexpr bool short_dots(index_t all_tokens) { return all_tokens <= MostOfShort; }

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
    if constexpr (kPairing<X> == 1) {
      if (w.row_index == nullptr && (!in_order || tokens > kDotsInOrder)) {
        return DotBlocks<Tiles, DotTokens>::multiply(w, outs, ordered, tokens, k, c);
      }
    }
    const DotRows<S> rows{w, outs, k, DotOuts, ceil_div(tokens, DotTokens)};
    // In fp32 with x on its way from L2 it takes 3 to 7 % longer in order (benchmarks/LOG.md, "Two chains").
    if constexpr (kPairing<X> == 1) in_order = in_order && tokens * k * index_t{sizeof(X)} <= kSumsBytes;
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
