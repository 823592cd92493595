// Counts what goes through the global operator new, over all threads. Only for programs that link
// allocation_counter.cpp.
#pragma once

#include <cstdint>

namespace sft_test {

std::int64_t allocation_count();

}  // namespace sft_test
