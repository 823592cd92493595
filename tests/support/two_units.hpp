// What both units of test_two_units do with the library.
#pragma once

#include <cstdint>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace sft_test {

// One token through one expert with all weights zero.
inline std::vector<float> run_tiny_layer_here() {
  using namespace amx_sft_moe;
  const float zero = 0;
  const auto matrix = ExpertMatrices<const float>::stacked(&zero, 1, 1);
  Config config;
  config.num_experts = config.top_k = config.hidden_size = config.intermediate_size = 1;
  const float one = 1;
  const std::int64_t id = 0;
  std::vector<float> y(1, 5);
  AMX_SFT_MOE<kernels::Portable<float>> moe(config, {matrix, matrix, matrix});
  moe.forward_sft({1, {&id, 1}, AnyConstMatrix(&one, 1, 1, 1)}, AnyConstMatrix(&one, 1, 1, 1),
                  AnyMatrix(y.data(), 1, 1, 1));
  float grad_x = 5;
  Gradients grads;
  grads.x = AnyMatrix(&grad_x, 1, 1, 1);
  moe.backward(AnyConstMatrix(&one, 1, 1, 1), grads);
  y[0] += grad_x;
  return y;
}

std::vector<float> run_tiny_layer_there();
void throw_argument_error_there();
const void* phases_there();

}  // namespace sft_test
