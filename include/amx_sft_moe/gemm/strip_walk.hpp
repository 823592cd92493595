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

// All of K for 64 columns before the next 64. Nothing is multiplied while a task's first strip is made: those of the first
// columns are no deeper than `first`, those of each further 64 columns than twice the ones before, none than `most`.
class StripsAlongK {
 public:
  StripsAlongK(index_t k, index_t cols, index_t first, index_t most)
      : k_(k), cols_(cols), most_(most), limit_(first), parts_(ceil_div(k, first)), left_(parts_) {}

  Strip take() {
    if (left_ == 0 || col_ >= cols_) return {};
    const Strip strip{kk_, col_, even_part(k_ - kk_, left_), std::min(arch::kStripCols, cols_ - col_)};
    kk_ += strip.depth;
    if (--left_ == 0) next_columns();
    return strip;
  }

 private:
  void next_columns() {
    kk_ = 0;
    col_ += arch::kStripCols;
    if (parts_ > 1 && limit_ < most_) {
      limit_ = std::min(most_, 2 * limit_);
      parts_ = ceil_div(k_, limit_);
    }
    left_ = parts_;
  }

  index_t k_, cols_, most_;
  index_t limit_, parts_, left_;  // of a strip's depth; of K; and those of these columns that are left
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
