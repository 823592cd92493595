// The operator's clock. Groups are opened on the calling thread, phases on each thread that works on them; both
// write into a StepRecord and push NVTX ranges. Nothing is printed here.
//
//     BACKWARD_TIMER_START(timer, PhaseGroup::kBackwardDown, threads, tasks);  // on the calling thread
//       ThreadTimer thread_timer(timer, thread);                               // on each thread of the region
//       BACKWARD_TIMER_CHECKPOINT(thread_timer, Phase::kD3Gemm);               // since the last one: D3_gemm
//     BACKWARD_TIMER_END(timer);                                               // after the region
//
// Recording is a clock read a task, and a few more a region; with AMX_SFT_MOE_NO_TIMER all of it is empty.
#pragma once

#include <chrono>
#include <exception>

#include "amx_sft_moe/profile/nvtx.hpp"
#include "amx_sft_moe/profile/step_observer.hpp"
#include "amx_sft_moe/profile/step_record.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

struct SteadyClock {
  static std::int64_t now_ns() {
    using std::chrono::duration_cast;
    using std::chrono::nanoseconds;
    return duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

inline std::int64_t now_ns() {
  return SteadyClock::now_ns();
}

#ifndef AMX_SFT_MOE_NO_TIMER

// One forward or backward being recorded. Used by the calling thread, except for the slots that ThreadTimers
// own.
template <class Clock>
class BasicStepTimer {
 public:
  // Starts the record over. What was done since begin_ns, before the step was accepted, belongs to `phase`: the
  // routing, and what is checked with it. The observer may be null. A step that an exception leaves has no record:
  // an empty one is left, and the step is not counted. The one before it was overwritten.
  BasicStepTimer(StepRecord& record, index_t tokens, index_t routed_rows, std::int64_t begin_ns, Phase phase,
                 StepObserver* observer = nullptr)
      : record_(record), observer_(observer), last_end_(Clock::now_ns()) {
    record_.clear();
    RegionRecord& serial = record_.add_region(info_of(phase).group, 1, 1);
    ++record_.index;
    record_.tokens = tokens;
    record_.routed_rows = routed_rows;
    record_.begin_ns = begin_ns;
    serial.parallel = false;
    serial.begin_ns = begin_ns;
    serial.end_ns = last_end_;
    ThreadRecord& caller = serial.threads[0];
    caller.begin_ns = begin_ns;
    caller.end_ns = last_end_;
    caller.busy_ns[static_cast<std::size_t>(phase)] = last_end_ - begin_ns;
    caller.tasks[static_cast<std::size_t>(phase)] = 1;
    if (serial.spans_per_thread > 0) serial.span_slots[caller.spans++] = {begin_ns, last_end_, 1, phase};
  }
  BasicStepTimer(const BasicStepTimer&) = delete;
  BasicStepTimer& operator=(const BasicStepTimer&) = delete;
  ~BasicStepTimer() {
    end_region();
    record_.end_ns = Clock::now_ns();
    if (std::uncaught_exceptions() == exceptions_) return;
    record_.clear();
    --record_.index;
  }

  void start_region(PhaseGroup group, int threads, index_t tasks = 0) {
    end_region();
    // Without memory for the record there is no region, and nobody is told that one begins: nobody would be told
    // that it ends.
    RegionRecord& region =
        record_.add_region(group, static_cast<std::size_t>(threads), static_cast<std::size_t>(tasks));
    region.begin_ns = last_end_;
    range_.open(group);
    region_ = &region;
    if (observer_ != nullptr) observer_->group_begins(group);
  }
  void end_region() {
    if (region_ == nullptr) return;
    region_->end_ns = last_end_ = Clock::now_ns();
    region_ = nullptr;
    if (observer_ != nullptr) observer_->group_ends();
    range_.close();
  }
  RegionRecord* region() { return region_; }
  StepObserver* observer() const { return observer_; }

 private:
  StepRecord& record_;
  StepObserver* observer_;
  std::int64_t last_end_;
  const int exceptions_ = std::uncaught_exceptions();
  RegionRecord* region_ = nullptr;
  nvtx::Range range_;
};

// One thread in one region. The time between two checkpoints belongs to the phase that begin() named.
template <class Clock>
class BasicThreadTimer {
 public:
  BasicThreadTimer(BasicStepTimer<Clock>& step, int thread)
      : observer_(thread == 0 ? step.observer() : nullptr), last_(Clock::now_ns()) {
    RegionRecord* region = step.region();
    if (region == nullptr) return;
    const auto t = static_cast<std::size_t>(thread);
    slot_ = &region->threads[t];
    slot_->begin_ns = last_;
    span_capacity_ = region->spans_per_thread;
    if (span_capacity_ > 0) spans_ = region->span_slots.data() + t * span_capacity_;
  }
  BasicThreadTimer(const BasicThreadTimer&) = delete;
  BasicThreadTimer& operator=(const BasicThreadTimer&) = delete;
  ~BasicThreadTimer() {
    if (observer_ != nullptr && open_ != Phase::kCount) observer_->phase_ends();
    if (slot_ != nullptr) slot_->end_ns = last_;
  }

  void begin(Phase phase) {
    if (phase == open_) return;
    range_.open(phase);
    if (observer_ != nullptr) {
      if (open_ != Phase::kCount) observer_->phase_ends();
      observer_->phase_begins(phase);
    }
    open_ = phase;
  }
  void checkpoint(Phase phase) {
    const std::int64_t now = Clock::now_ns();
    if (slot_ != nullptr) {
      slot_->busy_ns[static_cast<std::size_t>(phase)] += now - last_;
      slot_->tasks[static_cast<std::size_t>(phase)] += 1;
      if (span_capacity_ > 0) add_to_spans(phase, now);
    }
    last_ = now;
  }

 private:
  void add_to_spans(Phase phase, std::int64_t now) {
    const bool same = phase == span_phase_;
    span_phase_ = phase;
    if (slot_->spans_dropped > 0) {
      slot_->spans_dropped += same ? 0 : 1;
    } else if (same) {
      Span& span = spans_[slot_->spans - 1];
      span.end_ns = now;
      ++span.tasks;
    } else if (slot_->spans < span_capacity_) {
      spans_[slot_->spans++] = {last_, now, 1, phase};
    } else {
      slot_->spans_dropped = 1;
    }
  }

  ThreadRecord* slot_ = nullptr;
  Span* spans_ = nullptr;
  std::size_t span_capacity_ = 0;
  StepObserver* observer_;
  std::int64_t last_;
  Phase open_ = Phase::kCount;
  Phase span_phase_ = Phase::kCount;  // of the last checkpoint
  nvtx::Range range_;
};

#else

template <class Clock>
class BasicStepTimer {
 public:
  BasicStepTimer(StepRecord& record, index_t, index_t, std::int64_t, Phase, StepObserver* = nullptr) {
    record.clear();
    ++record.index;
  }
  void start_region(PhaseGroup, int, index_t = 0) {}
  void end_region() {}
};

template <class Clock>
class BasicThreadTimer {
 public:
  BasicThreadTimer(BasicStepTimer<Clock>&, int) {}
  void begin(Phase) {}
  void checkpoint(Phase) {}
};

#endif

using StepTimer = BasicStepTimer<SteadyClock>;
using ThreadTimer = BasicThreadTimer<SteadyClock>;

// Their names have no prefix: macros of these names that a user has are put aside, until core/undef_macros.hpp.
#define AMX_SFT_MOE_USERS_TIMER_MACROS_ASIDE
#pragma push_macro("BACKWARD_TIMER_START")
#pragma push_macro("BACKWARD_TIMER_CHECKPOINT")
#pragma push_macro("BACKWARD_TIMER_END")
#undef BACKWARD_TIMER_START
#undef BACKWARD_TIMER_CHECKPOINT
#undef BACKWARD_TIMER_END
#define BACKWARD_TIMER_START(timer, group, ...) (timer).start_region((group), __VA_ARGS__)
#define BACKWARD_TIMER_CHECKPOINT(thread_timer, phase) (thread_timer).checkpoint(phase)
#define BACKWARD_TIMER_END(timer) (timer).end_region()

AMX_SFT_MOE_NAMESPACE_END
