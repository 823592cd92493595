// FLOP and bytes of phases: sums against the formulas that users write down, single phases against numbers
// counted by hand, and each option where it belongs.
#include <gtest/gtest.h>

#include <numeric>

#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::index_t;
using amx_sft_moe::Phase;
using amx_sft_moe::StepShape;
using amx_sft_moe::StepWork;

// T=3 tokens, k=2, all routed, E=5 of which 4 are active, H=7, I=11, ranks 2, 3, 5; every size a prime.
StepShape shape() {
  StepShape s;
  s.tokens = 3;
  s.top_k = 2;
  s.routed_rows = 6;
  s.experts = 5;
  s.active_experts = 4;
  s.hidden = 7;
  s.intermediate = 11;
  s.rank = {2, 3, 5};
  s.weight = s.compute = s.stored = 2;
  s.id = 8;
  s.route_weight = s.x = s.y = s.grad_x = s.grad_route_weight = 4;
  s.a = s.b = s.grad_a = s.grad_b = {4, 4, 4};
  return s;
}

std::int64_t sum(const std::array<std::int64_t, amx_sft_moe::kPhaseCount>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}
constexpr std::int64_t kBase = 2LL * 6 * 3 * 7 * 11;              // 2 S 3 H I
constexpr std::int64_t kLora = 2LL * 6 * (7 + 11) * (2 + 3 + 5);  // 2 S (H + I) r

TEST(Work, ForwardIsBaseAndLora) {
  EXPECT_EQ(sum(forward_work(shape()).flop), kBase + kLora);
}

// Gradients of inputs, as much again, and those of LoRA's factors.
TEST(Work, BackwardIsBaseAndTwiceLora) {
  EXPECT_EQ(sum(backward_work(shape()).flop), kBase + 2 * kLora);
}

TEST(Work, OfOnePhaseByHand) {
  const StepWork forward = forward_work(shape());
  EXPECT_EQ(forward.flop_of(Phase::kGateUpGemm), 2 * 6 * 11 * (7 + 7 + 2 + 3));
  // Weights and B of 4 experts; x and LoRA's u and h packed.
  EXPECT_EQ(forward.bytes_of(Phase::kGateUpGemm), 4 * 2 * 11 * 7 * 2 + 4 * 11 * 5 * 4 + 6 * (7 + 5 + 11) * 2);
  EXPECT_EQ(forward.bytes_of(Phase::kGather), 3 * 7 * 4 + 6 * 7 * 2);
  EXPECT_EQ(forward.bytes_of(Phase::kSumTokens), 6 * 7 * 4 + 3 * 7 * 4 + 3 * 2 * 4);
  EXPECT_EQ(forward.flop_of(Phase::kSumTokens), 0);
  const StepWork backward = backward_work(shape());
  EXPECT_EQ(backward.flop_of(Phase::kD3Gemm), 2 * 6 * 11 * (7 + 5));
  EXPECT_EQ(backward.bytes_of(Phase::kD3Gemm), 4 * 7 * 11 * 2 + 4 * 5 * 11 * 4 + 6 * (7 + 5) * 2 + 6 * 11 * 4);
  EXPECT_EQ(backward.flop_of(Phase::kD4LoraGrad), 2 * 6 * 5 * (7 + 11 + 7));
  // Bd; v_d, p; g, u and grad_Ad; u_d and grad_Bd: gradients of all 5 experts.
  EXPECT_EQ(backward.bytes_of(Phase::kD4LoraGrad), 4 * 7 * 5 * 4 + 6 * 5 * 2 + 6 * 7 * 2 + 2 * 6 * 11 * 2 +
                                                       5 * 5 * 11 * 4 + 6 * 5 * 2 + 5 * 7 * 5 * 4);
  EXPECT_EQ(backward.flop_of(Phase::kGuBasePass), 2 * 6 * 7 * (2 * 11 + 2 + 3));
  EXPECT_EQ(backward.flop_of(Phase::kGuLoraUp), 2 * 6 * 3 * (11 + 7 + 11));
  EXPECT_EQ(backward.flop_of(Phase::kD2Quantize), 0);
  EXPECT_EQ(backward.bytes_of(Phase::kD2Quantize), 0);
}

TEST(Work, SavingCostsWrites) {
  StepShape s = shape();
  const std::int64_t without = sum(forward_work(s).bytes);
  s.saves = true;
  EXPECT_EQ(sum(forward_work(s).bytes) - without, 6 * (2 * 11 + 2 + 3 + 5) * 2);
  EXPECT_EQ(sum(forward_work(s).flop), kBase + kLora);
}

TEST(Work, WithoutAdaptersThereIsOnlyTheBase) {
  StepShape s = shape();
  s.rank = {};
  s.a = s.b = s.grad_a = s.grad_b = {};
  EXPECT_EQ(sum(forward_work(s).flop), kBase);
  const StepWork backward = backward_work(s);
  EXPECT_EQ(sum(backward.flop), kBase);
  for (const Phase phase : {Phase::kD4LoraGrad, Phase::kGuLoraGate, Phase::kGuLoraUp}) {
    EXPECT_EQ(backward.bytes_of(phase), 0) << amx_sft_moe::info_of(phase).name;
  }
}

// One A: x A^T once, and one gradient that needs both v.
TEST(Work, SharedA) {
  StepShape s = shape();
  s.rank = {3, 3, 5};
  s.grad_a[amx_sft_moe::kUp] = 0;
  const std::int64_t own = forward_work(s).flop_of(Phase::kLoraAForward);
  s.shared_a = true;
  EXPECT_EQ(2 * forward_work(s).flop_of(Phase::kLoraAForward), own);
  EXPECT_EQ(backward_work(s).flop_of(Phase::kGuLoraGate), 2 * 6 * 3 * (11 + 11 + 2 * 7));
  EXPECT_EQ(backward_work(s).flop_of(Phase::kGuLoraUp), 2 * 6 * 3 * (11 + 11));
}

TEST(Work, GradientsThatNobodyWantsCostNothing) {
  StepShape s = shape();
  s.grad_x = 0;
  s.grad_route_weight = 0;
  s.grad_a = s.grad_b = {};
  const StepWork none = backward_work(s);
  EXPECT_EQ(none.flop_of(Phase::kGuBasePass), 0);
  EXPECT_EQ(none.bytes_of(Phase::kGuBasePass), 0);
  EXPECT_EQ(none.bytes_of(Phase::kGu4SumTokens), 0);
  EXPECT_EQ(none.bytes_of(Phase::kRoutingWeights), 0);
  EXPECT_EQ(none.flop_of(Phase::kD4LoraGrad), 2 * 6 * 7 * 5) << "v_d";
}

// As many as a forward's or the gradients' of inputs: 2 S 3 H I, beside what else there is.
TEST(Work, GradientsOfBaseWeights) {
  StepShape s = shape();
  const StepWork without = backward_work(s);
  s.grad_weight = {2, 4, 4};
  const StepWork with = backward_work(s);
  EXPECT_EQ(sum(with.flop) - sum(without.flop), kBase);
  EXPECT_EQ(without.bytes_of(Phase::kD5WeightGrad) + without.bytes_of(Phase::kGuWeightGradUp), 0);
  EXPECT_EQ(with.flop_of(Phase::kGuWeightGradGate), 2 * 6 * 7 * 11);
  // grad_g, x, and all 5 experts' gradient.
  EXPECT_EQ(with.bytes_of(Phase::kGuWeightGradGate), 6 * 11 * 2 + 3 * 7 * 4 + 5 * 7 * 11 * 2);
  EXPECT_EQ(with.bytes_of(Phase::kGuWeightGradUp), 6 * 11 * 2 + 3 * 7 * 4 + 5 * 7 * 11 * 4);
  // p, g and u.
  EXPECT_EQ(with.bytes_of(Phase::kD5WeightGrad), 6 * 7 * 2 + 2 * 6 * 11 * 2 + 5 * 7 * 11 * 4);
  EXPECT_EQ(with.flop_of(Phase::kD4LoraGrad), without.flop_of(Phase::kD4LoraGrad));
}

// Adding to gradients reads and writes those of active experts; overwriting writes all.
TEST(Work, AccumulatingLeavesIdleExpertsAlone) {
  StepShape s = shape();
  const std::int64_t overwriting = sum(backward_work(s).bytes);
  s.accumulates = true;
  EXPECT_EQ(sum(backward_work(s).bytes) - overwriting, (2 * 4 - 5) * (7 + 11) * (2 + 3 + 5) * 4);
}

// The operator fills the shape in from what it was called with.
TEST(Work, OfARealStep) {
  constexpr Case kCase = with_trained_base({"work", 33, 2, 4, 48, 64, {8, 4, 6}, kSkipped});
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  Moe<PortableBf16> moe = make_moe<PortableBf16>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  const std::int64_t rows = routed_rows(problem);
  const std::int64_t base = 2 * rows * 3 * 48 * 64;
  const std::int64_t lora = 2 * rows * (48 + 64) * (8 + 4 + 6);
  EXPECT_EQ(sum(moe.last_forward().work.flop), base + lora);
  EXPECT_EQ(sum(moe.last_backward().work.flop), 2 * base + 2 * lora);
  EXPECT_GT(sum(moe.last_forward().work.bytes), 3 * 4 * 48 * 64 * 2);
  for (const amx_sft_moe::StepRecord* record : {&moe.last_forward(), &moe.last_backward()}) {
    for (std::size_t p = 0; p < amx_sft_moe::kPhaseCount; ++p) {
      const bool has_time = record->phase_ms(static_cast<Phase>(p)) > 0;
      EXPECT_EQ(record->work.bytes[p] > 0, has_time) << amx_sft_moe::kPhases[p].name;
    }
  }
}

}  // namespace
}  // namespace sft_test
