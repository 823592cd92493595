// The activations at their edges: exactly at the clamp's bounds, and far out, where exp overflows.
#include <gtest/gtest.h>

#include <cmath>
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
                   this->repeated({-1e4, -300.0, -100.0, -88.0, 0.0, 88.0, 100.0, 300.0, 1e4}),
                   this->repeated({1.0, -2.0, 3.0, 1.0, 1.0, -1.0, 1.0, -2.0, 0.5}));
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

// Routes with NaN or infinite inputs spoil their own token, not the others.
TYPED_TEST(OperatorActivations, InfiniteTokensStayAlone) {
  const Case c{"infinite", 20, 2, 3, 33, 17, {4, 4, 4}};
  Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  const std::vector<double> want = step_alone<TypeParam>(problem)[reference::kY].values();
  problem.x_tensor().set(0, 7, 3, std::numeric_limits<double>::infinity());
  problem.x_tensor().set(0, 8, 3, std::numeric_limits<double>::quiet_NaN());
  const std::vector<double> got = step_alone<TypeParam>(problem)[reference::kY].values();
  for (std::size_t n = 0; n < got.size(); ++n) {
    const std::size_t token = n / static_cast<std::size_t>(c.hidden);
    if (token == 8) {
      EXPECT_TRUE(std::isnan(got[n])) << n;
    }
    if (token != 7 && token != 8) {
      EXPECT_EQ(got[n], want[n]) << n;
    }
  }
}

}  // namespace
}  // namespace sft_test
