// What is asked for ahead is asked for once, and evenly or nearly so.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

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

// Never later than evenly, nor twice as early; and a CPU that expects as many as before is wrong once or twice.
TEST(SteadyPace, UnitsAreDueAsManyAtATimeAndAllInTheEnd) {
  for (const index_t units : {0, 1, 5, 64, 127, 128, 256, 1000}) {
    for (const index_t turns : {1, 2, 3, 7, 24, 64, 96, 100, 257}) {
      arch::SteadyPace pace(units, turns);
      index_t sum = 0, before = units;
      for (index_t turn = 1; turn <= turns; ++turn) {
        const index_t due = pace.turn();
        sum += due;
        ASSERT_GE(sum, units * turn / turns) << units << " units, turn " << turn << " of " << turns;
        ASSERT_LE(sum, 2 * units * turn / turns) << units << " units, turn " << turn << " of " << turns;
        if (due == 0) continue;
        ASSERT_LE(due, before) << units << " units, turn " << turn << " of " << turns;
        ASSERT_GE(due, units / turns);
        before = due;
      }
      ASSERT_EQ(units, sum) << turns << " turns";
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

TEST(LinesInOrder, EachLineOfEachRowIsAskedForOnceThenTheFirstAgain) {
  for (const index_t row_bytes : {1, 64, 65, 4096}) {
    for (const index_t rows : {1, 2, 7}) {
      for (const index_t stride : {0, 64, 8192, -8192}) {
        constexpr index_t kFirst = 1 << 20;
        arch::LinesInOrder lines({kFirst, stride, rows, row_bytes});
        ASSERT_TRUE(lines.any());
        for (index_t row = 0; row < rows; ++row) {
          for (index_t byte = 0; byte < row_bytes; byte += arch::kLineBytes, lines.turn()) {
            ASSERT_EQ(kFirst + row * stride + byte, static_cast<index_t>(lines.line())) << rows << " rows";
          }
        }
        for (int turn = 0; turn < 200; ++turn, lines.turn())
          ASSERT_EQ(kFirst, static_cast<index_t>(lines.line()));
      }
    }
  }
}

// Each pass has a turn for each line. What is asked for next, when a pass is over, is what its share comes to.
TEST(SharedLines, PassesAskForLinesAsTheyShareOutRows) {
  for (const index_t most : {6, 12}) {
    for (const index_t all : {1, 5, 12, 13, 24, 30, 36}) {
      constexpr index_t kFirst = 1 << 20, kRows = 7, kLines = 9;
      arch::SharedLines lines(arch::LinesInOrder({kFirst, 8192, kRows, kLines * arch::kLineBytes}), all);
      ASSERT_TRUE(lines.any());
      for (index_t begun = 0; begun < all; begun += most) {
        const index_t share = std::min(most, all - begun);
        lines.begin_pass(share);
        for (index_t turn = 0; turn < kRows * kLines; ++turn) lines.turn();
        const index_t asked = kRows * kLines * (begun + share) / all;
        const index_t next = asked == kRows * kLines ? 0 : asked;
        const index_t place = kFirst + next / kLines * 8192 + next % kLines * arch::kLineBytes;
        ASSERT_EQ(static_cast<index_t>(lines.line()), place) << begun + share << " of " << all;
      }
    }
  }
  EXPECT_FALSE(arch::SharedLines(arch::LinesInOrder({}), 1).any());
}

TEST(LinesInOrder, OfGatheredRowsThereIsNone) {
  const std::vector<float> data(8);
  const std::int32_t index[] = {1, 0};
  const arch::RowSource<float> rows{data.data(), 4, 1, nullptr}, gathered{data.data(), 4, 1, index};
  EXPECT_TRUE(arch::LinesInOrder(arch::bytes_of(rows, 2, 4)).any());
  EXPECT_FALSE(arch::LinesInOrder(arch::bytes_of(gathered, 2, 4)).any());
  EXPECT_FALSE(arch::LinesInOrder(arch::bytes_of(rows, 0, 4)).any());
}

constexpr index_t kPage = arch::kPageBytes;

// Pages that rows [row, row + count) have bytes on.
std::set<std::uintptr_t> pages_of(const arch::RowBytes& bytes, index_t row, index_t count) {
  std::set<std::uintptr_t> pages;
  for (index_t r = row; r < row + count; ++r) {
    for (index_t i = 0; i < bytes.row_bytes; ++i) {
      pages.insert((bytes.first + static_cast<std::uintptr_t>(r * bytes.stride + i)) / kPage);
    }
  }
  return pages;
}

TEST(ForEachPage, EachPageOfTheRowsIsThereOnce) {
  for (const index_t row_bytes : {2, 128, 1536, 4096, 5760, 14336}) {
    for (const index_t gap : {0, 64, 4094, 4096, 8192}) {
      const arch::RowBytes bytes{(1U << 20) + 192, row_bytes + gap, 40, row_bytes};
      for (const index_t count : {0, 1, 3, 17}) {
        std::vector<std::uintptr_t> found;
        arch::for_each_page(bytes, 5, count, [&](std::uintptr_t at) { found.push_back(at / kPage); });
        const std::set<std::uintptr_t> all = pages_of(bytes, 5, count);
        const std::set<std::uintptr_t> each(found.begin(), found.end());
        EXPECT_EQ(all, each) << row_bytes << ", " << gap;
        EXPECT_EQ(found.size(), each.size()) << row_bytes << ", " << gap;
      }
    }
  }
}

TEST(ForEachPage, RowsThatAreOneRowOrGoBackwardsHaveNoLoopWithoutEnd) {
  for (const index_t stride : {0, -4096, -100}) {
    index_t found = 0;
    arch::for_each_page({1U << 20, stride, 40, 128}, 0, 40, [&](std::uintptr_t) { ++found; });
    EXPECT_LE(found, 1) << stride;
    EXPECT_GT(arch::PagesAhead({1U << 20, stride, 40, 128}, 4, true).due(0).count, 0);
  }
}

TEST(PagesAhead, RowsAreDueOnceAndSomePagesTogether) {
  for (const index_t row_bytes : {128, 1536, 4096, 5760, 28672}) {
    for (const index_t gap : {0, 8192}) {
      for (const index_t step : {4, 8}) {
        constexpr index_t kRows = 100, kLead = 9;
        const arch::RowBytes bytes{0, row_bytes + gap, kRows, row_bytes};
        arch::PagesAhead pages(bytes, step, true);
        index_t end = kLead;
        for (index_t row = kLead, call = 0; row < kRows + 20; row += step - call++ % 3) {
          const auto due = pages.due(row);
          if (due.count > 0) {
            ASSERT_EQ(end, due.row);
            end = due.row + due.count;
          }
          ASSERT_GE(end, std::min(row + step, kRows));  // up to the next call
          if (due.count == 0) continue;
          const auto together = static_cast<index_t>(pages_of(bytes, due.row, due.count).size());
          EXPECT_LE(together, arch::kPagesTogether + step * (row_bytes / kPage + 2));
          if (end < kRows) {
            EXPECT_GE(together, arch::kPagesTogether / 2);
          }
        }
        EXPECT_EQ(kRows, end) << row_bytes << ", " << gap << ", " << step;
      }
    }
  }
}

TEST(PagesAhead, OfGatheredRowsNoneIsDue) {
  const std::int32_t index[] = {3, 1};
  const bf16 row[64] = {};
  const auto bytes = arch::bytes_of(arch::RowSource<bf16>{row, 32, 1, index}, 2, 32);
  EXPECT_EQ(0, arch::PagesAhead(bytes, 4, true).due(0).count);
}

TEST(PagesAhead, NoneIsDueWhereTheyAreNotTranslatedTogether) {
  arch::PagesAhead pages({1U << 20, 8192, 40, 4096}, 4, false);
  for (index_t row = 0; row < 40; row += 4) EXPECT_EQ(0, pages.due(row).count) << row;
}

template <class S>
void expect_bytes() {
  const S row[64] = {};
  const arch::RowBytes bytes = arch::bytes_of(arch::RowSource<S>{row, 32, 1, nullptr}, 2, 24);
  constexpr index_t kSize = sizeof(S);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(row), bytes.first);
  EXPECT_EQ(32 * kSize, bytes.stride);
  EXPECT_EQ(2, bytes.rows);
  EXPECT_EQ(24 * kSize, bytes.row_bytes);
}

TEST(BytesOf, RowsAreThoseOfTheSource) {
  expect_bytes<bf16>();
  expect_bytes<float>();
}

}  // namespace
