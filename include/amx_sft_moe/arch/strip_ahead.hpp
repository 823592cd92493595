// The strip that is next, made while this one is multiplied: between the products of a register tile, whose arithmetic
// leaves the units for loads, permutations and stores idle. Made before its own products instead, a strip takes a tenth of
// their time at 32 rows. The memory of the strip after it is asked for meanwhile.
//
// What an instruction set adds is how one unit is made (avx512/strip_ahead.hpp).
#pragma once

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// A whole strip of E from rows of S, kPairing<E> rows a unit.
template <class S, class E>
class RowsAhead {
 public:
  static bool fits(const BytesAhead& ahead) {
    return ahead.next != 0 && ahead.row_bytes == kStripCols * index_t{sizeof(S)} && ahead.rows >= kAheadDepth &&
           ahead.rows % kPairing<E> == 0;
  }
  RowsAhead(const BytesAhead& ahead, E* strip)
      : prefetch_({0, ahead.later, ahead.stride, ahead.rows, ahead.row_bytes}),
        // NOLINTNEXTLINE(performance-no-int-to-ptr): rows that are there
        row_(reinterpret_cast<const S*>(ahead.next)),
        row_stride_(ahead.stride / index_t{sizeof(S)}),
        units_(ahead.rows / kPairing<E>),
        strip_(strip) {}

  void spread(index_t turns) {
    prefetch_.spread(turns);
    pace_ = Pace(units_, turns);
  }

 protected:
  AMX_SFT_MOE_INLINE index_t due() {
    prefetch_.turn();
    return pace_.turn();
  }
  // The rows of the unit that is due, and where it goes.
  AMX_SFT_MOE_INLINE const S* row(index_t i) const { return row_ + i * row_stride_; }
  AMX_SFT_MOE_INLINE E* out() const { return strip_; }
  AMX_SFT_MOE_INLINE void next_unit() {
    row_ += kPairing<E> * row_stride_;
    strip_ += kPairing<E> * kStripCols;
  }

 private:
  PacedPrefetch prefetch_;
  Pace pace_;
  const S* row_;
  index_t row_stride_;
  index_t units_;
  E* strip_;
};

// A whole strip of E from rows of S that are its columns, 8 of them a unit, 32 bytes of each.
template <class S, class E>
class ColumnsAhead {
 public:
  static bool fits(const BytesAhead& ahead) {
    return ahead.next != 0 && ahead.rows == kStripCols && ahead.row_bytes >= kAheadDepth * index_t{sizeof(S)} &&
           ahead.row_bytes % kUnitBytes == 0;
  }
  ColumnsAhead(const BytesAhead& ahead, E* strip)
      : prefetch_({0, ahead.later, ahead.stride, ahead.rows, ahead.row_bytes}),
        // NOLINTNEXTLINE(performance-no-int-to-ptr): rows that are there
        row_(reinterpret_cast<const S*>(ahead.next)),
        row_stride_(ahead.stride / index_t{sizeof(S)}),
        depth_(ahead.row_bytes / index_t{sizeof(S)}),
        strip_(strip) {}

  void spread(index_t turns) {
    prefetch_.spread(turns);
    pace_ = Pace(kStripCols / kUnitRows * (depth_ / kUnitDepth), turns);
  }

 protected:
  AMX_SFT_MOE_INLINE index_t due() {
    prefetch_.turn();
    return pace_.turn();
  }
  // The unit that is due: its rows from element `k` of them on, and where that element of the first goes.
  AMX_SFT_MOE_INLINE const S* row(index_t i, index_t k) const { return row_ + i * row_stride_ + k_ + k; }
  AMX_SFT_MOE_INLINE E* out(index_t k) const { return strip_ + (k_ + k) * kStripCols; }
  AMX_SFT_MOE_INLINE void next_unit() {
    k_ += kUnitDepth;
    if (k_ < depth_) return;
    k_ = 0;
    row_ += kUnitRows * row_stride_;
    strip_ += kUnitRows * kPairing<E>;
  }

 private:
  static constexpr index_t kUnitRows = 8, kUnitBytes = 32;
  static constexpr index_t kUnitDepth = kUnitBytes / index_t{sizeof(S)};

  PacedPrefetch prefetch_;
  Pace pace_;
  const S* row_;
  index_t row_stride_;
  index_t depth_;  // elements along K
  index_t k_ = 0;
  E* strip_;
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
