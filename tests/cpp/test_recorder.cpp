// The recorder on a clock that the test moves: whose time is whose, which tasks make a span, what is dropped, and
// that phases sum to the step. And whom it tells.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::Phase;
using amx_sft_moe::PhaseGroup;
using amx_sft_moe::RegionRecord;
using amx_sft_moe::Span;
using amx_sft_moe::StepRecord;
using amx_sft_moe::ThreadRecord;

struct HandClock {
  static std::int64_t now_ns() { return now; }
  static inline std::int64_t now = 0;
};
using StepTimer = amx_sft_moe::BasicStepTimer<HandClock>;
using ThreadTimer = amx_sft_moe::BasicThreadTimer<HandClock>;

void work(ThreadTimer& thread, Phase phase, std::int64_t ns) {
  thread.begin(phase);
  HandClock::now += ns;
  thread.checkpoint(phase);
}

class Recorder : public testing::Test {
 protected:
  void SetUp() override { HandClock::now = 1000; }
  StepRecord record;
};

std::tuple<Phase, std::int64_t, std::int64_t, int> fields(const Span& span) {
  return {span.phase, span.begin_ns, span.end_ns, span.tasks};
}

TEST_F(Recorder, ConsecutiveTasksOfAPhaseAreOneSpan) {
  record.wants_spans = true;
  {
    HandClock::now = 1010;
    StepTimer step(record, 8, 16, 1000, Phase::kD1Scatter);
    HandClock::now = 1013;
    step.start_region(PhaseGroup::kBackwardDown, 2, 6);
    HandClock::now = 1015;
    ThreadTimer thread(step, 0);
    for (int n = 0; n < 3; ++n) work(thread, Phase::kD3Gemm, 20);
    work(thread, Phase::kD4LoraGrad, 5);
    work(thread, Phase::kD3Gemm, 7);
  }
  ASSERT_EQ(record.regions().size(), 2U);
  const RegionRecord& serial = record.regions()[0];
  EXPECT_FALSE(serial.parallel);
  ASSERT_EQ(serial.spans_of(0).size(), 1U);
  EXPECT_EQ(fields(serial.spans_of(0)[0]), std::tuple(Phase::kD1Scatter, 1000, 1010, 1));
  const RegionRecord& region = record.regions()[1];
  ASSERT_EQ(region.spans_of(0).size(), 3U);
  EXPECT_EQ(fields(region.spans_of(0)[0]), std::tuple(Phase::kD3Gemm, 1015, 1075, 3));
  EXPECT_EQ(fields(region.spans_of(0)[1]), std::tuple(Phase::kD4LoraGrad, 1075, 1080, 1));
  EXPECT_EQ(fields(region.spans_of(0)[2]), std::tuple(Phase::kD3Gemm, 1080, 1087, 1));
  EXPECT_EQ(region.threads[0].spans_dropped, 0);
  EXPECT_TRUE(region.spans_of(1).empty());
}

TEST_F(Recorder, NoSpansUnlessWanted) {
  {
    StepTimer step(record, 8, 16, 1000, Phase::kD1Scatter);
    step.start_region(PhaseGroup::kBackwardDown, 1, 6);
    ThreadTimer thread(step, 0);
    work(thread, Phase::kD3Gemm, 20);
  }
  for (const RegionRecord& region : record.regions()) {
    EXPECT_TRUE(region.spans_of(0).empty());
    EXPECT_TRUE(region.span_slots.empty());
  }
  EXPECT_EQ(record.regions()[1].threads[0].busy_ns[static_cast<std::size_t>(Phase::kD3Gemm)], 20);
}

// The first spans are kept, of the others there is a count; times and tasks are complete all the same.
TEST_F(Recorder, CountsTheSpansThatDidNotFit) {
  record.wants_spans = true;
  constexpr std::int64_t kRounds = 3 * StepRecord::kMostSpans;
  {
    StepTimer step(record, 8, 16, 1000, Phase::kD1Scatter);
    step.start_region(PhaseGroup::kBackwardDown, 1, kRounds);
    ThreadTimer thread(step, 0);
    for (std::int64_t n = 0; n < kRounds; ++n) {
      work(thread, Phase::kD3Gemm, 2);
      work(thread, Phase::kD3Gemm, 2);
      work(thread, Phase::kD4LoraGrad, 1);
    }
  }
  const RegionRecord& region = record.regions()[1];
  const ThreadRecord& thread = region.threads[0];
  ASSERT_EQ(region.spans_of(0).size(), StepRecord::kMostSpans);
  EXPECT_EQ(thread.spans_dropped, 2 * kRounds - static_cast<std::int64_t>(StepRecord::kMostSpans));
  EXPECT_EQ(fields(region.spans_of(0)[2]), std::tuple(Phase::kD3Gemm, 1005, 1009, 2));
  EXPECT_EQ(thread.busy_ns[static_cast<std::size_t>(Phase::kD3Gemm)], 4 * kRounds);
  EXPECT_EQ(thread.tasks[static_cast<std::size_t>(Phase::kD3Gemm)], 2 * kRounds);
  EXPECT_EQ(thread.end_ns, HandClock::now);
}

// What happens between two regions belongs to the second, so that only the end of a step belongs to nobody.
TEST_F(Recorder, PhasesSumToTheStep) {
  {
    HandClock::now = 1100;
    StepTimer step(record, 8, 16, 1000, Phase::kD1Scatter);
    for (const PhaseGroup group : {PhaseGroup::kBackwardDown, PhaseGroup::kBackwardGateUp}) {
      HandClock::now += 40;  // the list of tasks
      step.start_region(group, 2, 3);
      const bool down = group == PhaseGroup::kBackwardDown;
      {
        HandClock::now += 5;
        ThreadTimer thread(step, 0);
        work(thread, down ? Phase::kD3Gemm : Phase::kGuBasePass, 300);
        work(thread, down ? Phase::kD4LoraGrad : Phase::kGuLoraUp, 100);
        ThreadTimer other(step, 1);
        work(other, down ? Phase::kD3Gemm : Phase::kGuBasePass, 200);
      }
      HandClock::now += 60;  // the slowest thread
      step.end_region();
    }
    HandClock::now += 10;
  }
  const amx_sft_moe::PhaseTimes times = record.times();
  double sum = 0;
  for (const double ms : times.ms) sum += ms;
  EXPECT_EQ(record.end_ns - record.begin_ns, 100 + 2 * (40 + 5 + 600 + 60) + 10);
  EXPECT_NEAR(sum, record.total_ms() - 10e-6, 1e-12);
  // 705 ns of wall time, of whose busy 600 ns D3_gemm had 500.
  EXPECT_NEAR(times.phase_ms(Phase::kD3Gemm), 705e-6 * 500 / 600, 1e-12);
  EXPECT_NEAR(times.group_ms(PhaseGroup::kBackwardGateUp), 705e-6, 1e-12);
  EXPECT_EQ(record.phase_ms(Phase::kD3Gemm), times.phase_ms(Phase::kD3Gemm));
}

TEST_F(Recorder, CountsPassesFromZero) {
  EXPECT_EQ(record.index, -1);
  for (int n = 0; n < 3; ++n) {
    StepTimer step(record, 8, 16, 1000, Phase::kRoute);
    EXPECT_EQ(record.index, n);
  }
}

TEST_F(Recorder, TotalsAreSums) {
  amx_sft_moe::StepTotals totals;
  totals.add(record);
  EXPECT_EQ(totals.passes, 0) << "an empty record is no pass";
  for (int n = 0; n < 2; ++n) {
    StepTimer step(record, 8, 16, HandClock::now, Phase::kD1Scatter);
    step.start_region(PhaseGroup::kBackwardDown, 2, 3);
    {
      ThreadTimer thread(step, 0);
      work(thread, Phase::kD3Gemm, 1'000'000);
    }
    HandClock::now += 500'000;
    step.end_region();
    record.end_ns = HandClock::now;
    record.work = {};
    record.work.add(Phase::kD3Gemm, 40, 30);
    totals.add(record);
  }
  EXPECT_EQ(totals.passes, 2);
  EXPECT_EQ(totals.tokens, 16);
  EXPECT_EQ(totals.routed_rows, 32);
  EXPECT_NEAR(totals.total_ms, 3.0, 1e-9);
  EXPECT_NEAR(totals.busy_ms, 2.0, 1e-9);
  EXPECT_NEAR(totals.waiting_ms, 1.0, 1e-9);
  EXPECT_NEAR(totals.times.phase_ms(Phase::kD3Gemm), 3.0, 1e-9);
  EXPECT_EQ(totals.work.flop_of(Phase::kD3Gemm), 80);
  EXPECT_EQ(totals.work.bytes_of(Phase::kD3Gemm), 60);
}

// Writes down what it is told.
class Listener final : public amx_sft_moe::StepObserver {
 public:
  std::vector<std::string> heard;

  void group_begins(PhaseGroup group) noexcept override { heard.emplace_back(name_of(group)); }
  void phase_begins(Phase phase) noexcept override { heard.emplace_back(amx_sft_moe::info_of(phase).name); }
  void phase_ends() noexcept override { heard.emplace_back("."); }
  void group_ends() noexcept override { heard.emplace_back("end"); }
};

TEST_F(Recorder, TellsTheObserver) {
  Listener listener;
  {
    StepTimer step(record, 8, 16, 1000, Phase::kD1Scatter, &listener);
    step.start_region(PhaseGroup::kBackwardDown, 2, 3);
    {
      ThreadTimer caller(step, 0);
      ThreadTimer other(step, 1);
      work(other, Phase::kD4LoraGrad, 1);
      work(caller, Phase::kD3Gemm, 1);
      work(caller, Phase::kD3Gemm, 1);
      work(caller, Phase::kD4LoraGrad, 1);
    }
    step.start_region(PhaseGroup::kBackwardGateUp, 1, 1);
  }
  EXPECT_EQ(listener.heard, (std::vector<std::string>{"backward_down", "D3_gemm", ".", "D4_lora_grad", ".",
                                                      "end", "backward_gate_up", "end"}));
}

TEST_F(Recorder, TheObserverHearsNothingOfARegionWithoutMemory) {
  Listener listener;
  try {
    StepTimer step(record, 8, 16, 1000, Phase::kD1Scatter, &listener);
    step.start_region(PhaseGroup::kBackwardDown, 1, 1);
    step.start_region(PhaseGroup::kBackwardGateUp, -1, 1);  // as many threads as no vector holds
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::length_error&) {
  }
  EXPECT_EQ(listener.heard, (std::vector<std::string>{"backward_down", "end"}));
}

TEST_F(Recorder, AStepThatAnExceptionLeavesHasNoRecord) {
  { const StepTimer step(record, 8, 16, 1000, Phase::kRoute); }
  EXPECT_FALSE(record.empty());
  try {
    StepTimer step(record, 8, 16, 1000, Phase::kRoute);
    record.threads = 2;
    record.work.add(Phase::kD3Gemm, 40, 30);
    step.start_region(PhaseGroup::kBackwardDown, 1, 1);
    throw std::runtime_error("a task");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(record.empty());
  EXPECT_TRUE(record.regions().empty());
  EXPECT_EQ(std::tuple(record.tokens, record.routed_rows, record.threads, record.end_ns),
            std::tuple(0, 0, 0, 0));
  EXPECT_EQ(record.work.flop_of(Phase::kD3Gemm), 0);
  EXPECT_EQ(record.index, 0);
  { const StepTimer step(record, 8, 16, 1000, Phase::kRoute); }
  EXPECT_EQ(record.index, 1);
}

// Takes a whole step when an exception passes by.
class StepAtTheEnd {
 public:
  explicit StepAtTheEnd(StepRecord& record) : record_(record) {}
  StepAtTheEnd(const StepAtTheEnd&) = delete;
  StepAtTheEnd& operator=(const StepAtTheEnd&) = delete;
  ~StepAtTheEnd() { const StepTimer step(record_, 8, 16, 1000, Phase::kRoute); }

 private:
  StepRecord& record_;
};

TEST_F(Recorder, AStepTakenWhileAnExceptionPassesHasItsRecord) {
  try {
    const StepAtTheEnd step(record);
    throw std::runtime_error("of someone else");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(record.empty());
  EXPECT_EQ(record.index, 0);
}

TEST_F(Recorder, TheObserverHearsTheEndWhenATaskThrows) {
  Listener listener;
  try {
    StepTimer step(record, 8, 16, 1000, Phase::kD1Scatter, &listener);
    step.start_region(PhaseGroup::kBackwardDown, 1, 1);
    ThreadTimer thread(step, 0);
    thread.begin(Phase::kD3Gemm);
    throw std::runtime_error("a task");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(listener.heard, (std::vector<std::string>{"backward_down", "D3_gemm", ".", "end"}));
}

}  // namespace
}  // namespace sft_test
