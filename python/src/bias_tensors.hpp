// Biases of the projections and their gradients between Python and the library. Like LoRA factors they are
// looked at anew in each call, so a moved or trained bias needs no further call.
#pragma once

#include <array>
#include <optional>

#include "tensor.hpp"

namespace amx_sft_moe::python {

// Order of the biases everywhere. kGateUpBias [E, 2I], gate entries first, stands for the first two.
enum Bias : std::size_t { kGateBias, kUpBias, kDownBias, kGateUpBias, kBiasCount };

// What the caller gave: [E, out] in bfloat16 or float32 with any strides, None for a bias that is not there.
struct BiasObjects {
  std::array<py::object, kBiasCount> tensors{py::none(), py::none(), py::none(), py::none()};

  static std::string_view name(std::size_t bias);
};

// The biases of one call: checked, and as the library's views.
struct BiasTensors {
  ExpertBiases views;
  std::array<std::optional<Tensor>, kBiasCount> tensors;
};

BiasTensors read_biases(const BiasObjects& objects, const Config& config);

// Makes `tensor`, which must have the bias's shape, the place of the gradient of `bias`.
void bind_bias_gradient(BiasGradients& gradients, std::size_t bias, const Tensor& tensor, const Config& config);

}  // namespace amx_sft_moe::python
