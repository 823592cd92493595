// Rows to come, as the bytes they are, and a way of asking for them.
#pragma once

#include <cstdint>

#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

inline constexpr index_t kPageBytes = 4096;  // or more: larger pages are asked for several times

// Rows that lie somewhere: numbers, see BytesAhead.
struct RowBytes {
  std::uintptr_t first = 0;
  index_t stride = 0;  // bytes
  index_t rows = 0;    // all of them there
  index_t row_bytes = 0;

  // Whether no page lies between them.
  constexpr bool adjacent() const { return stride - row_bytes < kPageBytes; }
};

// The rows of a source, of each its first `cols` elements. Of gathered rows none.
template <class S>
RowBytes bytes_of(const RowSource<S>& source, index_t rows, index_t cols) {
  constexpr index_t kSize = sizeof(S);
  if (source.row_index != nullptr) return {};
  // One row may have any distance from a second that is not there, and its bytes no number.
  const index_t stride = rows > 1 ? source.row_stride * kSize : 0;
  return {reinterpret_cast<std::uintptr_t>(source.data), stride, rows, cols * kSize};
}

// Asks for rows, a line at a time, in the order in which they lie; behind the last for the first line again.
class LinesInOrder {
 public:
  explicit LinesInOrder(const RowBytes& bytes, AskedInto into = AskedInto::kL2)
      : into_(into),
        first_(bytes.first),
        row_(first_),
        at_(first_),
        stride_(static_cast<std::uintptr_t>(bytes.stride)),
        rows_(bytes.rows),
        lines_(ceil_div(bytes.row_bytes, kLineBytes)),
        left_(lines_) {}

  bool any() const { return rows_ > 0; }
  std::uintptr_t line() const { return at_; }  // asked for in the next turn

  AMX_SFT_MOE_INLINE void turn() {
    ask_for_line(at_, into_);
    at_ += step_;
    if (--left_ == 0) next_row();
  }

 private:
  AMX_SFT_MOE_INLINE void next_row() {
    left_ = lines_;
    at_ = row_ += stride_;
    if (--rows_ > 0) return;
    at_ = first_;
    step_ = 0;
  }

  AskedInto into_;
  std::uintptr_t first_, row_, at_;
  std::uintptr_t stride_, step_ = static_cast<std::uintptr_t>(kLineBytes);
  index_t rows_, lines_;
  index_t left_;  // of this row
};

// The same in several passes of as many turns as there are lines: each asks for its share of them, evenly, `share` of `all`.
// Memory that is asked for in the first pass alone has nothing to do in the others (benchmarks/LOG.md, "Shares of all tiles").
class SharedLines {
 public:
  SharedLines(const LinesInOrder& lines, index_t all) : lines_(lines), all_(all) {}

  bool any() const { return lines_.any(); }
  std::uintptr_t line() const { return lines_.line(); }  // asked for next
  void begin_pass(index_t share) { share_ = share; }
  AMX_SFT_MOE_INLINE void turn() {
    credit_ += share_;
    if (credit_ < all_) return;
    credit_ -= all_;
    lines_.turn();
  }

 private:
  LinesInOrder lines_;
  index_t all_, share_ = 0, credit_ = 0;
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
