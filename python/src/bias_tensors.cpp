#include "bias_tensors.hpp"

namespace amx_sft_moe::python {
namespace {

constexpr std::array<std::string_view, kBiasCount> kBiasNames{"gate_bias", "up_bias", "down_bias",
                                                              "gate_up_bias"};

index_t length_of(std::size_t bias, const Config& config) {
  if (bias == kDownBias) return config.hidden_size;
  return bias == kGateUpBias ? 2 * config.intermediate_size : config.intermediate_size;
}

Tensor read_bias(py::handle object, std::string_view name, index_t experts, index_t length) {
  if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) {
    throw TypeMismatch(concat(name, ": expected one tensor [", experts, ", ", length, "], got a ",
                              type_name(object), " of ", py::len(object),
                              " (one vector per expert is not supported: stack them)"));
  }
  Tensor tensor = read_tensor(object, name);
  require_float(tensor, name);
  require_shape(tensor, name, {experts, length});
  return tensor;
}

}  // namespace

std::string_view BiasObjects::name(std::size_t bias) {
  return kBiasNames[bias];
}

BiasTensors read_biases(const BiasObjects& objects, const Config& config) {
  BiasTensors biases;
  const auto& given = objects.tensors;
  if (!given[kGateUpBias].is_none() && !(given[kGateBias].is_none() && given[kUpBias].is_none())) {
    throw TypeMismatch("biases: expected either gate_up_bias or gate_bias and up_bias, got both forms");
  }
  for (std::size_t b = 0; b < kBiasCount; ++b) {
    if (!given[b].is_none()) {
      biases.tensors[b] = read_bias(given[b], kBiasNames[b], config.num_experts, length_of(b, config));
    }
  }
  const index_t inner = config.intermediate_size;
  const auto& [gate, up, down, gate_up] = biases.tensors;
  if (gate) biases.views.gate = input_columns(*gate, 0, inner);
  if (up) biases.views.up = input_columns(*up, 0, inner);
  if (down) biases.views.down = input_columns(*down, 0, config.hidden_size);
  if (gate_up) {
    biases.views.gate = input_columns(*gate_up, 0, inner);
    biases.views.up = input_columns(*gate_up, inner, inner);
  }
  return biases;
}

void bind_bias_gradient(BiasGradients& gradients, std::size_t bias, const Tensor& tensor,
                        const Config& config) {
  const std::string name = concat("out.", kBiasNames[bias]);
  const index_t length = length_of(bias, config);
  require_float(tensor, name);
  require_shape(tensor, name, {config.num_experts, length});
  switch (bias) {
    case kGateBias:
      gradients.gate = output_columns(tensor, name, 0, length);
      break;
    case kUpBias:
      gradients.up = output_columns(tensor, name, 0, length);
      break;
    case kDownBias:
      gradients.down = output_columns(tensor, name, 0, length);
      break;
    default:
      gradients.gate = output_columns(tensor, name, 0, length / 2);
      gradients.up = output_columns(tensor, name, length / 2, length / 2);
  }
}

}  // namespace amx_sft_moe::python
