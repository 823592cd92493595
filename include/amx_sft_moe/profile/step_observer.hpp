// For those who want to know when a pass enters and leaves its groups and phases while it runs, such as a
// profiler that has ranges of its own. Everyone else reads the record afterwards.
#pragma once

#include "amx_sft_moe/profile/phases.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Called on the thread that called the operator, and for phases only while that thread itself works on them: a
// group's begin, then its phases one at a time, then its end. The time spent here is part of the step. Must not
// throw, must not call the operator, and must not use AMX's tiles, nor call what does (a bf16 product of oneDNN or MKL): the
// pass has its own in them.
class StepObserver {
 public:
  StepObserver() = default;
  StepObserver(const StepObserver&) = delete;
  StepObserver& operator=(const StepObserver&) = delete;
  virtual ~StepObserver() = default;

  virtual void group_begins(PhaseGroup group) noexcept = 0;
  virtual void phase_begins(Phase phase) noexcept = 0;
  virtual void phase_ends() noexcept = 0;
  virtual void group_ends() noexcept = 0;
};

AMX_SFT_MOE_NAMESPACE_END
