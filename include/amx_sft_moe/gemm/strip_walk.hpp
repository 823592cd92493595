// The order in which the strips of a product are multiplied, and how deep each is.
#pragma once

#include <algorithm>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// Steps [kk, kk + depth) of K, columns [col, col + cols). depth 0: there is none.
struct Strip {
  index_t kk = 0, col = 0, depth = 0, cols = 0;
};

// The first of `parts` parts of `steps`, as even as whole cache lines allow: a strip is made during the one before it,
// for which a shallow one gives no time.
constexpr index_t even_part(index_t steps, index_t parts) {
  if (parts <= 1) return steps;
  return round_up(ceil_div(steps, parts), arch::kLineBytes / index_t{sizeof(bf16)});
}

// How deep strips are, and how many steps of K go together, a multiple of a cache line of bf16. Where that is not all of K
// strips do not get deeper: `most` is `first`.
struct StripDepths {
  index_t first, most;
  index_t together;
};

// Of each even part of K, no longer than `together`, all steps for 64 columns before the next 64. Nothing is multiplied while
// a task's first strip is made: those of the first columns are no deeper than `first`, those of each further 64 columns than
// twice the ones before, none than `most`.
class StripsAlongK {
 public:
  StripsAlongK(index_t k, index_t cols, const StripDepths& depths)
      : k_(k), cols_(cols), most_(depths.most), limit_(depths.first), parts_(ceil_div(k, depths.together)) {
    next_part();
  }

  Strip take() {
    if (left_ == 0) return {};
    const Strip strip{kk_, col_, even_part(end_ - kk_, left_), std::min(arch::kStripCols, cols_ - col_)};
    kk_ += strip.depth;
    if (--left_ == 0) next_columns();
    return strip;
  }

 private:
  void next_columns() {
    kk_ = begin_;
    col_ += arch::kStripCols;
    if (col_ >= cols_) return next_part();
    if (strips_ > 1 && limit_ < most_) {
      limit_ = std::min(most_, 2 * limit_);
      strips_ = ceil_div(end_ - begin_, limit_);
    }
    left_ = strips_;
  }
  void next_part() {
    if (parts_ == 0 || cols_ == 0) return;
    kk_ = begin_ = end_;
    col_ = 0;
    end_ += even_part(k_ - end_, parts_--);
    left_ = strips_ = ceil_div(end_ - begin_, limit_);
  }

  index_t k_, cols_, most_;
  index_t limit_;                  // of a strip's depth
  index_t parts_;                  // of K that are left behind [begin_, end_)
  index_t begin_ = 0, end_ = 0;    // the part at hand
  index_t strips_ = 0, left_ = 0;  // of it, for 64 columns; and those of these columns that are left
  index_t kk_ = 0, col_ = 0;
};

// All columns of `depth` steps of K before the next steps.
class StripsAcross {
 public:
  StripsAcross(index_t k, index_t cols, index_t depth) : k_(k), cols_(cols), depth_(depth) {}

  Strip take() {
    if (kk_ >= k_ || col_ >= cols_) return {};
    const Strip strip{kk_, col_, std::min(depth_, k_ - kk_), std::min(arch::kStripCols, cols_ - col_)};
    col_ += arch::kStripCols;
    if (col_ >= cols_) {
      col_ = 0;
      kk_ += depth_;
    }
    return strip;
  }

 private:
  index_t k_, cols_, depth_;
  index_t kk_ = 0, col_ = 0;
};

// What of rows of B memory is asked for while strip `here` of StripsAcross is multiplied. Of each row a longer piece than a
// strip's comes faster, so it is `wide` columns, a multiple of a strip's: the strips of such a piece share out the rows of the
// next one, which is of the same steps of K or, behind the last columns, of those that follow.
constexpr Strip piece_ahead(const Strip& here, index_t k, index_t cols, index_t wide) {
  const index_t piece = here.col / wide * wide;
  const index_t sharers = ceil_div(std::min(wide, cols - piece), arch::kStripCols);
  const index_t share = (here.col - piece) / arch::kStripCols;
  const bool below = piece + wide >= cols;
  const index_t kk = below ? here.kk + here.depth : here.kk, col = below ? 0 : piece + wide;
  const index_t rows = std::min(here.depth, k - kk);
  const index_t first = share * rows / sharers, end = (share + 1) * rows / sharers;
  return {kk + first, col, end - first, std::min(wide, cols - col)};
}

// Strips one after the other: the one that is multiplied, and the two after it.
template <class Order>
class StripWalk {
 public:
  explicit StripWalk(const Order& order) : order_(order) {
    for (Strip* strip : {&here_, &next_, &later_}) *strip = order_.take();
  }

  const Strip& here() const { return here_; }
  const Strip& next() const { return next_; }
  const Strip& later() const { return later_; }
  bool done() const { return here_.depth == 0; }

  void advance() {
    here_ = next_;
    next_ = later_;
    later_ = order_.take();
  }

 private:
  Order order_;
  Strip here_, next_, later_;
};

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
