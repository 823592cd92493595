// How a thread rounds and whether it flushes denormals to zero: control bits of MXCSR. A thread of a pool keeps
// what it had when the pool was made, whatever the caller has set since (torch.set_flush_denormal, -ffast-math).
// Exceptions never trap (feenableexcept), on the caller's thread neither: kernels compute on padding too, which may hold
// anything, and drop what comes of it. For the same reason the flags that exceptions raise are the caller's alone.
#pragma once

#include <xmmintrin.h>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

class FloatMode {
 public:
  static FloatMode of_this_thread() { return FloatMode(_mm_getcsr()); }

  // While it lives, its thread computes in a given mode. Afterwards mode and flags are what they were.
  class Scope {
   public:
    explicit Scope(FloatMode mode) : before_(_mm_getcsr()) { _mm_setcsr(mode.control_); }
    ~Scope() { _mm_setcsr(before_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    unsigned before_;
  };

 private:
  static constexpr unsigned kControl = ~0x3FU;  // without the flags that operations leave behind
  static constexpr unsigned kNoTraps = 0x1F80U;

  explicit FloatMode(unsigned mxcsr) : control_((mxcsr & kControl) | kNoTraps) {}

  unsigned control_;
};

AMX_SFT_MOE_NAMESPACE_END
