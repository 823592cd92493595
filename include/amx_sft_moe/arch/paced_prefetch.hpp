// Memory that is asked for while something else is multiplied.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Memory that strips to come are made from: of each, `rows` rows of row_bytes, `stride` bytes apart. Hardware
// prefetchers do not see it coming: its rows lie on different pages. Addresses are numbers: `later` may be that of nothing,
// behind a matrix's last row.
struct BytesAhead {
  std::uintptr_t next =
      0;  // of the strip that is next, all of it there; asked for into L1, or read. 0: there is none, nor rows
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

// Asks for that memory evenly over the turns of a product, each of some steps along K. A burst would fill the line fill
// buffers, and the product's own loads would wait for one: so not rows, but pairs of cache lines, which hardware fetches
// together anyway.
class PacedPrefetch {
 public:
  explicit PacedPrefetch(const BytesAhead& ahead) : ahead_(ahead) {}

  // Before the first of so many turns.
  void spread(index_t turns) { pace_ = Pace(ahead_.rows * line_pairs(ahead_.row_bytes), turns); }

  AMX_SFT_MOE_INLINE void turn() {
    for (index_t due = pace_.turn(); due > 0; --due) ask();
  }

 private:
  AMX_SFT_MOE_INLINE void ask() {
    const index_t end = std::min(done_ + kLinePairBytes, ahead_.row_bytes);
    for (; done_ < end; done_ += kLineBytes) {
      // NOLINTBEGIN(performance-no-int-to-ptr): nothing is read through them
      __builtin_prefetch(reinterpret_cast<const char*>(ahead_.next) + done_, 0, 3);
      if (ahead_.later != 0) __builtin_prefetch(reinterpret_cast<const char*>(ahead_.later) + done_, 0, 2);
      // NOLINTEND(performance-no-int-to-ptr)
    }
    if (done_ < ahead_.row_bytes) return;
    done_ = 0;
    const auto stride = static_cast<std::uintptr_t>(ahead_.stride);
    ahead_.next += stride;
    if (ahead_.later != 0) ahead_.later += stride;
  }

  BytesAhead ahead_;
  Pace pace_;
  index_t done_ = 0;  // bytes of this row
};

// The rows to be asked for while the next strip is made of its rows [0, rows): each `lead` rows before its turn, those of
// the strip after it behind the last.
class LeadingRows {
 public:
  LeadingRows(const BytesAhead& ahead, index_t lead)
      : row_(ahead.later), later_(ahead.later), stride_(ahead.stride), left_(ahead.rows) {
    if (lead >= ahead.rows) return;
    row_ = ahead.next + static_cast<std::uintptr_t>(lead * stride_);
    left_ -= lead;
  }

  std::uintptr_t row() const { return row_; }  // 0: none is left
  AMX_SFT_MOE_INLINE void next() {
    if (row_ != 0) row_ = --left_ == 0 ? later_ : row_ + static_cast<std::uintptr_t>(stride_);
  }

 private:
  std::uintptr_t row_, later_;
  index_t stride_;
  index_t left_;  // until `later` follows
};

// Asks for them, into L2, evenly over the turns. The shorter the lead, the fewer lines wait to be read: rows 4 KiB apart
// share few places of L2, and push out one another.
class LeadingPrefetch {
 public:
  LeadingPrefetch(const BytesAhead& ahead, index_t lead)
      : rows_(ahead, lead), units_(ahead.rows * line_pairs(ahead.row_bytes)), row_bytes_(ahead.row_bytes) {}

  // Before the first of so many turns.
  void spread(index_t turns) { pace_ = Pace(units_, turns); }

  AMX_SFT_MOE_INLINE void turn() {
    for (index_t due = pace_.turn(); due > 0; --due) ask();
  }

 private:
  AMX_SFT_MOE_INLINE void ask() {
    if (rows_.row() == 0) return;
    const index_t end = std::min(done_ + kLinePairBytes, row_bytes_);
    for (; done_ < end; done_ += kLineBytes) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing is read through it
      __builtin_prefetch(reinterpret_cast<const char*>(rows_.row()) + done_, 0, 2);
    }
    if (done_ < row_bytes_) return;
    done_ = 0;
    rows_.next();
  }

  LeadingRows rows_;
  index_t units_, row_bytes_;
  Pace pace_;
  index_t done_ = 0;  // bytes of this row
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
