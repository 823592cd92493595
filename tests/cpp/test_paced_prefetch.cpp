// What is asked for ahead is asked for once, and evenly.
#include <gtest/gtest.h>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

TEST(Pace, UnitsAreSpreadEvenlyAndAllAreDueInTheEnd) {
  for (const index_t units : {0, 1, 5, 64, 127, 128, 256, 1000}) {
    for (const index_t turns : {1, 2, 3, 7, 24, 64, 96, 100, 257}) {
      arch::Pace pace(units, turns);
      index_t sum = 0;
      for (index_t turn = 1; turn <= turns; ++turn) {
        sum += pace.turn();
        ASSERT_EQ(units * turn / turns, sum) << units << " units, turn " << turn << " of " << turns;
      }
    }
  }
}

}  // namespace
