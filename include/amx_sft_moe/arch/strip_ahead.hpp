// The strip that is next, made while this one is multiplied: between the products of a register tile, whose arithmetic
// leaves the units for loads, permutations and stores idle. Made before its own products instead, a strip takes a tenth of
// their time at 32 rows. The memory that it and the strip after it are made from is asked for meanwhile.
//
// What an instruction set adds is how one unit is made (avx512/strip_ahead.hpp): in turn(), as often as due() says.
#pragma once

#include <algorithm>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/intrinsics.hpp"
#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// A whole strip of bf16 from rows of B, kPairing<bf16> rows a unit. It is there after as many turns as spread() was told,
// and not before.
class RowsAhead {
 public:
  static constexpr index_t kStep = kPairing<bf16>;  // a strip's depth is a multiple of it
  static constexpr index_t kRowBytes = kStripCols * index_t{sizeof(bf16)};
  static constexpr index_t most_depth(index_t rows) {
    return rows < kRowsOfDeepStrips ? kStripDepth<bf16> : kMostAheadDepth;
  }

  static bool fits(const BytesAhead& ahead) {
    return ahead.next != 0 && ahead.row_bytes == kRowBytes && ahead.rows >= kAheadDepth &&
           ahead.rows % kStep == 0;
  }
  // For a product of `rows` rows of A.
  RowsAhead(const BytesAhead& ahead, index_t rows, bf16* strip)
      : asked_(ahead, std::max(kLeadProducts / rows, kLeastLead)),
        units_(ahead.rows / kStep),
        from_(ahead.next),
        stride_(ahead.stride),
        out_(strip) {}

  void spread(index_t turns) { paced_ = Pace(units_, turns); }

 protected:
  AMX_SFT_MOE_INLINE index_t due() { return paced_.turn(); }
  // Row i of those that the unit at hand is made from.
  AMX_SFT_MOE_INLINE const bf16* row(index_t i) const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): rows that are there
    return reinterpret_cast<const bf16*>(from_ + static_cast<std::uintptr_t>(i * stride_));
  }
  AMX_SFT_MOE_INLINE bf16* out() const { return out_; }
  // With as many rows asked for as have been made: a pace of their own took a twentieth of the time of 16 rows of A
  // (benchmarks/LOG.md, "One pace").
  AMX_SFT_MOE_INLINE void next_unit() {
    from_ += static_cast<std::uintptr_t>(kStep * stride_);
    out_ += kStep * kStripCols;
    for (index_t i = 0; i < kStep && asked_.any(); ++i, asked_.next()) {
      AMX_SFT_MOE_UNROLL
      for (index_t at = 0; at < kRowBytes; at += kLineBytes) asked_.ask(at);
    }
  }

 private:
  LeadingRows asked_;
  Pace paced_;
  index_t units_;
  std::uintptr_t from_;  // a number: after the last unit it is that of nothing
  index_t stride_;       // bytes
  bf16* out_;
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
