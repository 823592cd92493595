// One caller at a time: what an operator and a workspace promise.
#pragma once

#include <atomic>

#include "amx_sft_moe/core/errors.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Marks something as in use while it lives. Throws StateError where it is already.
class InUse {
 public:
  InUse(std::atomic<bool>& flag, const char* refusal) : flag_(flag) {
    if (flag_.exchange(true, std::memory_order_acquire)) throw StateError(refusal);
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
  ~InUse() { flag_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& flag_;
};

AMX_SFT_MOE_NAMESPACE_END
