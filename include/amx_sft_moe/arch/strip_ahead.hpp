// The strip that is next, made while this one is multiplied: between the products of a register tile, whose arithmetic
// leaves the units for loads, permutations and stores idle. Made before its own products instead, a strip takes a tenth of
// their time at 32 rows. The memory that it and the strip after it are made from is asked for meanwhile.
//
// What an instruction set adds is how one unit is made (avx512/strip_ahead.hpp): in turn(), as often as due() says.
#pragma once

#include <algorithm>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// From bf16 to strips of bf16. The whole strip is there after as many turns as spread() was told, and not before.
class StripAhead {
 public:
  void spread(index_t turns) {
    asked_.spread(turns);
    paced_ = Pace(units_, turns);
  }

 protected:
  StripAhead(const BytesAhead& ahead, index_t lead, index_t units, bf16* strip)
      : asked_(ahead, lead), units_(units), from_(ahead.next), stride_(ahead.stride), out_(strip) {}

  AMX_SFT_MOE_INLINE index_t due() {
    asked_.turn();
    return paced_.turn();
  }
  // Row i of those that the unit at hand is made from.
  AMX_SFT_MOE_INLINE const bf16* row(index_t i) const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): rows that are there
    return reinterpret_cast<const bf16*>(from_ + static_cast<std::uintptr_t>(i * stride_));
  }
  AMX_SFT_MOE_INLINE bf16* out() const { return out_; }
  // On by so many rows, bytes of each, and elements of the strip.
  AMX_SFT_MOE_INLINE void move(index_t rows, index_t bytes, index_t elements) {
    from_ += static_cast<std::uintptr_t>(rows * stride_ + bytes);
    out_ += elements;
  }

 private:
  LeadingPrefetch asked_;
  Pace paced_;
  index_t units_;
  std::uintptr_t from_;  // a number: after the last unit it is that of nothing
  index_t stride_;       // bytes
  bf16* out_;
};

// A whole strip from rows of B, kPairing<bf16> rows a unit.
class RowsAhead : public StripAhead {
 public:
  static constexpr index_t kStep = kPairing<bf16>;  // a strip's depth is a multiple of it
  static constexpr index_t most_depth(index_t rows) {
    return rows < kRowsOfDeepStrips ? kStripDepth<bf16> : kMostAheadDepth;
  }

  static bool fits(const BytesAhead& ahead) {
    return ahead.next != 0 && ahead.row_bytes == kStripCols * index_t{sizeof(bf16)} &&
           ahead.rows >= kAheadDepth && ahead.rows % kStep == 0;
  }
  // For a product of `rows` rows of A.
  RowsAhead(const BytesAhead& ahead, index_t rows, bf16* strip)
      : StripAhead(ahead, std::max(kLeadProducts / rows, kLeastLead), ahead.rows / kPairing<bf16>, strip) {}

 protected:
  AMX_SFT_MOE_INLINE void next_unit() { move(kPairing<bf16>, 0, kPairing<bf16> * kStripCols); }
};

// A whole strip from rows that are its columns. A unit is 32 bytes of 8 of them; more at once holds up the products that
// follow. Two units make a cache line of each row, and the next two the same line of the 8 rows beside: so a line of the
// strip, of 16 columns, is written within four units, while it is in L1 (benchmarks/LOG.md, "Zen 5").
class ColumnsAhead : public StripAhead {
  static constexpr index_t kUnitRows = 8, kUnitBytes = 32;
  static constexpr index_t kLine = kLineBytes / index_t{sizeof(bf16)};  // elements of a row

 public:
  static constexpr index_t kStep = kLine;  // a strip's depth is a multiple of it
  static constexpr index_t most_depth(index_t) { return kMostAheadDepth; }

  static bool fits(const BytesAhead& ahead) {
    return ahead.next != 0 && ahead.rows == kStripCols &&
           ahead.row_bytes >= kAheadDepth * index_t{sizeof(bf16)} && ahead.row_bytes % kLineBytes == 0;
  }
  ColumnsAhead(const BytesAhead& ahead, index_t rows, bf16* strip)
      : StripAhead(ahead, lead(ahead, rows), kStripCols / kUnitRows * (ahead.row_bytes / kUnitBytes), strip),
        along_k_(ahead.row_bytes / kLineBytes),
        left_(along_k_) {}

 protected:
  // Its rows are long, and eight of them are read side by side: those eight, and as many more as give memory the time
  // that RowsAhead gives it.
  static index_t lead(const BytesAhead& ahead, index_t rows) {
    const index_t products = rows * kUnitRows * ahead.row_bytes / index_t{sizeof(bf16)};
    return kUnitRows * (1 + ceil_div(kLeadProducts * kStripCols, products));
  }

  AMX_SFT_MOE_INLINE void next_unit() {
    constexpr index_t kUnitsALine = kLineBytes / kUnitBytes;
    constexpr index_t kAlong = kLine / kUnitsALine * kStripCols;  // elements of the strip, a unit along K
    constexpr index_t kBeside = kUnitRows * kPairing<bf16>;       // the next rows
    unit_ = (unit_ + 1) % (2 * kUnitsALine);
    if (unit_ % kUnitsALine != 0) return move(0, kUnitBytes, kAlong);
    constexpr index_t kBack = (kUnitsALine - 1) * kUnitBytes;
    if (unit_ != 0) return move(kUnitRows, -kBack, kBeside - (kUnitsALine - 1) * kAlong);
    move(-kUnitRows, kUnitBytes, kAlong - kBeside);
    if (--left_ > 0) return;
    left_ = along_k_;
    move(2 * kUnitRows, -along_k_ * kLineBytes, 2 * kBeside - along_k_ * kLine * kStripCols);
  }

 private:
  index_t unit_ = 0;        // of the four
  index_t along_k_, left_;  // lines
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
