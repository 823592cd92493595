// The record of one forward or backward: what each thread did and when. Written by the operator without locks
// (each thread its own slots), read after the call.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "amx_sft_moe/core/element.hpp"
#include "amx_sft_moe/profile/phases.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// One thread's part in one parallel region, nanoseconds of std::chrono::steady_clock.
struct ThreadRecord {
  std::int64_t begin_ns = 0;                        // when the thread entered the region; 0: it never did
  std::int64_t end_ns = 0;                          // when it ran out of work
  std::array<std::int64_t, kPhaseCount> busy_ns{};  // its time per phase
  std::array<std::int64_t, kPhaseCount> tasks{};    // its tasks per phase
};

// One parallel region: `threads` has a slot per thread of the team. Waiting of a thread is end_ns - its own
// end_ns.
struct RegionRecord {
  PhaseGroup group = PhaseGroup::kForwardGather;
  bool parallel = true;  // false: work of the calling thread alone, without a synchronisation point
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<ThreadRecord> threads;
};

class StepRecord {
 public:
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  index_t tokens = 0;       // T of the call
  index_t routed_rows = 0;  // S

  std::span<const RegionRecord> regions() const { return {regions_.data(), used_}; }
  std::size_t sync_points() const {
    return static_cast<std::size_t>(
        std::count_if(regions().begin(), regions().end(), [](const RegionRecord& r) { return r.parallel; }));
  }
  bool empty() const { return begin_ns == 0; }
  double total_ms() const { return static_cast<double>(end_ns - begin_ns) * 1e-6; }

  // Wall time of a phase, up to its slowest thread. A region that several kinds of work share is divided among
  // them in proportion to the threads' busy time, so that phases sum to the regions' wall time.
  double phase_ms(Phase phase) const {
    double total = 0;
    for (const RegionRecord& region : regions()) {
      std::int64_t all = 0;
      std::int64_t mine = 0;
      for (const ThreadRecord& thread : region.threads) {
        for (std::int64_t busy : thread.busy_ns) all += busy;
        mine += thread.busy_ns[static_cast<std::size_t>(phase)];
      }
      if (mine > 0) {
        total += static_cast<double>(region.end_ns - region.begin_ns) * static_cast<double>(mine) /
                 static_cast<double>(all);
      }
    }
    return total * 1e-6;
  }

  double group_ms(PhaseGroup group) const {
    double total = 0;
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (kPhases[p].group == group) total += phase_ms(static_cast<Phase>(p));
    }
    return total;
  }

  // For the recorder: starts over, keeping the memory of earlier steps.
  void restart() {
    used_ = 0;
    begin_ns = end_ns = 0;
    tokens = routed_rows = 0;
  }
  RegionRecord& add_region(PhaseGroup group, std::size_t threads) {
    if (used_ == regions_.size()) regions_.emplace_back();
    RegionRecord& region = regions_[used_++];
    region.group = group;
    region.parallel = true;
    region.threads.assign(std::max(threads, region.threads.size()), ThreadRecord{});
    return region;
  }

 private:
  std::vector<RegionRecord> regions_;
  std::size_t used_ = 0;
};

AMX_SFT_MOE_NAMESPACE_END
