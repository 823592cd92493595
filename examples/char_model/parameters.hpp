// What is trained: named arrays with gradients, and AdamW over them.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace char_model {

using Floats = std::vector<float>;

struct Parameter {
  std::string name;
  Floats value, grad;
  Floats first_moment, second_moment;  // AdamW's

  Parameter(std::string parameter_name, std::size_t size)
      : name(std::move(parameter_name)), value(size), grad(size), first_moment(size), second_moment(size) {}
};

inline void fill_normal(Floats& values, float deviation, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0.0F, deviation);
  for (float& value : values) value = normal(random);
}

// Loshchilov and Hutter 2019 (arXiv 1711.05101): decay apart from the adaptive step.
struct AdamW {
  float learning_rate = 6e-3F;
  float beta1 = 0.9F;
  float beta2 = 0.99F;
  float epsilon = 1e-8F;
  float weight_decay = 0.01F;

  // `step` counts from 1; `schedule` multiplies the learning rate.
  void update(const std::vector<Parameter*>& parameters, int step, float schedule) const {
    const float correction1 = 1.0F - std::pow(beta1, static_cast<float>(step));
    const float correction2 = 1.0F - std::pow(beta2, static_cast<float>(step));
    const float rate = learning_rate * schedule;
    for (Parameter* parameter : parameters) {
      Parameter& p = *parameter;
      for (std::size_t i = 0; i < p.value.size(); ++i) {
        p.first_moment[i] = beta1 * p.first_moment[i] + (1.0F - beta1) * p.grad[i];
        p.second_moment[i] = beta2 * p.second_moment[i] + (1.0F - beta2) * p.grad[i] * p.grad[i];
        const float size = std::sqrt(p.second_moment[i] / correction2) + epsilon;
        p.value[i] -= rate * (p.first_moment[i] / correction1 / size + weight_decay * p.value[i]);
      }
    }
  }
};

}  // namespace char_model
