// What the injected NVTX tool of the tests hands to the test: every push and pop, in order, with its thread.
#pragma once

#include <cstddef>

extern "C" {

struct NvtxEvent {
  unsigned long thread;  // opaque id
  bool push;             // false: pop
  char domain[32];
  char name[64];  // of a push
};

// Copies up to `capacity` events and returns how many there were since the last clear.
using NvtxRecorderEvents = std::size_t (*)(NvtxEvent* to, std::size_t capacity);
using NvtxRecorderClear = void (*)();
}
