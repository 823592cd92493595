// LoRA factors and their gradients between Python and the library. Factors are looked at anew in each call, so
// an optimiser step, a moved parameter or an unsharded one needs no further call.
#pragma once

#include <array>
#include <optional>

#include "tensor.hpp"

namespace amx_sft_moe::python {

// Order of the factors everywhere. In the shared form kGateA and kGateB hold gate_up_lora_a [E, r, H] and
// gate_up_lora_b [E, 2I, r], and kUpA and kUpB are None.
enum Factor : std::size_t { kGateA, kGateB, kUpA, kUpB, kDownA, kDownB, kFactorCount };

// What set_lora was given. A projection without an adapter has None for both factors.
struct LoraObjects {
  bool shared_a = false;
  std::array<py::object, kFactorCount> factors{py::none(), py::none(), py::none(),
                                               py::none(), py::none(), py::none()};
  std::array<std::optional<float>, 3> scaling;  // gate, up, down; unset: alpha / r, or 1 without an alpha

  std::string_view name(std::size_t factor) const;
};

// What an operator was told about its factors.
struct LoraOptions {
  index_t rank = 0;  // of all of them; 0: as they come
  std::optional<float> alpha;
};

void require_finite(std::string_view argument, std::optional<float> value);

// The factors of one call: checked, and as the library's views.
struct LoraTensors {
  LoraWeights views;
  std::array<std::optional<Tensor>, kFactorCount> factors;
};

LoraTensors read_lora(const LoraObjects& objects, const Config& config, const LoraOptions& options);

// Makes `tensor`, which must have the factor's shape, the place of the gradient of `factor`.
void bind_gradient(LoraGradients& gradients, const LoraObjects& objects, const LoraTensors& lora,
                   std::size_t factor, const Tensor& tensor, index_t intermediate);

}  // namespace amx_sft_moe::python
