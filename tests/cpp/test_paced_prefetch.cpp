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

arch::BytesAhead ten_rows(std::uintptr_t later) {
  return {5000, later, 100, 10, 128};
}

TEST(LeadingRows, EachRowIsAskedForSoManyRowsBeforeItsTurnAndOnce) {
  for (index_t lead = 1; lead < 10; ++lead) {
    arch::LeadingRows rows(ten_rows(9000), lead);
    for (index_t turn = 0; turn < 10; ++turn, rows.next()) {
      const index_t row = turn + lead;
      ASSERT_EQ(row < 10 ? 5000 + 100 * row : 9000 + 100 * (row - 10), static_cast<index_t>(rows.row()))
          << "lead " << lead << ", turn " << turn;
    }
  }
}

TEST(LeadingRows, LeadsOfAStripOrMoreAskForTheStripAfterIt) {
  for (const index_t lead : {10, 11, 1000}) {
    arch::LeadingRows rows(ten_rows(9000), lead);
    for (index_t turn = 0; turn < 10; ++turn, rows.next()) {
      ASSERT_EQ(9000 + 100 * turn, static_cast<index_t>(rows.row())) << "lead " << lead;
    }
  }
}

TEST(LeadingRows, NothingIsAskedForBehindTheLastStrip) {
  for (const index_t lead : {1, 3, 9, 10}) {
    arch::LeadingRows rows(ten_rows(0), lead);
    for (index_t row = lead; row < 10; ++row, rows.next()) {
      ASSERT_EQ(5000 + 100 * row, static_cast<index_t>(rows.row()));
    }
    for (index_t turn = 0; turn < lead; ++turn, rows.next()) ASSERT_EQ(0U, rows.row()) << "lead " << lead;
  }
}

}  // namespace
