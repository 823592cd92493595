// Counts the synchronisation points that really happen, by standing in front of the entry points of GCC's
// OpenMP library: ends of parallel regions and barriers. Only for programs that link openmp_counter.cpp; says
// whether it can count at all (other compilers call other entry points).
#pragma once

#include <cstdint>

namespace sft_test {

bool can_count_sync_points();
std::int64_t sync_point_count();

}  // namespace sft_test
