// Which numbers the threads of a caller's team have in a process' traces and JSON lines.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Where a trace shows the events of a calling thread.
struct TraceLane {
  std::int64_t pid = 0;
  std::int64_t first_tid = 0;  // of the team's thread 0; the others follow

  // The team's numbers for the process' main thread. Other callers have teams of their own, at the same time
  // maybe, and get tracks of their own.
  static TraceLane of_caller() {
    constexpr std::int64_t kMostThreads = 1000;  // with tracks of their own; readers know it
    const std::int64_t pid = ::getpid();
    const std::int64_t tid = ::syscall(SYS_gettid);
    return {pid, tid == pid ? 0 : tid * kMostThreads};
  }
  friend bool operator==(const TraceLane&, const TraceLane&) = default;
};

AMX_SFT_MOE_NAMESPACE_END
