// What products do one way on some CPUs and another way on others, with the same bits. Asked of the CPU once.
#pragma once

#include <unistd.h>

#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/cpu_features.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// Whether rows to come are asked for in the order in which they lie: memory is the faster the less it jumps (benchmarks/LOG.md,
// "Zen 5"). Else side by side, as they are read, which hardware follows ("Rows side by side, for Intel").
inline bool asks_in_order() {
  static const bool in_order = !read_cpu_features().follows_rows;
  return in_order;
}

// What rows of weights to come are asked for into where they are read as they lie and asked for in order, but for DotBlocks.
// Strips, and pages to be translated, gain nothing by L1 (benchmarks/LOG.md, "Requests that are lost").
inline AskedInto rows_asked_into() {
  static const AskedInto into = read_cpu_features().loses_requests ? AskedInto::kL1 : AskedInto::kL2;
  return into;
}

// Whether pages of rows to come are translated many at a time (arch/pages_ahead.hpp). Else each is by what asks for its first
// line.
inline bool translates_together() {
  static const bool together = !read_cpu_features().hides_page_walks;
  return together;
}

// Whether a strip of floats leaves room in L1 for what passes by it: Intel's CPUs since Ice Lake have 48 KiB. Measured on
// Emerald Rapids ("Strips of floats, again"), on none of AMD's.
inline bool roomy_l1() {
#ifdef _SC_LEVEL1_DCACHE_SIZE  // glibc's
  static const bool roomy =
      read_cpu_features().follows_rows && sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 3 * kStripBytes / 2;
  return roomy;
#else
  return false;
#endif
}

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
