// Products for few rows of A, or few steps along K, that read B where it lies: making a strip would cost as much as its
// products. How those of gemm_nn and gemm_tn are cut into register tiles; the tiles are the microkernels'. Sums in fp32 have a
// way of their own, in_place_blocks.hpp, and so have those of gemm_nn with 5 to 16 rows; gemm_nt's are in in_place_dots.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/of_this_cpu.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"
#include "amx_sft_moe/arch/pages_ahead.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Asks for rows [lead, rows) of a source, row after row. Gathered rows are not asked for.
template <class S>
LeadingPrefetch rows_in_order(const RowSource<S>& source, index_t rows, index_t cols, index_t lead) {
  constexpr index_t kSize = sizeof(S);
  if (source.row_index != nullptr || lead >= rows) return {BytesAhead{}, 0, AskedInto::kL2};
  const auto first = reinterpret_cast<std::uintptr_t>(source.data);
  return {BytesAhead{first, 0, source.row_stride * kSize, rows, cols * kSize}, lead, rows_asked_into()};
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
// there if asks_near or R <= kWaitingRows; and, for 1 <= D <= kDeepest and any number of rows,
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
    if (k <= kFewSteps || held(k, rows)) return multiply_held(a, a_stride, rows, b, k, cols, c);
    constexpr index_t kSize = sizeof(S);
    const index_t lead = kFarRows + ceil_div(kFarBytes, cols * kSize);
    const bool far = lead < k && in_order;
    const bool near = lead < k && !in_order;
    const index_t together = in_order && rows <= kRowsOfPairs ? kPairing<A> : kFarRows;
    for_each_part(rows, MostRows, [&](index_t r, index_t height) {
      const auto add = rows_of<S>(height);
      const index_t wide = part_of_columns(height, cols);
      LeadingPrefetch ahead = rows_in_order(b, k, cols, lead);
      ahead.spread(ceil_div(k, std::min(together, kDepth * kPairing<A>)) * ceil_div(cols, Tiles::kTurnColumns));
      PagesAhead pages(bytes_of(b, k, cols), kFarRows);
      for (index_t kk = 0; kk < k; kk += together) {
        pages.before(kk + lead);
        for (index_t j = 0; j < cols; j += wide) {
          const Product<S> product{a + r * a_stride,         a_stride, b.from_column(j), k,
                                   std::min(wide, cols - j), near};
          add(product, kk, std::min(kk + together, k), c.from(r, j), far ? &ahead : nullptr);
        }
      }
    });
  }

 private:
  static constexpr index_t kDepth = 4;  // rows of B, or pairs of them, that meet in C's registers

  static constexpr bool held(index_t k, index_t rows) { return k <= kHeldSteps && rows <= kFewFactorRows; }
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

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
