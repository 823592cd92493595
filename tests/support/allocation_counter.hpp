// Counts what goes through the global operator new, over all threads, and makes it fail on demand. Only for
// programs that link allocation_counter.cpp.
#pragma once

#include <cstdint>

namespace sft_test {

std::int64_t allocation_count();
std::int64_t live_allocations();          // made and not yet freed
std::int64_t live_aligned_allocations();  // of those, those that asked for an alignment

// While it lives, the allocation number `at` from now on (the first is 0) throws std::bad_alloc, those after it
// succeed again.
class FailingAllocation {
 public:
  explicit FailingAllocation(std::int64_t at);
  ~FailingAllocation();
  bool failed() const;  // whether there has been such an allocation
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
};

}  // namespace sft_test
