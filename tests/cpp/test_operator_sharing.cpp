// Operators do not disturb each other: side by side, in two threads, with one workspace; and parameters are
// read anew in each call.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "compare.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::Workspace;

inline constexpr Case kSmall{"small", 9, 2, 3, 17, 33, {3, 3, 3}};
inline constexpr Case kLarge{"large", 40, 3, 5, 64, 48, {16, 8, 4}};

template <class Kernel>
class OperatorSharing : public KernelTest<Kernel> {};
TYPED_TEST_SUITE(OperatorSharing, AllKernels, KernelLabels);

TYPED_TEST(OperatorSharing, TwoAlternating) {
  const Problem one = random_problem(kSmall, kPlain, kWeightDType<TypeParam>);
  const Problem two = random_problem(kLarge, kWide, kWeightDType<TypeParam>);
  Moe<TypeParam> first = make_moe<TypeParam>(one);
  Moe<TypeParam> second = make_moe<TypeParam>(two);
  for (int n = 0; n < 2; ++n) {
    Outputs of_one(one);
    Outputs of_two(two);
    first.forward_sft(one.routing(), one.x(), of_one.y());
    second.forward_sft(two.routing(), two.x(), of_two.y());
    first.backward(one.grad_y(), of_one.gradients());
    second.backward(two.grad_y(), of_two.gradients());
    expect_same_bits(step_alone<TypeParam>(one), of_one);
    expect_same_bits(step_alone<TypeParam>(two), of_two);
  }
}

TYPED_TEST(OperatorSharing, TwoThreadsWithTheirOwnOperators) {
  const Problem one = random_problem(kSmall, kPlain, kWeightDType<TypeParam>);
  const Problem two = random_problem(kLarge, kPlain, kWeightDType<TypeParam>);
  const Outputs want_one = step_alone<TypeParam>(one);
  const Outputs want_two = step_alone<TypeParam>(two);
  std::vector<Outputs> of_one;
  std::vector<Outputs> of_two;
  for (int n = 0; n < 8; ++n) {
    of_one.emplace_back(one);
    of_two.emplace_back(two);
  }
  const auto run = [](const Problem& problem, std::vector<Outputs>& outputs) {
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    for (Outputs& out : outputs) run_step(moe, problem, out);
  };
  std::thread other([&] { run(two, of_two); });
  run(one, of_one);
  other.join();
  for (const Outputs& out : of_one) expect_same_bits(want_one, out);
  for (const Outputs& out : of_two) expect_same_bits(want_two, out);
}

// Scratch memory is used again as it is: nothing of it may count, not even times zero.
TYPED_TEST(OperatorSharing, NothingIsLeftOfStepsFullOfNaN) {
  const Problem problem = random_problem(kSmall, kPlain, kWeightDType<TypeParam>);
  Problem spoiled = random_problem(kSmall, kPlain, kWeightDType<TypeParam>);
  Problem spoiled_and_large = random_problem(kLarge, kWide, kWeightDType<TypeParam>);
  const auto workspace = std::make_shared<Workspace>();
  using Weight = typename TypeParam::Weight;
  Moe<TypeParam> small(problem.config(), problem.base<Weight>(), problem.lora(), workspace);
  Moe<TypeParam> large(spoiled_and_large.config(), spoiled_and_large.base<Weight>(), spoiled_and_large.lora(),
                       workspace);
  const auto run_spoiled = [](Moe<TypeParam>& moe, Problem& p) {
    p.x_tensor().poison();
    p.grad_y_tensor().poison();
    Outputs out(p);
    run_step(moe, p, out);
    EXPECT_TRUE(std::isnan(out[reference::kY].get(0, 0, 0)));
  };
  for (const bool same_sizes_last : {true, false}) {
    SCOPED_TRACE(same_sizes_last);
    if (!same_sizes_last) run_spoiled(small, spoiled);
    run_spoiled(large, spoiled_and_large);
    if (same_sizes_last) run_spoiled(small, spoiled);
    Outputs got(problem);
    run_step(small, problem, got);
    expect_same_bits(step_alone<TypeParam>(problem), got);
  }
}

// Layers that run one after another may share a workspace: forwards in order, then backwards in reverse, as
// training does. What is saved between is each layer's own.
TYPED_TEST(OperatorSharing, OneWorkspaceForTwoLayers) {
  const Problem one = random_problem(kSmall, kPlain, kWeightDType<TypeParam>);
  const Problem two = random_problem(kLarge, kWide, kWeightDType<TypeParam>);
  const auto workspace = std::make_shared<Workspace>();
  using Weight = typename TypeParam::Weight;
  Moe<TypeParam> first(one.config(), one.base<Weight>(), one.lora(), workspace);
  Moe<TypeParam> second(two.config(), two.base<Weight>(), two.lora(), workspace);
  for (int n = 0; n < 2; ++n) {
    Outputs of_one(one);
    Outputs of_two(two);
    first.forward_sft(one.routing(), one.x(), of_one.y());
    second.forward_sft(two.routing(), two.x(), of_two.y());
    second.backward(two.grad_y(), of_two.gradients());
    first.backward(one.grad_y(), of_one.gradients());
    expect_same_bits(step_alone<TypeParam>(one), of_one);
    expect_same_bits(step_alone<TypeParam>(two), of_two);
  }
  EXPECT_GT(first.memory().workspace_bytes, 0);
  EXPECT_EQ(first.memory().workspace_bytes, second.memory().workspace_bytes);
}

// Layers of different kernels may share one too.
TYPED_TEST(OperatorSharing, OneWorkspaceForTwoKernels) {
  const Problem one = random_problem(kSmall, kPlain, kWeightDType<TypeParam>);
  const Problem two = random_problem(kLarge, kPlain, DType::kFp32);
  const auto workspace = std::make_shared<Workspace>();
  Moe<TypeParam> first(one.config(), one.base<typename TypeParam::Weight>(), one.lora(), workspace);
  Moe<PortableFp32> second(two.config(), two.base<float>(), two.lora(), workspace);
  Outputs of_one(one);
  Outputs of_two(two);
  first.forward_sft(one.routing(), one.x(), of_one.y());
  second.forward_sft(two.routing(), two.x(), of_two.y());
  second.backward(two.grad_y(), of_two.gradients());
  first.backward(one.grad_y(), of_one.gradients());
  expect_same_bits(step_alone<TypeParam>(one), of_one);
  expect_same_bits(step_alone<PortableFp32>(two), of_two);
}

TYPED_TEST(OperatorSharing, WorkspaceOutlivesTheLayerThatCameFirst) {
  const Problem one = random_problem(kSmall, kPlain, kWeightDType<TypeParam>);
  const auto workspace = std::make_shared<Workspace>();
  using Weight = typename TypeParam::Weight;
  auto first = std::make_unique<Moe<TypeParam>>(one.config(), one.base<Weight>(), one.lora(), workspace);
  Moe<TypeParam> second(one.config(), one.base<Weight>(), one.lora(), workspace);
  Outputs out(one);
  run_step(*first, one, out);
  first.reset();
  out.poison();
  run_step(second, one, out);
  expect_same_bits(step_alone<TypeParam>(one), out);
}

// After an optimiser step nothing has to be called: parameters changed in place are seen by the next call, in
// the backward too.
TYPED_TEST(OperatorSharing, FactorsChangedInPlaceAreSeenAtOnce) {
  Problem problem = random_problem(kLarge, kPlain, kWeightDType<TypeParam>, 1);
  const Problem other = random_problem(kLarge, kPlain, kWeightDType<TypeParam>, 2);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs before(problem);
  run_step(moe, problem, before);
  const Outputs want_before = step_alone<TypeParam>(problem);
  const reference::Layer& now = other.layer();
  problem.replace_factors(now.lora_gate, now.lora_up, now.lora_down);
  Outputs after(problem);
  run_step(moe, problem, after);
  expect_same_bits(want_before, before);
  expect_same_bits(step_alone<TypeParam>(problem), after);
  EXPECT_NE(before[reference::kY].bits(), after[reference::kY].bits());
  expect_close(expected_step(problem), after);
}

}  // namespace
}  // namespace sft_test
