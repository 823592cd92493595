// The oracle against itself: every gradient of the float64 reference agrees with central differences of its
// forward.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <utility>

#include "random.hpp"
#include "reference.hpp"

namespace sft_test {
namespace {

using reference::Batch;
using reference::Layer;
using reference::Results;

// The scalar whose gradient a backward computes: <grad_y, y>.
double loss(const Layer& layer, const Batch& batch) {
  const Results out = reference::step(layer, batch);
  double sum = 0;
  for (std::size_t n = 0; n < out[reference::kY].size(); ++n) sum += batch.grad_y[n] * out[reference::kY][n];
  return sum;
}

class CentralDifferences : public testing::TestWithParam<Case> {
 protected:
  CentralDifferences() {
    Random random(7);
    layer_ = random_layer(random, GetParam());
    batch_ = random_batch(random, GetParam(), GetParam().tokens, false);
    results_ = reference::step(layer_, batch_);
  }

  // Moves each element of `values` (and of `twin`, where two names stand for one parameter) by +-h.
  void expect_gradient(reference::Tensor which, std::vector<double>& values,
                       std::vector<double>* twin = nullptr) {
    constexpr double kStep = 1e-5;
    const std::vector<double>& gradient = results_[which];
    ASSERT_EQ(gradient.size(), values.size());
    double error = 0;
    double norm = 0;
    for (std::size_t n = 0; n < values.size(); ++n) {
      const double at = values[n];
      const auto loss_at = [&](double value) {
        values[n] = value;
        if (twin != nullptr) (*twin)[n] = value;
        return loss(layer_, batch_);
      };
      const double slope = (loss_at(at + kStep) - loss_at(at - kStep)) / (2 * kStep);
      loss_at(at);
      error += (slope - gradient[n]) * (slope - gradient[n]);
      norm += slope * slope;
    }
    EXPECT_LE(std::sqrt(error), 1e-7 * std::sqrt(norm) + 1e-9) << reference::kTensorNames[which];
    if (!values.empty() && GetParam().routing != RoutingPattern::kAllSkipped) {
      EXPECT_GT(norm, 0) << reference::kTensorNames[which];
    }
  }

  Layer layer_;
  Batch batch_;
  Results results_;
};

TEST_P(CentralDifferences, AgreeWithEveryGradient) {
  expect_gradient(reference::kGradX, batch_.x);
  expect_gradient(reference::kGradW, batch_.weights);
  expect_gradient(reference::kGateA, layer_.lora_gate.a, layer_.shared_a ? &layer_.lora_up.a : nullptr);
  expect_gradient(reference::kGateB, layer_.lora_gate.b);
  if (!layer_.shared_a) expect_gradient(reference::kUpA, layer_.lora_up.a);
  expect_gradient(reference::kUpB, layer_.lora_up.b);
  expect_gradient(reference::kDownA, layer_.lora_down.a);
  expect_gradient(reference::kDownB, layer_.lora_down.b);
  expect_gradient(reference::kGateBias, layer_.gate_bias);
  expect_gradient(reference::kUpBias, layer_.up_bias);
  expect_gradient(reference::kDownBias, layer_.down_bias);
  if (!layer_.trains_base) return;
  expect_gradient(reference::kGateWeight, layer_.gate);
  expect_gradient(reference::kUpWeight, layer_.up);
  expect_gradient(reference::kDownWeight, layer_.down);
}

INSTANTIATE_TEST_SUITE_P(
    Layers, CentralDifferences,
    testing::Values(Case{"plain", 5, 2, 3, 6, 5, {2, 3, 4}},                                //
                    Case{"one_of_everything", 1, 1, 1, 1, 1, {1, 1, 1}},                    //
                    Case{"shared_a", 4, 2, 3, 5, 4, {3, 3, 2}, kDistinct, true},            //
                    Case{"partly_adapted", 4, 2, 3, 5, 4, {0, 2, 0}},                       //
                    Case{"skipped_ids", 6, 3, 3, 4, 5, {2, 2, 2}, kSkipped},                //
                    Case{"all_skipped", 3, 2, 3, 4, 5, {2, 2, 2}, kAllSkipped},             //
                    Case{"duplicate_ids", 3, 4, 2, 4, 5, {2, 2, 2}, kDuplicates},           //
                    Case{"clamped", 6, 2, 3, 5, 7, {2, 2, 2}, kDistinct, false, kClamped},  //
                    Case{"clamped_shared", 6, 2, 3, 5, 7, {2, 2, 2}, kSkipped, true, kClamped},
                    Case{"gelu", 6, 2, 3, 5, 7, {2, 2, 2}, kSkipped, false, kGelu},
                    Case{"gelu_tanh", 6, 2, 3, 5, 7, {2, 2, 2}, kSkipped, false, kGeluTanh},
                    with_biases({"biases", 6, 2, 3, 5, 7, {2, 2, 2}, kSkipped}),
                    with_biases({"gpt_oss", 6, 2, 3, 5, 7, {2, 2, 2}, kSkipped, true, kClamped}),
                    with_trained_base({"base", 6, 2, 3, 5, 7, {2, 0, 2}, kSkipped}),
                    with_trained_base(
                        with_biases({"base_gpt_oss", 6, 3, 2, 5, 7, {2, 2, 2}, kDuplicates, true, kClamped}))),
    [](const auto& instance) { return instance.param.name; });

// By hand: one token, one expert, every size 1, no LoRA, g = 2, u = 6, h = 6 silu(2), d = 5 h, y = 0.5 d.
TEST(Reference, OneOfEverythingByHand) {
  Layer layer;
  layer.experts = layer.hidden = layer.intermediate = 1;
  layer.gate = {1};
  layer.up = {3};
  layer.down = {5};
  const Batch batch{1, 1, {2}, {0}, {0.5}, {1}};
  const Results out = reference::step(layer, batch);
  const double s = 1 / (1 + std::exp(-2.0));
  EXPECT_NEAR(out[reference::kY][0], 0.5 * 5 * 6 * 2 * s, 1e-14);
  EXPECT_NEAR(out[reference::kGradW][0], 5 * 6 * 2 * s, 1e-14);
  // y = 0.5 * 5 * 3x * x sigmoid(x), so y' = 7.5 (2 x s + x^2 s (1 - s)).
  EXPECT_NEAR(out[reference::kGradX][0], 7.5 * (4 * s + 4 * s * (1 - s)), 1e-13);
}

TEST(Reference, ClampedActivationByHand) {
  const reference::Glu glu{reference::Glu::kClamped, 7.0, 1.702};
  const double s = 1 / (1 + std::exp(-1.702 * 7.0));
  EXPECT_NEAR(reference::glu_forward(glu, 9.0, -8.0), (-7.0 + 1) * 7.0 * s, 1e-14);
  const reference::GluGradient cut = reference::glu_backward(glu, 9.0, -8.0);
  EXPECT_EQ(cut.g, 0);
  EXPECT_EQ(cut.u, 0);
  // Nothing is cut from below in the gate, and the bounds themselves pass the gradient.
  EXPECT_NE(reference::glu_backward(glu, -9.0, 0.0).g, 0);
  EXPECT_NE(reference::glu_backward(glu, 7.0, 7.0).g, 0);
  EXPECT_NE(reference::glu_backward(glu, 7.0, -7.0).u, 0);
}

TEST(Reference, RoundsToBf16HalfToEven) {
  EXPECT_EQ(reference::round_to_bf16(1.0), 1.0);
  EXPECT_EQ(reference::round_to_bf16(1.0 + 0x1p-8), 1.0);                   // a tie, down to even
  EXPECT_EQ(reference::round_to_bf16(1.0 + 3 * 0x1p-8), 1.0 + 4 * 0x1p-8);  // a tie, up to even
  EXPECT_EQ(reference::round_to_bf16(1.0 + 0x1.8p-8), 1.0 + 0x1p-7);
  EXPECT_EQ(reference::round_to_bf16(-1.0 - 0x1.8p-8), -1.0 - 0x1p-7);
  EXPECT_EQ(reference::round_to_bf16(2.0 - 0x1p-9), 2.0);  // carries into the exponent
  EXPECT_EQ(reference::round_to_bf16(0.0), 0.0);
}

}  // namespace
}  // namespace sft_test
