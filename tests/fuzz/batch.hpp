// One batch with what its step must give, and the comparison of what a backward wrote or added.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "compare.hpp"
#include "fail.hpp"
#include "problem.hpp"

namespace sft_fuzz {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using sft_test::Expected;
using sft_test::Outputs;
using sft_test::Problem;

// What a backward may find in the memory of a parameter's gradient: of either sign, zeros among them, of about
// a gradient's size, and exact in bf16. Not the same along rows as along columns.
inline std::vector<double> found_before(const sft_test::Tensor& tensor) {
  std::vector<double> values(static_cast<std::size_t>(tensor.count()));
  for (std::size_t n = 0; n < values.size(); ++n) values[n] = 0.375 * static_cast<double>(n % 7) - 1.125;
  return values;
}

inline void fill_sums(Outputs& out) {
  for (std::size_t t = reference::kGateA; t < reference::kTensors; ++t) {
    sft_test::Tensor& tensor = out[static_cast<reference::Tensor>(t)];
    tensor.store(found_before(tensor));
  }
}

// Whether rounding may move a value across its clamp's bound, where slopes jump.
inline bool is_near(const std::vector<double>& values, double limit, double rounding) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  const double error = rounding * (limit + std::sqrt(squares / static_cast<double>(values.size())));
  return std::ranges::any_of(values, [&](double value) { return std::abs(value - limit) <= error; });
}

inline bool is_near_a_clamp(const Problem& problem) {
  const reference::Layer& layer = problem.layer();
  const reference::Batch& batch = problem.batch();
  if (layer.glu.form != reference::Glu::kClamped) return false;
  std::vector<double> gates, ups;
  reference::Exact exact;
  for (std::size_t route = 0; route < batch.ids.size(); ++route) {
    if (reference::is_skipped(layer, batch.ids[route])) continue;
    const int token = static_cast<int>(route) / batch.top_k;
    const reference::Vector x = reference::row_of(batch.x, token, layer.hidden);
    const reference::Route made = reference::forward_route(layer, x, batch.ids[route], exact);
    gates.insert(gates.end(), made.g.begin(), made.g.end());
    for (const double up : made.u) ups.push_back(std::abs(up));
  }
  // Ten times bf16's rounding, which x, factors and sums may each have had; fp32's of sums of tens of terms.
  const double rounding = problem.weight_dtype() == DType::kBf16 ? 2e-2 : 2e-5;
  return is_near(gates, layer.glu.limit, rounding) || is_near(ups, layer.glu.limit, rounding);
}

// Whether a gradient has a factor that is the slope of the activation.
inline bool has_slope(reference::Tensor which) {
  using namespace reference;  // NOLINT(google-build-using-namespace)
  const reference::Tensor without[] = {kGradW, kDownA, kDownB, kDownBias, kDownWeight};
  return std::ranges::find(without, which) == std::end(without);
}

// Runs of the reference that tolerances come from. Where a sum of few errors is a whole tensor, four in a row are now and
// then twenty times smaller than rounding makes them (less than a million calls met it); sixteen hardly are, and such
// problems are small.
inline unsigned runs_for(const Problem& problem) {
  const reference::Layer& layer = problem.layer();
  const int routes = static_cast<int>(problem.batch().ids.size());
  return std::min({layer.hidden, layer.intermediate, routes}) < 5 ? 16 : 4;
}

struct Batch {
  Problem problem;
  std::size_t adapters;  // which of the operator's it is for

  Batch(Problem made, std::size_t adapters_)
      : problem(std::move(made)),
        adapters(adapters_),
        expected_(expected_step(problem, runs_for(problem))),
        near_a_clamp_(is_near_a_clamp(problem)) {
    // Tolerances come from a few samples of rounding, and there are a million calls: seldom is not never.
    for (std::size_t t = 0; t < reference::kTensors; ++t) {
      expected_.frobenius[t] = 8 * expected_.frobenius[t] + 1e-30;
      expected_.largest[t] = 8 * expected_.largest[t] + 1e-30;
    }
  }

  int tokens() const { return problem.batch().tokens; }

  void expect_y(const Outputs& out) const {
    expect_close(expected_, reference::kY, out[reference::kY]);
    if (!out[reference::kY].gaps_are_poison()) fail("something was written between the rows of y");
  }

  // All gradients: those that `grads` asks for, and that the others were left alone.
  void expect_gradients(const Outputs& out, const Gradients& grads) const {
    Outputs untouched(problem);
    if (grads.accumulate) fill_sums(untouched);
    for (std::size_t t = reference::kGradX; t < reference::kTensors; ++t) {
      const auto which = static_cast<reference::Tensor>(t);
      if (is_wanted(grads, which)) {
        expect_gradient(which, out[which], grads);
      } else if (out[which].bits() != untouched[which].bits()) {
        fail("a gradient that is not wanted was written");
      }
    }
    if (!out.gaps_are_poison()) fail("something was written between the rows of a result");
  }

 private:
  static bool is_wanted(const Gradients& grads, reference::Tensor which) {
    const LoraGradients& lora = grads.lora;
    const bool wanted[] = {false,
                           !grads.x.empty(),
                           !grads.routing_weights.empty(),
                           !lora.gate_a.empty(),
                           !lora.gate_b.empty(),
                           !lora.up_a.empty(),
                           !lora.up_b.empty(),
                           !lora.down_a.empty(),
                           !lora.down_b.empty(),
                           !grads.biases.gate.empty(),
                           !grads.biases.up.empty(),
                           !grads.biases.down.empty(),
                           !grads.weights.gate.empty(),
                           !grads.weights.up.empty(),
                           !grads.weights.down.empty()};
    return wanted[which];
  }

  void expect_gradient(reference::Tensor which, const sft_test::Tensor& got, const Gradients& grads) const {
    if (near_a_clamp_ && has_slope(which)) return expect_written(which, got);
    if (which < reference::kGateA) return expect_close(expected_, which, got);  // neither scaled nor added
    expect_part(which, got,
                grads.accumulate ? found_before(got) : std::vector<double>(expected_.values[which].size()),
                static_cast<double>(grads.scale));
  }

  // That `got` is `before` and `scale` times the gradient: what was added is compared, so that adding nothing
  // must be exact.
  void expect_part(reference::Tensor which, const sft_test::Tensor& got, const std::vector<double>& before,
                   double scale) const {
    Expected scaled;  // of this tensor alone
    scaled.values[which] = expected_.values[which];
    scaled.must_be_zero[which] = expected_.must_be_zero[which];
    for (double& value : scaled.values[which]) value *= scale;
    std::vector<double> part = got.values();
    if (part.size() != before.size()) fail("a gradient has another size than the reference's");
    double squares = 0, largest = 0;
    for (std::size_t n = 0; n < part.size(); ++n) {
      part[n] -= before[n];
      squares += before[n] * before[n];
      largest = std::max(largest, std::abs(before[n]));
    }
    const double rounding = got.dtype() == DType::kBf16 ? 0x1p-8 : 0x1p-22;  // of the sum
    scaled.frobenius[which] = std::abs(scale) * expected_.frobenius[which] + rounding * std::sqrt(squares);
    scaled.largest[which] = std::abs(scale) * expected_.largest[which] + rounding * largest;
    sft_test::Tensor added(DType::kFp32, got.extents(), sft_test::Strides::rows(got.extents()));
    added.store(part);
    expect_close(scaled, which, added);
  }

  // What is not written is still poison, a NaN.
  void expect_written(reference::Tensor which, const sft_test::Tensor& got) const {
    const std::vector<double>& wanted = expected_.values[which];
    const std::vector<double> values = got.values();
    if (values.size() != wanted.size()) fail("a gradient has another size than the reference's");
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (std::isfinite(wanted[n]) && !std::isfinite(values[n]))
        fail("a gradient is not finite, or not written");
    }
  }

  Expected expected_;
  bool near_a_clamp_;
};

}  // namespace sft_fuzz
