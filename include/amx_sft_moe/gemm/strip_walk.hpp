// The order in which the strips of a product are multiplied, and how deep each is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// What follows a strip: the one that continues it along K, or the one beside it.
enum class Order : std::uint8_t { kAlongK, kAcross };

// K in parts as even as whole cache lines allow, none deeper than `most`: a shallow rest would not give the time that the
// strip after it takes to be made.
constexpr index_t strip_depth(index_t k, index_t most) {
  const index_t parts = ceil_div(std::max<index_t>(k, 1), most);
  return std::min(most, round_up(ceil_div(k, parts), arch::kLineBytes / index_t{sizeof(bf16)}));
}

// Steps [kk, kk + depth) of K, columns [col, col + cols). depth 0: there is none.
struct Strip {
  index_t kk = 0, col = 0, depth = 0, cols = 0;
};

// All strips of a [k, cols], none deeper than `most`: the one that is multiplied, and the two after it.
//
// Nothing is multiplied while a task's first strip is made, so along K the first column of strips is kFirstStripDepth deep,
// and every other column twice as deep as the one before: the next strip is made during one that is at least half as deep.
template <Order kOrder>
class StripWalk {
 public:
  StripWalk(index_t k, index_t cols, index_t most)
      : k_(k),
        cols_(cols),
        most_(most),
        limit_(kOrder == Order::kAlongK ? std::min(most, arch::kFirstStripDepth) : most) {
    depth_ = kOrder == Order::kAlongK ? strip_depth(k, limit_) : most;
    for (Strip* strip : {&here_, &next_, &later_}) *strip = take();
  }

  const Strip& here() const { return here_; }
  const Strip& next() const { return next_; }
  const Strip& later() const { return later_; }
  bool done() const { return here_.depth == 0; }

  void advance() {
    here_ = next_;
    next_ = later_;
    later_ = take();
  }

 private:
  Strip take() {
    if (kk_ >= k_ || col_ >= cols_) return {};
    const Strip strip{kk_, col_, std::min(depth_, k_ - kk_), std::min(arch::kStripCols, cols_ - col_)};
    if constexpr (kOrder == Order::kAlongK) {
      kk_ += depth_;
      if (kk_ >= k_) next_column();
    } else {
      col_ += arch::kStripCols;
      if (col_ >= cols_) {
        col_ = 0;
        kk_ += depth_;
      }
    }
    return strip;
  }

  void next_column() {
    kk_ = 0;
    col_ += arch::kStripCols;
    if (depth_ >= k_ || limit_ == most_) return;
    limit_ = std::min(most_, 2 * limit_);
    depth_ = strip_depth(k_, limit_);
  }

  index_t k_, cols_, most_;
  index_t limit_, depth_ = 0;
  index_t kk_ = 0, col_ = 0;  // of the strip behind later_
  Strip here_, next_, later_;
};

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
