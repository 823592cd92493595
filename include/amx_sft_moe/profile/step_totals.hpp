// Sums over many passes, for those who report now and then.
#pragma once

#include "amx_sft_moe/profile/step_record.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Of passes of one kind, of one operator or of many.
struct StepTotals {
  std::int64_t passes = 0;
  std::int64_t tokens = 0;
  std::int64_t routed_rows = 0;
  double total_ms = 0;
  double busy_ms = 0;     // of all threads
  double waiting_ms = 0;  // of all threads, in parallel regions
  PhaseTimes times;
  StepWork work;

  void add(const StepRecord& record) {
    if (record.empty()) return;
    ++passes;
    tokens += record.tokens;
    routed_rows += record.routed_rows;
    total_ms += record.total_ms();
    const PhaseTimes of_record = record.times();
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      times.ms[p] += of_record.ms[p];
      work.add(static_cast<Phase>(p), record.work.flop[p], record.work.bytes[p]);
    }
    for (const RegionRecord& region : record.regions()) {
      for (const ThreadRecord& thread : region.threads) {
        if (thread.begin_ns == 0) continue;
        for (const std::int64_t ns : thread.busy_ns) busy_ms += static_cast<double>(ns) * 1e-6;
        if (region.parallel) waiting_ms += static_cast<double>(region.end_ns - thread.end_ns) * 1e-6;
      }
    }
  }
};

AMX_SFT_MOE_NAMESPACE_END
