// Memory that is asked for while something else is multiplied.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Memory that strips to come are made from: of the next `rows` rows of row_bytes, `stride` bytes apart, and as much of the
// one after it, which may be larger or smaller. Hardware prefetchers do not see it coming: its rows lie on different
// pages. Addresses are numbers: of what lies at `later` rows may be asked for that are not there.
struct BytesAhead {
  // Of the strip that is next, all of it there; asked for into L1, or read. 0: there is none, nor rows.
  std::uintptr_t next = 0;
  std::uintptr_t later = 0;  // of one after it, into L2; 0: not asked for
  index_t stride = 0;
  index_t rows = 0;
  index_t row_bytes = 0;
};

// `units` spread evenly over `turns`: after t of them units * t / turns, rounded down, were due.
class Pace {
 public:
  Pace() = default;
  Pace(index_t units, index_t turns) : units_(units), turns_(turns) {}

  // Units that are due in this turn.
  AMX_SFT_MOE_INLINE index_t turn() {
    index_t due = 0;
    for (credit_ += units_; credit_ >= turns_; credit_ -= turns_) ++due;
    return due;
  }

 private:
  index_t units_ = 0;
  index_t turns_ = 1;
  index_t credit_ = 0;
};

inline constexpr index_t kLineBytes = 64, kLinePairBytes = 2 * kLineBytes;
constexpr index_t line_pairs(index_t bytes) {
  return ceil_div(bytes, kLinePairBytes);
}

// Nothing is asked for.
struct NothingAhead {
  AMX_SFT_MOE_INLINE void turn() {}
};

// Asks for rows evenly over the turns of a product, each of some steps along K. A burst would fill the line fill buffers,
// and the product's own loads would wait for one: so not rows, but pairs of cache lines, which hardware fetches together
// anyway. Rows: any() whether one is left, ask(offset) for the line there of the one at hand, next().
template <class Rows>
class EvenPrefetch {
 public:
  EvenPrefetch(const Rows& rows, index_t count, index_t row_bytes)
      : rows_(rows), units_(count * line_pairs(row_bytes)), row_bytes_(row_bytes) {}

  // Before the first of so many turns.
  void spread(index_t turns) { pace_ = Pace(units_, turns); }

  AMX_SFT_MOE_INLINE void turn() {
    for (index_t due = pace_.turn(); due > 0; --due) ask();
  }

 private:
  AMX_SFT_MOE_INLINE void ask() {
    if (!rows_.any()) return;
    const index_t end = std::min(done_ + kLinePairBytes, row_bytes_);
    for (; done_ < end; done_ += kLineBytes) rows_.ask(done_);
    if (done_ < row_bytes_) return;
    done_ = 0;
    rows_.next();
  }

  Rows rows_;
  index_t units_, row_bytes_;
  Pace pace_;
  index_t done_ = 0;  // bytes of this row
};

// The line at an address, into L1 or L2.
template <int kLocality>
AMX_SFT_MOE_INLINE void ask_for_line(std::uintptr_t at) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing is read through it
  __builtin_prefetch(reinterpret_cast<const char*>(at), 0, kLocality);
}

// The rows of the strip that is next, into L1, and with each the same of the one after it, into L2.
class RowsOfNextTwo {
 public:
  explicit RowsOfNextTwo(const BytesAhead& ahead)
      : next_(ahead.next), later_(ahead.later), stride_(static_cast<std::uintptr_t>(ahead.stride)) {}

  static constexpr bool any() { return true; }
  AMX_SFT_MOE_INLINE void ask(index_t offset) const {
    ask_for_line<3>(next_ + static_cast<std::uintptr_t>(offset));
    if (later_ != 0) ask_for_line<2>(later_ + static_cast<std::uintptr_t>(offset));
  }
  AMX_SFT_MOE_INLINE void next() {
    next_ += stride_;
    if (later_ != 0) later_ += stride_;
  }

 private:
  std::uintptr_t next_, later_, stride_;
};

class PacedPrefetch : public EvenPrefetch<RowsOfNextTwo> {
 public:
  explicit PacedPrefetch(const BytesAhead& ahead)
      : EvenPrefetch(RowsOfNextTwo(ahead), ahead.rows, ahead.row_bytes) {}
};

// The rows to be asked for while the next strip is made of its rows [0, rows), into L2: each `lead` rows before its turn,
// those of the strip after it behind the last. The shorter the lead, the fewer lines wait to be read: rows 4 KiB apart
// share few places of L2, and push out one another.
class LeadingRows {
 public:
  LeadingRows(const BytesAhead& ahead, index_t lead)
      : row_(ahead.later), later_(ahead.later), stride_(ahead.stride), left_(ahead.rows) {
    if (lead >= ahead.rows) return;
    row_ = ahead.next + static_cast<std::uintptr_t>(lead * stride_);
    left_ -= lead;
  }

  std::uintptr_t row() const { return row_; }  // 0: none is left
  bool any() const { return row_ != 0; }
  AMX_SFT_MOE_INLINE void ask(index_t offset) const {
    ask_for_line<2>(row_ + static_cast<std::uintptr_t>(offset));
  }
  AMX_SFT_MOE_INLINE void next() {
    if (row_ != 0) row_ = --left_ == 0 ? later_ : row_ + static_cast<std::uintptr_t>(stride_);
  }

 private:
  std::uintptr_t row_, later_;
  index_t stride_;
  index_t left_;  // until `later` follows
};

class LeadingPrefetch : public EvenPrefetch<LeadingRows> {
 public:
  LeadingPrefetch(const BytesAhead& ahead, index_t lead)
      : EvenPrefetch(LeadingRows(ahead, lead), ahead.rows, ahead.row_bytes) {}
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
