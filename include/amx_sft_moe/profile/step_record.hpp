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
#include "amx_sft_moe/profile/work.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Consecutive tasks of one phase on one thread.
struct Span {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int32_t tasks = 0;
  Phase phase = Phase::kCount;
};

// One thread's part in one parallel region, nanoseconds of std::chrono::steady_clock.
struct ThreadRecord {
  std::int64_t begin_ns = 0;                        // when the thread entered the region; 0: it never did
  std::int64_t end_ns = 0;                          // when it ran out of work
  std::array<std::int64_t, kPhaseCount> busy_ns{};  // its time per phase
  std::array<std::int64_t, kPhaseCount> tasks{};    // its tasks per phase
  std::size_t spans = 0;                            // of RegionRecord::spans_of
  std::int64_t spans_dropped = 0;                   // for which there was no room
};

// One parallel region: `threads` has a slot per thread of the team. Waiting of a thread is end_ns - its own
// end_ns. A region begins where the one before it ended: making its list of tasks belongs to it.
struct RegionRecord {
  PhaseGroup group = PhaseGroup::kForwardGather;
  bool parallel = true;  // false: work of the calling thread alone, without a synchronisation point
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<ThreadRecord> threads;
  std::vector<Span> span_slots;      // [threads, spans_per_thread]
  std::size_t spans_per_thread = 0;  // 0: not recorded

  // What `thread` did, in order and without gaps; empty where spans are not recorded.
  std::span<const Span> spans_of(std::size_t thread) const {
    return {span_slots.data() + thread * spans_per_thread, threads[thread].spans};
  }
};

// Wall milliseconds of each phase, up to its slowest thread. A region that several kinds of work share is
// divided among them in proportion to the threads' busy time, so that phases sum to the regions' wall time.
struct PhaseTimes {
  std::array<double, kPhaseCount> ms{};

  double phase_ms(Phase phase) const { return ms[static_cast<std::size_t>(phase)]; }
  double group_ms(PhaseGroup group) const {
    double total = 0;
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (kPhases[p].group == group) total += ms[p];
    }
    return total;
  }
};

class StepRecord {
 public:
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t index = -1;  // of this pass among those of its kind on this operator, from 0
  index_t tokens = 0;       // T of the call
  index_t routed_rows = 0;  // S
  int threads = 0;          // asked for; a team of OpenMP's may have been smaller, see ThreadRecord::begin_ns
  bool wants_spans = false;
  StepWork work;

  // Of a record that was moved from: none.
  std::span<const RegionRecord> regions() const { return {regions_.data(), std::min(used_, regions_.size())}; }
  std::size_t sync_points() const {
    return static_cast<std::size_t>(
        std::count_if(regions().begin(), regions().end(), [](const RegionRecord& r) { return r.parallel; }));
  }
  // No pass has ended yet, or the last one that began was left by an exception.
  bool empty() const { return begin_ns == 0; }
  double total_ms() const { return static_cast<double>(end_ns - begin_ns) * 1e-6; }

  PhaseTimes times() const {
    PhaseTimes result;
    for (const RegionRecord& region : regions()) {
      std::array<std::int64_t, kPhaseCount> busy{};
      std::int64_t all = 0;
      for (const ThreadRecord& thread : region.threads) {
        for (std::size_t p = 0; p < kPhaseCount; ++p) busy[p] += thread.busy_ns[p];
      }
      for (const std::int64_t ns : busy) all += ns;
      const auto wall = static_cast<double>(region.end_ns - region.begin_ns) * 1e-6;
      for (std::size_t p = 0; p < kPhaseCount && all > 0; ++p) {
        result.ms[p] += wall * static_cast<double>(busy[p]) / static_cast<double>(all);
      }
    }
    return result;
  }
  double phase_ms(Phase phase) const { return times().phase_ms(phase); }
  double group_ms(PhaseGroup group) const { return times().group_ms(group); }

  // For the recorder: of no pass, but for the count of those before. Keeps the memory of earlier steps.
  void clear() {
    used_ = 0;
    begin_ns = end_ns = 0;
    tokens = routed_rows = 0;
    threads = 0;
    work = {};
  }
  // With room for as many spans as `tasks` tasks make when they are shared out evenly, and as many again: the
  // size depends on the work alone, so that the same step allocates nothing the next time. Without memory for it
  // there is no such region.
  RegionRecord& add_region(PhaseGroup group, std::size_t team, std::size_t tasks) {
    if (used_ == regions_.size()) regions_.emplace_back();
    RegionRecord& region = regions_[used_];
    region.group = group;
    region.parallel = true;
    region.threads.assign(std::max(team, region.threads.size()), ThreadRecord{});
    region.spans_per_thread = 0;
    if (wants_spans) {
      region.spans_per_thread = std::min(kMostSpans, 2 * kPhasesPerTask * (tasks / team + 1));
      region.span_slots.resize(
          std::max(region.span_slots.size(), region.threads.size() * region.spans_per_thread));
    }
    ++used_;
    return region;
  }

  static constexpr std::size_t kPhasesPerTask = 3;  // the activation's backward and two LoRA products
  static constexpr std::size_t kMostSpans = 8192;   // of one thread in one region: 192 KiB

 private:
  std::vector<RegionRecord> regions_;
  std::size_t used_ = 0;
};

AMX_SFT_MOE_NAMESPACE_END
