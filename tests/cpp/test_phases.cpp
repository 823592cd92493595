// The record of a step: every phase can be read, regions nest in the step, counts fit the call. Structure only;
// no test here depends on how long something takes.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <string>

#include "refusal.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::kPhaseCount;
using amx_sft_moe::kPhases;
using amx_sft_moe::Phase;
using amx_sft_moe::PhaseGroup;
using amx_sft_moe::PhaseKind;
using amx_sft_moe::StepRecord;

TEST(PhaseList, HoldsThePublishedNames) {
  std::set<std::string> names;
  for (const auto& phase : kPhases) {
    EXPECT_FALSE(phase.prefix.empty()) << phase.name;
    EXPECT_TRUE(names.insert(std::string(phase.name)).second) << phase.name << " stands twice";
  }
  for (const char* name :
       {"D0_prepare+memset", "D1_scatter", "D2_quantize", "D3_gemm", "D4_lora_grad", "silu_backward",
        "GU0_prepare+memset", "base_pass(gate)+base_pass(up)", "GU2_requantize_for_lora", "lora_pass(gate)",
        "lora_pass(up)", "GU4_sum_tokens", "backward_routing_weights"}) {
    EXPECT_EQ(names.count(name), 1U) << name;
  }
}

std::int64_t tasks_of(const StepRecord& record, Phase phase) {
  std::int64_t tasks = 0;
  for (const auto& region : record.regions()) {
    for (const auto& thread : region.threads) tasks += thread.tasks[static_cast<std::size_t>(phase)];
  }
  return tasks;
}

bool is_forward(Phase phase) {
  return amx_sft_moe::info_of(phase).group < PhaseGroup::kBackwardDown;
}

template <class Kernel>
class PhaseRecord : public KernelTest<Kernel> {
 protected:
  static void expect_regions_nest(const StepRecord& record) {
    std::int64_t last_end = record.begin_ns;
    for (const auto& region : record.regions()) {
      EXPECT_EQ(region.begin_ns, last_end) << "time that belongs to nobody";
      EXPECT_GE(region.end_ns, region.begin_ns);
      last_end = region.end_ns;
      std::size_t took_part = 0;
      for (const auto& thread : region.threads) {
        if (thread.begin_ns == 0) continue;
        ++took_part;
        EXPECT_GE(thread.begin_ns, region.begin_ns);
        EXPECT_GE(thread.end_ns, thread.begin_ns);
        EXPECT_LE(thread.end_ns, region.end_ns);
        std::int64_t busy = 0;
        for (const std::int64_t ns : thread.busy_ns) {
          EXPECT_GE(ns, 0);
          busy += ns;
        }
        EXPECT_LE(busy, thread.end_ns - thread.begin_ns);
      }
      EXPECT_GE(took_part, 1U);
    }
    EXPECT_LE(last_end, record.end_ns);
  }

  static void expect_phases_add_up(const StepRecord& record) {
    double sum = 0;
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      const double ms = record.phase_ms(static_cast<Phase>(p));
      EXPECT_TRUE(std::isfinite(ms)) << kPhases[p].name;
      EXPECT_GE(ms, 0) << kPhases[p].name;
      if (kPhases[p].kind == PhaseKind::kNotNeeded) {
        EXPECT_EQ(ms, 0) << kPhases[p].name;
      }
      sum += ms;
    }
    EXPECT_GT(sum, 0);
    EXPECT_LE(sum, record.total_ms() * (1 + 1e-9));
    double of_groups = 0;
    for (std::size_t g = 0; g < amx_sft_moe::kPhaseGroupCount; ++g) {
      of_groups += record.group_ms(static_cast<PhaseGroup>(g));
    }
    EXPECT_NEAR(of_groups, sum, 1e-9 * sum + 1e-12);
  }
};
TYPED_TEST_SUITE(PhaseRecord, AllKernels, KernelLabels);

// Spans tell the same as the sums of each thread: in order, without gaps.
void expect_spans_agree(const StepRecord& record) {
  for (const auto& region : record.regions()) {
    for (std::size_t t = 0; t < region.threads.size(); ++t) {
      const auto& thread = region.threads[t];
      std::array<std::int64_t, kPhaseCount> busy{};
      std::array<std::int64_t, kPhaseCount> tasks{};
      std::int64_t last_end = thread.begin_ns;
      Phase last = Phase::kCount;
      for (const amx_sft_moe::Span& span : region.spans_of(t)) {
        EXPECT_EQ(span.begin_ns, last_end);
        EXPECT_NE(span.phase, last) << "two spans that should be one";
        EXPECT_EQ(amx_sft_moe::info_of(span.phase).group < PhaseGroup::kBackwardDown,
                  region.group < PhaseGroup::kBackwardDown);
        last_end = span.end_ns;
        last = span.phase;
        busy[static_cast<std::size_t>(span.phase)] += span.end_ns - span.begin_ns;
        tasks[static_cast<std::size_t>(span.phase)] += span.tasks;
      }
      EXPECT_EQ(last_end, thread.end_ns);
      EXPECT_EQ(busy, thread.busy_ns);
      EXPECT_EQ(tasks, thread.tasks);
      EXPECT_EQ(thread.spans_dropped, 0);
    }
  }
}

inline constexpr Case kCase = with_trained_base({"phases", 33, 2, 4, 48, 64, {8, 8, 8}, kSkipped});

TYPED_TEST(PhaseRecord, OfAStep) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  EXPECT_TRUE(moe.last_forward().empty());
  EXPECT_TRUE(moe.last_backward().empty());
  const Outputs out(problem);
  for (int n = 0; n < 2; ++n) {
    run_step(moe, problem, out);
    for (const StepRecord* record : {&moe.last_forward(), &moe.last_backward()}) {
      EXPECT_FALSE(record->empty());
      EXPECT_EQ(record->tokens, kCase.tokens);
      EXPECT_EQ(record->routed_rows, routed_rows(problem));
      this->expect_regions_nest(*record);
      this->expect_phases_add_up(*record);
    }
    EXPECT_LE(moe.last_forward().end_ns, moe.last_backward().begin_ns);
  }
}

TYPED_TEST(PhaseRecord, SpansWhereTheConfigurationWantsThem) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  for (const int threads : {1, 3}) {
    auto config = problem.config();
    config.num_threads = threads;
    config.record_spans = true;
    Moe<TypeParam> moe = make_moe<TypeParam>(problem, config);
    const Outputs out(problem);
    for (int n = 0; n < 2; ++n) {
      run_step(moe, problem, out);
      EXPECT_EQ(moe.last_backward().index, n);
      EXPECT_EQ(moe.last_backward().threads, threads);
      expect_spans_agree(moe.last_forward());
      expect_spans_agree(moe.last_backward());
    }
  }
}

// With LoRA on every projection each phase that does anything in this design has tasks, in its own pass and not
// in the other.
TYPED_TEST(PhaseRecord, EachPhaseInItsPass) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  for (std::size_t p = 0; p < kPhaseCount; ++p) {
    const auto phase = static_cast<Phase>(p);
    const StepRecord& own = is_forward(phase) ? moe.last_forward() : moe.last_backward();
    const StepRecord& other = is_forward(phase) ? moe.last_backward() : moe.last_forward();
    EXPECT_EQ(tasks_of(other, phase), 0) << kPhases[p].name;
    if (kPhases[p].kind == PhaseKind::kNotNeeded) {
      EXPECT_EQ(tasks_of(own, phase), 0) << kPhases[p].name;
    }
  }
  for (const Phase phase : {Phase::kGateUpGemm, Phase::kDownGemm, Phase::kSumTokens, Phase::kLoraAForward}) {
    EXPECT_GT(tasks_of(moe.last_forward(), phase), 0) << amx_sft_moe::info_of(phase).name;
  }
  for (const Phase phase : {Phase::kD3Gemm, Phase::kD4LoraGrad, Phase::kSiluBackward, Phase::kGuBasePass,
                            Phase::kGuLoraGate, Phase::kGuLoraUp, Phase::kGu4SumTokens, Phase::kD5WeightGrad,
                            Phase::kGuWeightGradGate, Phase::kGuWeightGradUp}) {
    EXPECT_GT(tasks_of(moe.last_backward(), phase), 0) << amx_sft_moe::info_of(phase).name;
    EXPECT_GT(moe.last_backward().phase_ms(phase), 0) << amx_sft_moe::info_of(phase).name;
  }
}

// Several tasks make h of the same tokens; the last of them, and no other, multiplies it by the A of down.
TYPED_TEST(PhaseRecord, OneTaskGoesOnWithAGroupOfTokens) {
  const Problem problem =
      random_problem(Case{"one_group", 5, 1, 1, 8, 300, {2, 2, 2}}, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  EXPECT_GT(tasks_of(moe.last_forward(), Phase::kGateUpGemm), 2);
  EXPECT_EQ(tasks_of(moe.last_forward(), Phase::kLoraADownForward), 1);
}

TYPED_TEST(PhaseRecord, NothingOfLoraWithoutAdapters) {
  Case c = kCase;
  c.ranks = {0, 0, 0};
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  for (const Phase phase : {Phase::kLoraAForward, Phase::kLoraADownForward}) {
    EXPECT_EQ(tasks_of(moe.last_forward(), phase), 0) << amx_sft_moe::info_of(phase).name;
  }
  for (const Phase phase : {Phase::kD4LoraGrad, Phase::kGuLoraGate, Phase::kGuLoraUp}) {
    EXPECT_EQ(tasks_of(moe.last_backward(), phase), 0) << amx_sft_moe::info_of(phase).name;
  }
}

TYPED_TEST(PhaseRecord, NothingOfBaseWeightsThatAreFrozen) {
  Case c = kCase;
  c.trains_base = false;
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  for (const Phase phase : {Phase::kD5WeightGrad, Phase::kGuWeightGradGate, Phase::kGuWeightGradUp}) {
    EXPECT_EQ(tasks_of(moe.last_backward(), phase), 0) << amx_sft_moe::info_of(phase).name;
  }
}

// A call that is refused leaves the record of the last one that was not.
TYPED_TEST(PhaseRecord, RefusedCallKeepsTheLastRecord) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  const std::int64_t forward_begin = moe.last_forward().begin_ns;
  const std::int64_t backward_begin = moe.last_backward().begin_ns;
  expect_refused<amx_sft_moe::StateError>([&] { moe.backward(problem.grad_y(), out.gradients()); },
                                          {"backward", "a saved forward", "empty stack (depth 0)"});
  const amx_sft_moe::SavedActivations<typename TypeParam::Stored> none;
  const Complaint no_buffers{"saved.gate", "a non-null pointer", "got null"};
  expect_refused<amx_sft_moe::ArgumentError>(
      [&] { moe.forward_sft(problem.routing(), problem.x(), out.y(), none); }, no_buffers);
  expect_refused<amx_sft_moe::ArgumentError>(
      [&] { moe.backward(problem.routing(), problem.x(), none, problem.grad_y(), out.gradients()); },
      no_buffers);
  EXPECT_EQ(moe.last_forward().begin_ns, forward_begin);
  EXPECT_EQ(moe.last_backward().begin_ns, backward_begin);
}

TYPED_TEST(PhaseRecord, OfNoTokens) {
  Case c = kCase;
  c.tokens = 0;
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  EXPECT_EQ(moe.last_forward().tokens, 0);
  EXPECT_EQ(moe.last_forward().routed_rows, 0);
  for (std::size_t p = 0; p < kPhaseCount; ++p) {
    EXPECT_GE(moe.last_forward().phase_ms(static_cast<Phase>(p)), 0) << kPhases[p].name;
    EXPECT_GE(moe.last_backward().phase_ms(static_cast<Phase>(p)), 0) << kPhases[p].name;
  }
}

}  // namespace
}  // namespace sft_test
