// Gradients of the whole model against differences of its loss, some entries of every parameter.
#pragma once

#include <cmath>
#include <iostream>
#include <limits>

#include "model.hpp"

namespace char_model {

class GradientCheck {
 public:
  GradientCheck(Model& model, const Batch& batch) : model_(model), batch_(batch) {}

  // Prints one line for each parameter; returns the largest relative deviation of all, NaN where any of them is.
  double run() {
    model_.loss(batch_, Model::Mode::kTrain);
    model_.backward(batch_);
    double worst = 0;
    for (Parameter* parameter : model_.parameters()) {
      const double deviation = deviation_of(*parameter);
      std::cout << "  " << parameter->name << ": " << deviation << "\n";
      worst = larger(worst, deviation);
    }
    return worst;
  }

 private:
  static constexpr std::size_t kEntries = 6;

  // NaN where either is, which std::max would lose.
  static double larger(double a, double b) { return std::isnan(a) || a >= b ? a : b; }

  // The entries with the largest gradients, where fp32 differences of a loss mean something. Relative to the
  // largest of them.
  double deviation_of(Parameter& parameter) {
    std::vector<std::size_t> entries(parameter.grad.size());
    std::iota(entries.begin(), entries.end(), std::size_t{0});
    const auto size = [&parameter](std::size_t i) { return std::fabs(parameter.grad[i]); };
    // NaN has no place in an order: sorting needs numbers.
    for (const float grad : parameter.grad) {
      if (!std::isfinite(grad)) return std::numeric_limits<double>::quiet_NaN();
    }
    std::partial_sort(entries.begin(), entries.begin() + kEntries, entries.end(),
                      [&size](std::size_t a, std::size_t b) { return size(a) > size(b); });
    if (size(entries[0]) == 0.0F) return 1.0;  // nothing of the loss reaches it: as wrong as can be
    double worst = 0;
    for (std::size_t i = 0; i < kEntries; ++i) {
      const double difference = derivative(parameter.value[entries[i]]) - parameter.grad[entries[i]];
      worst = larger(worst, std::fabs(difference) / size(entries[0]));
    }
    return worst;
  }

  // Central differences of fourth order. Which experts a token goes to is a step function of the parameters, so
  // routes are held.
  double derivative(float& value) {
    const float step = 0.02F * std::max(1.0F, std::fabs(value));
    return (8.0 * difference(value, step) - difference(value, 2 * step)) / (12.0 * static_cast<double>(step));
  }
  double difference(float& value, float step) {
    const float kept = value;
    value = kept + step;
    const double above = model_.loss(batch_, Model::Mode::kEvaluateAtLastRoutes);
    value = kept - step;
    const double below = model_.loss(batch_, Model::Mode::kEvaluateAtLastRoutes);
    value = kept;
    return above - below;
  }

  Model& model_;
  const Batch& batch_;
};

}  // namespace char_model
