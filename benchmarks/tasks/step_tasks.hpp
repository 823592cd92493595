// The operator's own task lists: an observer that copies the list of each region from the workspace when the region
// begins, and what the region counted when it ends.
#pragma once

#include <array>
#include <ctime>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "counting_kernel.hpp"

namespace bench {

// A task as it was listed. Experts without rows: rows 0.
struct ListedTask {
  int kind;
  int group;
  amx_sft_moe::index_t expert, expert_rows;
  amx_sft_moe::index_t row, rows, col, cols;
};

// What the calling thread did in a phase of a region. Its time is the processor's: the machine may be shared.
struct PhaseDone {
  TileCounts counts;
  std::int64_t cpu_ns = 0;
};

struct ListedRegion {
  std::string_view name;
  std::vector<ListedTask> tasks;
  std::vector<std::pair<amx_sft_moe::Phase, PhaseDone>> phases;
};

inline std::int64_t thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * std::int64_t{1000000000} + now.tv_nsec;
}

// Regions of a forward and of a backward in order (moe/forward.hpp, moe/backward.hpp).
inline constexpr std::array<std::string_view, 9> kRegionNames{
    "gather",    "gate_up",         "down",         "sum_tokens",     "scatter",
    "grad_down", "grad_activation", "grad_gate_up", "grad_sum_tokens"};

class StepTasks final : public amx_sft_moe::StepObserver {
 public:
  // Counts as they stand, of the counting kernel or of the emulator.
  using ReadCounts = std::function<TileCounts()>;

  StepTasks(const amx_sft_moe::Workspace& workspace, ReadCounts read)
      : workspace_(workspace), read_(std::move(read)) {}

  void group_begins(amx_sft_moe::PhaseGroup) noexcept override {
    ListedRegion region;
    region.name = regions_.size() < kRegionNames.size() ? kRegionNames[regions_.size()] : "?";
    for (const amx_sft_moe::moe::Task& task : workspace_.tasks) {
      const bool routed = task.expert != nullptr;
      region.tasks.push_back({task.kind, task.group, routed ? task.expert->expert : task.idle_expert,
                              routed ? task.expert->rows : 0, task.row, task.rows, task.col, task.cols});
    }
    regions_.push_back(std::move(region));
  }
  void phase_begins(amx_sft_moe::Phase phase) noexcept override {
    phase_ = phase;
    at_begin_ = read_();
    began_ns_ = thread_cpu_ns();
  }
  void phase_ends() noexcept override {
    const std::int64_t ns = thread_cpu_ns() - began_ns_;
    PhaseDone& done = done_in(phase_);
    done.cpu_ns += ns;
    done.counts += read_() - at_begin_;
  }
  void group_ends() noexcept override {}

  const std::vector<ListedRegion>& regions() const { return regions_; }

 private:
  PhaseDone& done_in(amx_sft_moe::Phase phase) {
    auto& phases = regions_.back().phases;
    for (auto& [known, done] : phases) {
      if (known == phase) return done;
    }
    return phases.emplace_back(phase, PhaseDone{}).second;
  }

  const amx_sft_moe::Workspace& workspace_;
  ReadCounts read_;
  std::vector<ListedRegion> regions_;
  amx_sft_moe::Phase phase_ = amx_sft_moe::Phase::kCount;
  TileCounts at_begin_;
  std::int64_t began_ns_ = 0;
};

}  // namespace bench
