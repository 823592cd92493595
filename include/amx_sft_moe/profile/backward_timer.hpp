// The operator's clock. Groups are opened on the calling thread, phases on each thread that works on them; both
// write into a StepRecord and push NVTX ranges. Nothing is printed here.
//
//     BACKWARD_TIMER_START(timer, PhaseGroup::kBackwardDown, threads);      // on the calling thread
//       ThreadTimer thread_timer(timer, thread);                            // on each thread of the region
//       BACKWARD_TIMER_CHECKPOINT(thread_timer, Phase::kD3Gemm);            // the time since the last one was
//       D3_gemm
//     BACKWARD_TIMER_END(timer);                                            // after the region
//
// Recording is a few clock reads a task; with AMX_SFT_MOE_NO_TIMER all of it is empty.
#pragma once

#include <chrono>

#include "amx_sft_moe/profile/nvtx.hpp"
#include "amx_sft_moe/profile/step_record.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

inline std::int64_t now_ns() {
  using std::chrono::duration_cast;
  using std::chrono::nanoseconds;
  return duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#ifndef AMX_SFT_MOE_NO_TIMER

// One forward or backward being recorded. Used by the calling thread, except for the slots that ThreadTimers
// own.
class StepTimer {
 public:
  // Starts the record over. The routing's work was done since begin_ns, before the step was accepted; it
  // belongs to `phase`.
  StepTimer(StepRecord& record, index_t tokens, index_t routed_rows, std::int64_t begin_ns, Phase phase)
      : record_(record) {
    record_.restart();
    record_.tokens = tokens;
    record_.routed_rows = routed_rows;
    record_.begin_ns = begin_ns;
    RegionRecord& serial = record_.add_region(info_of(phase).group, 1);
    const std::int64_t now = now_ns();
    serial.parallel = false;
    serial.begin_ns = begin_ns;
    serial.end_ns = now;
    serial.threads[0].begin_ns = begin_ns;
    serial.threads[0].end_ns = now;
    serial.threads[0].busy_ns[static_cast<std::size_t>(phase)] = now - begin_ns;
    serial.threads[0].tasks[static_cast<std::size_t>(phase)] = 1;
  }
  StepTimer(const StepTimer&) = delete;
  StepTimer& operator=(const StepTimer&) = delete;
  ~StepTimer() {
    end_region();
    record_.end_ns = now_ns();
  }

  void start_region(PhaseGroup group, int threads) {
    end_region();
    range_.open(group);
    region_ = &record_.add_region(group, static_cast<std::size_t>(threads));
    region_->begin_ns = now_ns();
  }
  void end_region() {
    if (region_ != nullptr) region_->end_ns = now_ns();
    region_ = nullptr;
    range_.close();
  }
  ThreadRecord* slot(int thread) {
    return region_ == nullptr ? nullptr : &region_->threads[static_cast<std::size_t>(thread)];
  }

 private:
  StepRecord& record_;
  RegionRecord* region_ = nullptr;
  nvtx::Range range_;
};

// One thread in one region. The time between two checkpoints belongs to the phase that begin() named.
class ThreadTimer {
 public:
  ThreadTimer(StepTimer& step, int thread) : slot_(step.slot(thread)), last_(now_ns()) {
    if (slot_ != nullptr) slot_->begin_ns = last_;
  }
  ThreadTimer(const ThreadTimer&) = delete;
  ThreadTimer& operator=(const ThreadTimer&) = delete;
  ~ThreadTimer() {
    if (slot_ != nullptr) slot_->end_ns = last_;
  }

  void begin(Phase phase) {
    if (phase == open_) return;
    range_.open(phase);
    open_ = phase;
  }
  void checkpoint(Phase phase) {
    const std::int64_t now = now_ns();
    if (slot_ != nullptr) {
      slot_->busy_ns[static_cast<std::size_t>(phase)] += now - last_;
      slot_->tasks[static_cast<std::size_t>(phase)] += 1;
    }
    last_ = now;
  }

 private:
  ThreadRecord* slot_;
  std::int64_t last_;
  Phase open_ = Phase::kCount;
  nvtx::Range range_;
};

#else

class StepTimer {
 public:
  StepTimer(StepRecord& record, index_t, index_t, std::int64_t, Phase) { record.restart(); }
  void start_region(PhaseGroup, int) {}
  void end_region() {}
};

class ThreadTimer {
 public:
  ThreadTimer(StepTimer&, int) {}
  void begin(Phase) {}
  void checkpoint(Phase) {}
};

#endif

#define BACKWARD_TIMER_START(timer, group, threads) (timer).start_region((group), (threads))
#define BACKWARD_TIMER_CHECKPOINT(thread_timer, phase) (thread_timer).checkpoint(phase)
#define BACKWARD_TIMER_END(timer) (timer).end_region()

AMX_SFT_MOE_NAMESPACE_END
