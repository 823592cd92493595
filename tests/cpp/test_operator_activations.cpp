// The activations at their edges: exactly at the clamp's bounds, and far out, where exp overflows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "compare.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

// One token, one expert, H = 1 and x = 1, so that the weights are the values: g[n] = gate[n], u[n] = up[n].
Problem problem_of(DType weights, const reference::Glu& glu, std::vector<double> gate, std::vector<double> up) {
  reference::Layer layer;
  layer.experts = layer.hidden = 1;
  layer.intermediate = static_cast<int>(gate.size());
  layer.down.assign(gate.size(), 1.0);
  layer.gate = std::move(gate);
  layer.up = std::move(up);
  layer.glu = glu;
  // B of gate and up alone receive grad_g and grad_u: one row of A with a single 1 keeps u_g = x = 1.
  const auto zeros = std::vector<double>(layer.gate.size(), 0.0);
  layer.lora_gate = {1, 1.0, {1.0}, zeros};
  layer.lora_up = {1, 1.0, {1.0}, zeros};
  const reference::Batch batch{1, 1, {1.0}, {0}, {1.0}, {1.0}};
  const Storage storage{.name = "fp32", .activations = DType::kFp32, .factors = DType::kFp32};
  return Problem(storage, weights, layer, batch);
}

template <class Kernel>
class OperatorActivations : public KernelTest<Kernel> {
 protected:
  // Seventeen and more values, so that vector code and its tail both meet them.
  static std::vector<double> repeated(const std::vector<double>& values) {
    std::vector<double> out;
    for (int n = 0; n < 7; ++n) out.insert(out.end(), values.begin(), values.end());
    return out;
  }
};
TYPED_TEST_SUITE(OperatorActivations, AllKernels, KernelLabels);

// torch.clamp passes the gradient at its bounds; one bf16 step outside it does not.
TYPED_TEST(OperatorActivations, ClampBounds) {
  const reference::Glu glu{reference::Glu::kClamped, 7.0, 1.702};
  const double outside = 7.0 + 0x1p-5;
  const Problem problem = problem_of(kWeightDType<TypeParam>, glu,
                                     this->repeated({7.0, outside, -7.0, -outside, 1.0, 1.0, 1.0, 1.0}),
                                     this->repeated({0.5, 0.5, 0.5, 0.5, 7.0, outside, -7.0, -outside}));
  const Outputs out = step_alone<TypeParam>(problem);
  const reference::Results want = reference::step(problem.layer(), problem.batch());
  const std::vector<double> grad_g = out[reference::kGateB].values();
  const std::vector<double> grad_u = out[reference::kUpB].values();
  for (std::size_t n = 0; n < grad_g.size(); ++n) {
    EXPECT_NEAR(grad_g[n], want[reference::kGateB][n], 0.01 * std::abs(want[reference::kGateB][n])) << n;
    EXPECT_NEAR(grad_u[n], want[reference::kUpB][n], 0.01 * std::abs(want[reference::kUpB][n])) << n;
  }
  EXPECT_NE(grad_g[0], 0);  // at the bound
  EXPECT_EQ(grad_g[1], 0);  // above it
  EXPECT_NE(grad_u[4], 0);
  EXPECT_EQ(grad_u[5], 0);
  EXPECT_NE(grad_u[6], 0);
  EXPECT_EQ(grad_u[7], 0);
}

// Far out silu and gelu are 0 or the identity, and their exponentials are inf or 0: no NaN on the way.
TYPED_TEST(OperatorActivations, FarOut) {
  using reference::Glu;
  for (const Glu::Form form : {Glu::kSilu, Glu::kClamped, Glu::kGelu, Glu::kGeluTanh}) {
    SCOPED_TRACE(form);
    const Glu glu{form, 7.0, 1.702};
    const Problem problem =
        problem_of(kWeightDType<TypeParam>, glu,
                   this->repeated({-2.5e38, -1e4, -300.0, -100.0, -88.0, 0.0, 88.0, 100.0, 300.0, 1e4}),
                   this->repeated({0.5, 1.0, -2.0, 3.0, 1.0, 1.0, -1.0, 1.0, -2.0, 0.5}));
    const Outputs out = step_alone<TypeParam>(problem);
    const reference::Results want = reference::step(problem.layer(), problem.batch());
    for (std::size_t t = 0; t < reference::kTensors; ++t) {
      const std::vector<double> got = out[static_cast<reference::Tensor>(t)].values();
      for (std::size_t n = 0; n < got.size(); ++n) {
        EXPECT_NEAR(got[n], want[t][n], 0.01 * std::abs(want[t][n]) + 1e-30) << reference::kTensorNames[t] << n;
      }
    }
  }
}

// A token whose x or grad_y is NaN or infinite spoils what is its own, not the rows of others. (Gradients of
// parameters are sums over tokens.)
TYPED_TEST(OperatorActivations, InfiniteTokensStayAlone) {
  const Case c{"infinite", 20, 2, 3, 33, 17, {4, 4, 4}};
  Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  problem.x_tensor().set(0, 7, 3, kInfinity);
  problem.x_tensor().set(0, 8, 3, kNaN);
  problem.grad_y_tensor().set(0, 2, 5, kInfinity);
  problem.grad_y_tensor().set(0, 3, 5, kNaN);
  const Outputs got = step_alone<TypeParam>(problem);
  const auto expect_others_alike = [&](reference::Tensor which, const std::vector<int>& spoilt) {
    for (int token = 0; token < c.tokens; ++token) {
      if (std::ranges::find(spoilt, token) != spoilt.end()) continue;
      for (index_t n = 0; n < want[which].extents().d2; ++n) {
        EXPECT_EQ(got[which].get(0, token, n), want[which].get(0, token, n))
            << reference::kTensorNames[which] << "[" << token << ", " << n << "]";
      }
    }
  };
  expect_others_alike(reference::kY, {7, 8});
  expect_others_alike(reference::kGradX, {2, 3, 7, 8});
  expect_others_alike(reference::kGradW, {2, 3, 7, 8});
  for (index_t n = 0; n < c.hidden; ++n) {
    EXPECT_TRUE(std::isnan(got[reference::kY].get(0, 8, n))) << n;
    EXPECT_TRUE(std::isnan(got[reference::kGradX].get(0, 3, n))) << n;
  }
  for (index_t n = 0; n < c.top_k; ++n) EXPECT_TRUE(std::isnan(got[reference::kGradW].get(0, 3, n))) << n;
}

}  // namespace
}  // namespace sft_test
