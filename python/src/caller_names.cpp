#include "caller_names.hpp"

#include <algorithm>
#include <cctype>

namespace amx_sft_moe::python {
namespace {

bool of_a_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.';
}

}  // namespace

CallerNames::CallerNames(const ParameterObjects& objects, const BaseTensors& base) {
  names_ = {{"routing.tokens", "x.shape[0]"},
            {"routing.weights", "routing_weights"},
            {"y", "out"},
            {"grads.x", "out.grad_x"},
            {"grads.routing_weights", "out.grad_routing_weights"},
            {"grads.scale", "scale"}};

  const auto name_of = [](bool fused, std::size_t together, std::size_t apart) {
    return fused ? together : apart;
  };
  const auto weight = [&](std::size_t apart) {
    return name_of_weight(name_of(base.fused, kGateUpProj, apart));
  };
  add_parameter("weights.gate", "weights.gate", weight(kGateProj));
  add_parameter("weights.up", "weights.up", weight(kUpProj));
  add_parameter("weights.down", "weights.down", name_of_weight(kDownProj));

  const bool fused_biases = !objects.biases.tensors[kGateUpBias].is_none();
  const auto bias = [&](std::size_t apart) {
    return BiasObjects::name(name_of(fused_biases, kGateUpBias, apart));
  };
  add_parameter("weights.biases.gate", "biases.gate", bias(kGateBias));
  add_parameter("weights.biases.up", "biases.up", bias(kUpBias));
  add_parameter("weights.biases.down", "biases.down", BiasObjects::name(kDownBias));

  const LoraObjects& lora = objects.lora;
  const auto factor = [&](std::size_t shared, std::size_t apart) {
    return lora.name(name_of(lora.shared_a, shared, apart));
  };
  add_parameter("lora.gate.a", "lora.gate_a", lora.name(kGateA));
  add_parameter("lora.gate.b", "lora.gate_b", lora.name(kGateB));
  add_parameter("lora.up.a", "lora.up_a", factor(kGateA, kUpA));
  add_parameter("lora.up.b", "lora.up_b", factor(kGateB, kUpB));
  add_parameter("lora.down.a", "lora.down_a", lora.name(kDownA));
  add_parameter("lora.down.b", "lora.down_b", lora.name(kDownB));
}

void CallerNames::add_parameter(std::string_view of_library, std::string_view of_gradient,
                                std::string_view of_caller) {
  names_.emplace_back(of_library, of_caller);
  names_.emplace_back(concat("grads.", of_gradient), concat("out.", of_caller));
}

std::string CallerNames::in(std::string_view message) const {
  std::string text;
  while (!message.empty()) {
    const auto begin = std::find_if(message.begin(), message.end(), of_a_name);
    const auto end = std::find_if_not(begin, message.end(), of_a_name);
    const std::string_view word(begin, end);
    const auto known =
        std::find_if(names_.begin(), names_.end(), [&](const auto& name) { return word == name.first; });
    text.append(message.begin(), begin);
    text.append(known == names_.end() ? word : known->second);
    message.remove_prefix(static_cast<std::size_t>(end - message.begin()));
  }
  return text;
}

}  // namespace amx_sft_moe::python
