// Memory that is asked for while something else is multiplied.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// What may lie behind a row's end, and behind all memory that there is: a number until it is asked for.
inline const char* bytes_behind(const void* from, index_t bytes) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing is read through it
  return reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) +
                                       static_cast<std::uintptr_t>(bytes));
}

// Memory that strips to come are made from: of the next `rows` rows of row_bytes, `stride` bytes apart, and as much of what
// comes after it, which may be larger or smaller. Hardware prefetchers do not see it coming: its rows lie on different
// pages. Addresses are numbers: of what lies at `later` rows may be asked for that are not there.
struct BytesAhead {
  // Of what is next, all of it there; asked for, or read. 0: there is none, nor rows.
  std::uintptr_t next = 0;
  std::uintptr_t later = 0;  // of one after it; 0: not asked for
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

// The nearest cache that a line is asked for into; what leaves L1 is in L2 then.
enum class AskedInto : std::uint8_t { kL2, kL1 };

// The line at an address.
AMX_SFT_MOE_INLINE void ask_for_line(std::uintptr_t at, AskedInto into = AskedInto::kL2) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing is read through it
  const auto* line = reinterpret_cast<const char*>(at);
  into == AskedInto::kL1 ? __builtin_prefetch(line, 0, 3) : __builtin_prefetch(line, 0, 2);
}

// `units` spread over `turns` so that a turn takes the same way as the one before: as many each time, one more in the first
// ones, or one in every few turns; never more than twice as fast as evenly. Of units that come and go a CPU expects the
// wrong ones, which takes longer than to ask for memory: a sixth of a product of 24 rows (benchmarks/LOG.md, "Strips of bf16
// for floats").
class SteadyPace {
 public:
  SteadyPace() = default;
  SteadyPace(index_t units, index_t turns) {
    every_ = wait_ = units > 0 ? std::max<index_t>(turns / units, 1) : turns + 1;
    const index_t taken = std::max<index_t>(turns / every_, 1);
    each_ = units / taken;
    more_ = units % taken;
  }

  // Units that are due in this turn.
  AMX_SFT_MOE_INLINE index_t turn() {
    if (--wait_ > 0) return 0;
    wait_ = every_;
    return each_ + (more_-- > 0 ? 1 : 0);
  }

 private:
  index_t every_ = 1, wait_ = 1;  // of turns
  index_t each_ = 0, more_ = 0;   // units a time, and how often one more
};

// Asks for the rows of the strip that is next over the turns of a product, row by row, by pairs of lines, into L2.
class PacedPrefetch {
 public:
  explicit PacedPrefetch(const BytesAhead& ahead)
      : row_(ahead.next),
        stride_(static_cast<std::uintptr_t>(ahead.stride)),
        row_bytes_(ahead.row_bytes),
        units_(ahead.rows * line_pairs(ahead.row_bytes)) {}

  // Before the first of so many turns.
  void spread(index_t turns) { pace_ = SteadyPace(units_, turns); }

  AMX_SFT_MOE_INLINE void turn() {
    for (index_t due = pace_.turn(); due > 0; --due) ask();
  }

 private:
  AMX_SFT_MOE_INLINE void ask() {
    const index_t second = done_ + kLineBytes < row_bytes_ ? done_ + kLineBytes : done_;
    ask_for_line(row_ + static_cast<std::uintptr_t>(done_));
    ask_for_line(row_ + static_cast<std::uintptr_t>(second));
    done_ += kLinePairBytes;
    if (done_ < row_bytes_) return;
    done_ = 0;
    row_ += stride_;
  }

  std::uintptr_t row_, stride_;
  index_t row_bytes_, units_;
  SteadyPace pace_;
  index_t done_ = 0;  // bytes of this row
};

// The rows to be asked for while the next strip is made of its rows [0, rows): each `lead` rows before its turn,
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
  AMX_SFT_MOE_INLINE void ask(index_t offset, AskedInto into = AskedInto::kL2) const {
    ask_for_line(row_ + static_cast<std::uintptr_t>(offset), into);
  }
  AMX_SFT_MOE_INLINE void next() {
    if (row_ != 0) row_ = --left_ == 0 ? later_ : row_ + static_cast<std::uintptr_t>(stride_);
  }

 private:
  std::uintptr_t row_, later_;
  index_t stride_;
  index_t left_;  // until `later` follows
};

// Asks for them evenly over the turns of a product, each of some steps along K. A burst would fill the line fill buffers, and
// the product's own loads would wait for one: so not rows, but pairs of cache lines, which hardware fetches together anyway.
class LeadingPrefetch {
 public:
  LeadingPrefetch(const BytesAhead& ahead, index_t lead, AskedInto into)
      : rows_(ahead, lead),
        units_(ahead.rows * line_pairs(ahead.row_bytes)),
        row_bytes_(ahead.row_bytes),
        into_(into) {}

  // Before the first of so many turns.
  void spread(index_t turns) { pace_ = Pace(units_, turns); }

  AMX_SFT_MOE_INLINE void turn() {
    for (index_t due = pace_.turn(); due > 0; --due) ask();
  }

 private:
  AMX_SFT_MOE_INLINE void ask() {
    if (!rows_.any()) return;
    const index_t end = std::min(done_ + kLinePairBytes, row_bytes_);
    for (; done_ < end; done_ += kLineBytes) rows_.ask(done_, into_);
    if (done_ < row_bytes_) return;
    done_ = 0;
    rows_.next();
  }

  LeadingRows rows_;
  index_t units_, row_bytes_;
  AskedInto into_;
  Pace pace_;
  index_t done_ = 0;  // bytes of this row
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
