// What `Gradients` asks for: overwriting or adding, scaling, and leaving out. On integers, so that sums are
// exact.
#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <type_traits>

#include "emulation.hpp"
#include "integers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using reference::kGateA;
using reference::kGradW;
using reference::kGradX;
using reference::kTensors;
using reference::kUpA;

inline constexpr Case kBusy = with_trained_base(with_biases({"busy", 17, 2, 3, 37, 33, {7, 5, 3}}));
inline constexpr Case kIdle =
    with_trained_base(with_biases({"idle", 9, 2, 6, 32, 17, {4, 4, 4}, kIdleExperts}));
inline constexpr Case kShared = with_biases({"shared", 9, 2, 3, 32, 17, {4, 4, 4}, kDistinct, true});
// More rows of an expert than one sum takes.
inline constexpr Case kManyRows =
    with_trained_base(with_biases({"many_rows", 521, 1, 2, 8, 5, {3, 2, 4}, kOneExpert}));
inline constexpr Case kManyRowsShared{"many_rows_shared", 521, 1, 2, 8, 5, {3, 3, 0}, kOneExpert, true};
// More columns than are stored together without masks, and a rest.
inline constexpr Case kWide = with_trained_base({"wide", 17, 2, 3, 150, 70, {7, 5, 3}});
inline constexpr Storage kFp32{.name = "fp32", .activations = DType::kFp32, .factors = DType::kFp32};

// The n-th element of a gradient before the step: unlike those a register or an element away, so that none passes for
// another.
double before(std::size_t n) {
  return 24 + static_cast<double>(n % 7);
}

template <class Kernel>
class OperatorGradients : public KernelTest<Kernel> {
 protected:
  // One step whose parameter gradients find values in their place.
  static Outputs step(const Problem& problem, bool accumulate, float scale) {
    Outputs out(problem);
    for (std::size_t t = kGateA; t < kTensors; ++t) {
      Tensor& tensor = out[static_cast<reference::Tensor>(t)];
      std::vector<double> values(static_cast<std::size_t>(tensor.count()));
      for (std::size_t n = 0; n < values.size(); ++n) values[n] = before(n);
      tensor.store(values);
    }
    Moe<Kernel> moe = make_moe<Kernel>(problem);
    moe.forward_sft(problem.routing(), problem.x(), out.y());
    amx_sft_moe::Gradients grads = out.gradients();
    grads.accumulate = accumulate;
    grads.scale = scale;
    moe.backward(problem.grad_y(), grads);
    return out;
  }

  // got = [before +] scale * reference for parameters, = reference for x and routing weights.
  static void expect_combined(const Problem& problem, const Outputs& got, bool accumulate, double scale) {
    const reference::Results want = reference::step(problem.layer(), problem.batch());
    for (std::size_t t = 0; t < kTensors; ++t) {
      const bool parameter = t >= kGateA;
      const Tensor& tensor = got[static_cast<reference::Tensor>(t)];
      const std::vector<double> values = tensor.values();
      for (std::size_t n = 0; n < values.size(); ++n) {
        const double exact = parameter ? (accumulate ? before(n) : 0) + scale * want[t][n] : want[t][n];
        ASSERT_EQ(values[n], rounded(tensor.dtype(), exact)) << reference::kTensorNames[t] << "[" << n << "]";
      }
    }
  }
};
TYPED_TEST_SUITE(OperatorGradients, AllKernels, KernelLabels);

TYPED_TEST(OperatorGradients, OverwriteIgnoresWhatWasThere) {
  for (const Case& c : {kBusy, kIdle, kShared, kManyRows, kManyRowsShared, kWide}) {
    SCOPED_TRACE(c.name);
    for (const Storage& storage : {kPlain, kFp32, kPeftLike}) {
      const Problem problem = integer_problem(c, storage, kWeightDType<TypeParam>);
      this->expect_combined(problem, this->step(problem, false, 1), false, 1);
    }
  }
}

TYPED_TEST(OperatorGradients, AccumulateAdds) {
  for (const Case& c : {kBusy, kIdle, kShared, kManyRows, kManyRowsShared, kWide}) {
    SCOPED_TRACE(c.name);
    for (const Storage& storage : {kPlain, kFp32, kPeftLike}) {
      const Problem problem = integer_problem(c, storage, kWeightDType<TypeParam>);
      this->expect_combined(problem, this->step(problem, true, 1), true, 1);
    }
  }
}

TYPED_TEST(OperatorGradients, ScaleActsOnThisCallsParameterGradientsOnly) {
  for (const Case& c : {kBusy, kShared, kManyRows, kManyRowsShared, kWide}) {
    SCOPED_TRACE(c.name);
    const Problem problem = integer_problem(c, kFp32, kWeightDType<TypeParam>);
    this->expect_combined(problem, this->step(problem, false, 0.25F), false, 0.25);
    this->expect_combined(problem, this->step(problem, true, -2), true, -2);
    this->expect_combined(problem, this->step(problem, true, 0), true, 0);
    this->expect_combined(problem, this->step(problem, false, 0), false, 0);
  }
}

TYPED_TEST(OperatorGradients, AccumulatesOverSeveralSteps) {
  const Problem problem = integer_problem(kBusy, kFp32, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  amx_sft_moe::Gradients grads = out.gradients();
  for (int n = 0; n < 3; ++n) {
    grads.accumulate = n > 0;
    grads.scale = 0.5F;
    moe.forward_sft(problem.routing(), problem.x(), out.y());
    moe.backward(problem.grad_y(), grads);
  }
  this->expect_combined(problem, out, false, 1.5);
}

// Experts without tokens: zeros on overwrite (also over NaN), not a bit changed on accumulate.
TYPED_TEST(OperatorGradients, ExpertsWithoutTokens) {
  const Problem problem = integer_problem(kIdle, kPlain, kWeightDType<TypeParam>);
  const Outputs overwritten = step_alone<TypeParam>(problem);
  const Outputs added = this->step(problem, true, 1);
  for (std::size_t t = kGateA; t < kTensors; ++t) {
    const Tensor& zero = overwritten[static_cast<reference::Tensor>(t)];
    const Tensor& kept = added[static_cast<reference::Tensor>(t)];
    const bool bias = t >= reference::kGateBias && t <= reference::kDownBias;  // [E, out]
    const index_t rows = bias ? 1 : zero.extents().d1;
    for (index_t expert = 1; expert < kIdle.experts; expert += 2) {
      for (index_t row = 0; row < rows; ++row) {
        for (index_t col = 0; col < zero.extents().d2; ++col) {
          const auto value = [&](const Tensor& of) {
            return bias ? of.get(0, expert, col) : of.get(expert, row, col);
          };
          ASSERT_EQ(value(zero), 0) << reference::kTensorNames[t];
          const index_t n = (expert * rows + row) * zero.extents().d2 + col;
          ASSERT_EQ(value(kept), before(static_cast<std::size_t>(n))) << reference::kTensorNames[t];
        }
      }
    }
  }
}

TYPED_TEST(OperatorGradients, NoRouteAtAll) {
  const Case no_tokens = with_trained_base({"no_tokens", 0, 2, 3, 32, 17, {4, 4, 4}});
  const Case all_skipped = with_trained_base({"all_skipped", 7, 2, 3, 32, 17, {4, 4, 4}, kAllSkipped});
  for (const Case& c : {no_tokens, all_skipped}) {
    SCOPED_TRACE(c.name);
    const Problem problem = integer_problem(c, kPlain, kWeightDType<TypeParam>);
    this->expect_combined(problem, this->step(problem, false, 1), false, 1);
    this->expect_combined(problem, this->step(problem, true, 1), true, 1);
  }
}

// Removes one result from what is asked for.
void drop(amx_sft_moe::Gradients& grads, std::size_t which) {
  if (which == kGradX) grads.x = {};
  if (which == kGradW) grads.routing_weights = {};
  amx_sft_moe::AnyExpertTensor* factors[] = {&grads.lora.gate_a, &grads.lora.gate_b, &grads.lora.up_a,
                                             &grads.lora.up_b,   &grads.lora.down_a, &grads.lora.down_b};
  amx_sft_moe::AnyMatrix* biases[] = {&grads.biases.gate, &grads.biases.up, &grads.biases.down};
  amx_sft_moe::AnyExpertTensor* weights[] = {&grads.weights.gate, &grads.weights.up, &grads.weights.down};
  if (which >= reference::kGateWeight) {
    *weights[which - reference::kGateWeight] = {};
  } else if (which >= reference::kGateBias) {
    *biases[which - reference::kGateBias] = {};
  } else if (which >= kGateA) {
    *factors[which - kGateA] = {};
  }
}

// Any subset may be wanted, and what is left out changes nothing else; experts without tokens get zeros
// whichever of their gradients are wanted. All 2048 subsets of the eleven; or, where each costs emulated
// instructions, a few: those with at most one gradient wanted or at most one left out.
template <class Kernel>
void expect_any_subset(const Case& c, bool few) {
  const Problem problem = integer_problem(c, kPlain, kWeightDType<Kernel>);
  const Outputs all = step_alone<Kernel>(problem);
  const Outputs untouched(problem);
  Moe<Kernel> moe = make_moe<Kernel>(problem);
  constexpr unsigned kUpABit = 1U << (kUpA - kGradX);
  const int most = c.shared_a ? 10 : 11;
  for (unsigned wanted = 0; wanted < 2048; ++wanted) {
    if (c.shared_a && (wanted & kUpABit) != 0) continue;  // there is none
    if (few && std::popcount(wanted) > 1 && std::popcount(wanted) < most - 1) continue;
    SCOPED_TRACE("wanted " + std::to_string(wanted));
    Outputs out(problem);
    moe.forward_sft(problem.routing(), problem.x(), out.y());
    amx_sft_moe::Gradients grads = out.gradients();
    for (std::size_t t = kGradX; t <= reference::kDownBias; ++t) {
      if ((wanted >> (t - kGradX) & 1U) == 0) drop(grads, t);
    }
    moe.backward(problem.grad_y(), grads);
    for (std::size_t t = kGradX; t <= reference::kDownBias; ++t) {
      const auto which = static_cast<reference::Tensor>(t);
      const Outputs& want = (wanted >> (t - kGradX) & 1U) == 0 ? untouched : all;
      ASSERT_EQ(want[which].bits(), out[which].bits()) << reference::kTensorNames[t];
    }
  }
}

TYPED_TEST(OperatorGradients, AnySubsetOfThem) {
  const bool few = std::is_same_v<TypeParam, AmxBf16> && amx_is_emulated();
  expect_any_subset<TypeParam>(with_biases({"subset", 5, 2, 3, 18, 7, {3, 2, 1}, kIdleExperts}), few);
}

TYPED_TEST(OperatorGradients, SubsetsWithASharedA) {
  expect_any_subset<TypeParam>(with_biases({"subset_shared", 5, 2, 3, 18, 7, {3, 3, 1}, kIdleExperts, true}),
                               true);
}

// The same for the gradients of base weights, with all the others wanted or none of them.
TYPED_TEST(OperatorGradients, AnySubsetOfBaseWeights) {
  const Case c = with_trained_base(with_biases({"subset_of_base", 5, 2, 3, 18, 7, {3, 2, 1}, kIdleExperts}));
  const Problem problem = integer_problem(c, kPlain, kWeightDType<TypeParam>);
  const Outputs all = step_alone<TypeParam>(problem);
  const Outputs untouched(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  for (unsigned wanted = 0; wanted < 16; ++wanted) {
    SCOPED_TRACE("wanted " + std::to_string(wanted));
    const auto is_wanted = [&](std::size_t t) {
      return t < reference::kGateWeight ? (wanted & 8U) != 0
                                        : (wanted >> (t - reference::kGateWeight) & 1U) != 0;
    };
    Outputs out(problem);
    moe.forward_sft(problem.routing(), problem.x(), out.y());
    amx_sft_moe::Gradients grads = out.gradients();
    for (std::size_t t = kGradX; t < kTensors; ++t) {
      if (!is_wanted(t)) drop(grads, t);
    }
    moe.backward(problem.grad_y(), grads);
    for (std::size_t t = kGradX; t < kTensors; ++t) {
      const auto which = static_cast<reference::Tensor>(t);
      ASSERT_EQ((is_wanted(t) ? all : untouched)[which].bits(), out[which].bits())
          << reference::kTensorNames[t];
    }
  }
}

TYPED_TEST(OperatorGradients, SharedAWithoutItsGradient) {
  const Problem problem = integer_problem(kShared, kPlain, kWeightDType<TypeParam>);
  const Outputs all = step_alone<TypeParam>(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  for (const reference::Tensor dropped : {kGateA, reference::kGateB, reference::kUpB}) {
    Outputs out(problem);
    moe.forward_sft(problem.routing(), problem.x(), out.y());
    amx_sft_moe::Gradients grads = out.gradients();
    drop(grads, dropped);
    moe.backward(problem.grad_y(), grads);
    for (const reference::Tensor kept : {kGradX, kGradW, kGateA, reference::kGateB, reference::kUpB}) {
      if (kept != dropped) {
        EXPECT_EQ(all[kept].bits(), out[kept].bits()) << reference::kTensorNames[kept];
      }
    }
  }
}

// The sum of both gradients, where gate and up have one A; two gradients, where they have equal but separate
// ones.
TYPED_TEST(OperatorGradients, SharedAIsTheSumOfTwo) {
  const Problem shared = integer_problem(kShared, kFp32, kWeightDType<TypeParam>);
  reference::Layer apart = shared.layer();
  apart.shared_a = false;
  const Problem separate(kFp32, kWeightDType<TypeParam>, apart, shared.batch());
  const Outputs one = step_alone<TypeParam>(shared);
  const Outputs two = step_alone<TypeParam>(separate);
  const std::vector<double> sum = one[kGateA].values();
  const std::vector<double> gate = two[kGateA].values();
  const std::vector<double> up = two[kUpA].values();
  for (std::size_t n = 0; n < sum.size(); ++n) ASSERT_EQ(sum[n], gate[n] + up[n]) << n;
  EXPECT_EQ(one[kGradX].bits(), two[kGradX].bits());
}

}  // namespace
}  // namespace sft_test
