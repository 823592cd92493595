// Pages of rows to come, translated many at a time. A line that is asked for on a page that no TLB knows can't retire, nor
// can what follows it, until the page's entry has been read; a core's queue of loads is full before that. Asked for one
// right after the other, pages are looked up side by side. One by one, those of W in pages of 4 KiB took a tenth of the
// time of the loop of gemm_nt with 16 tokens (benchmarks/LOG.md, "Pages translated together"). Not where the CPU goes on
// meanwhile ("Pages one by one").
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx_sft_moe/arch/of_this_cpu.hpp"
#include "amx_sft_moe/arch/row_bytes.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

inline constexpr index_t kPagesTogether = 32;

// f(address) once for each page of rows [row, row + count): adjacent ones are one run of pages.
template <class F>
void for_each_page(const RowBytes& bytes, index_t row, index_t count, F&& f) {
  constexpr auto kPage = static_cast<std::uintptr_t>(kPageBytes);
  const index_t pieces = bytes.adjacent() ? std::min<index_t>(count, 1) : count;
  const index_t length = bytes.adjacent() ? (count - 1) * bytes.stride + bytes.row_bytes : bytes.row_bytes;
  for (index_t i = 0; i < pieces; ++i) {
    std::uintptr_t at = bytes.first + static_cast<std::uintptr_t>((row + i) * bytes.stride);
    const std::uintptr_t end = at + static_cast<std::uintptr_t>(std::max<index_t>(length, 0));
    for (; at < end; at = (at | (kPage - 1)) + 1) f(at);
  }
}

// Asks for a line of each page of rows [row, row + count), into L2. By `volatile` asm: GCC sees no effect in a function of
// nothing but __builtin_prefetch, and leaves its calls out.
inline void translate(const RowBytes& bytes, index_t row, index_t count) {
  for_each_page(bytes, row, count, [](std::uintptr_t page) {
    __asm__ volatile("prefetcht1 (%0)" : : "r"(page));
  });
}

class PagesAhead {
 public:
  struct Due {
    index_t row = 0, count = 0;
  };

  // For rows that are asked for in order, at most `step` of them from one before() to the next. None of them is due where they
  // are not translated together.
  PagesAhead(const RowBytes& bytes, index_t step, bool together = translates_together())
      : bytes_(together ? bytes : RowBytes{}), step_(step) {
    const index_t row = bytes.adjacent() ? bytes.stride : round_up(bytes.row_bytes, kPageBytes);
    together_ = std::max(kPagesTogether * kPageBytes / std::max<index_t>(row, 1), step);
  }

  // Rows from `row` on are asked for next.
  void before(index_t row) {
    if (const Due now = due(row); now.count > 0) translate(bytes_, now.row, now.count);
  }

  // What is translated now.
  Due due(index_t row) {
    const index_t first = std::max(row, done_);
    if (row + step_ <= done_ || first >= bytes_.rows) return {};
    done_ = std::min(first + together_, bytes_.rows);
    return {first, done_ - first};
  }

 private:
  RowBytes bytes_;
  index_t step_;
  index_t together_ = 1;
  index_t done_ = 0;  // rows before it
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
