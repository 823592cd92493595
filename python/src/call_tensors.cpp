#include "call_tensors.hpp"

#include <utility>

namespace amx_sft_moe::python {

Tensor read_rows(py::handle object, std::string_view argument, index_t tokens, index_t hidden) {
  Tensor tensor = read_tensor(object, argument);
  require_float(tensor, argument);
  require_shape(tensor, argument, {tokens, hidden});
  return tensor;
}

RoutingTensors::RoutingTensors(py::handle ids_object, py::handle weights_object, index_t tokens, index_t top_k)
    : expert_ids(read_tensor(ids_object, "expert_ids")),
      weights(read_tensor(weights_object, "routing_weights")) {
  view.tokens = tokens;
  view.expert_ids = input_ids(expert_ids, "expert_ids", tokens, top_k, gathered_ids);
  view.weights = input_weights(weights, "routing_weights", tokens, top_k, gathered_weights);
}

index_t RoutingTensors::routed_rows(const Config& config) const {
  index_t rows = 0;
  for (index_t t = 0; t < view.tokens; ++t) {
    for (index_t slot = 0; slot < config.top_k; ++slot) {
      const std::int64_t e = view.expert_ids.at(t, slot);
      rows += e >= 0 && e < config.num_experts ? 1 : 0;
    }
  }
  return rows;
}

InputTensors::InputTensors(py::handle x_object, py::handle expert_ids, py::handle routing_weights,
                           const Config& config)
    : x(read_rows(x_object, "x", kAnyExtent, config.hidden_size)),
      x_view(input_matrix(x, "x", x.shape[0], config.hidden_size)),
      routing(expert_ids, routing_weights, x.shape[0], config.top_k) {}

ParameterTensors::ParameterTensors(const ParameterObjects& from, const Config& config,
                                   const LoraOptions& options)
    : objects(from), lora(read_lora(from.lora, config, options)), biases(read_biases(from.biases, config)) {}

Gradients bind_gradients(const Config& config, const GradientTypes& types, const ParameterTensors& parameters,
                         const BaseTensors& base, const GradientSource& source) {
  Gradients grads;
  const index_t hidden = config.hidden_size;
  if (const auto t = source(kGradX, "grad_x", types.x, {types.tokens, hidden})) {
    grads.x = output_matrix(*t, "out.grad_x", types.tokens, hidden);
  }
  if (const auto t = source(kGradRoutingWeights, "grad_routing_weights", types.routing_weights,
                            {types.tokens, config.top_k})) {
    require_float(*t, "out.grad_routing_weights");
    require_shape(*t, "out.grad_routing_weights", {types.tokens, config.top_k});
    grads.routing_weights = output_columns(*t, "out.grad_routing_weights", 0, config.top_k);
  }
  const LoraObjects& objects = parameters.objects.lora;
  const LoraTensors& lora = parameters.lora;
  for (std::size_t f = 0; f < kFactorCount; ++f) {
    const auto& factor = lora.factors[f];
    if (!factor || (f == kUpA && lora.views.gate_up_share_a())) continue;
    if (const auto t = source(kGradFactors + f, objects.name(f), factor->dtype(),
                              {factor->shape[0], factor->shape[1], factor->shape[2]})) {
      bind_gradient(grads.lora, objects, lora, f, *t, config.intermediate_size);
    }
  }
  for (std::size_t b = 0; b < kBiasCount; ++b) {
    const auto& bias = parameters.biases.tensors[b];
    if (!bias) continue;
    if (const auto t =
            source(kGradBiases + b, BiasObjects::name(b), bias->dtype(), {bias->shape[0], bias->shape[1]})) {
      bind_bias_gradient(grads.biases, b, *t, config);
    }
  }
  for (std::size_t w = 0; w < kBaseWeightCount; ++w) {
    if (!has_weight(base, w)) continue;
    const auto [experts, rows, cols] = shape_of_weight(w, config);
    if (const auto t = source(kGradWeights + w, name_of_weight(w), base.dtype, {experts, rows, cols})) {
      bind_weight_gradient(grads.weights, w, *t, config);
    }
  }
  return grads;
}

namespace {
constexpr index_t kElementsPerLine = 32;
}

index_t SavedLayout::extent(index_t cols) const {
  return round_up(rows_ * cols, kElementsPerLine);
}

index_t SavedLayout::elements() const {
  return 2 * extent(inner_) + extent(lora_.gate.rank()) + extent(lora_.up.rank()) + extent(lora_.down.rank());
}

AnySavedActivations SavedLayout::views(void* data) const {
  AnySavedActivations saved;
  index_t offset = 0;
  saved.gate = next(data, offset, inner_);
  saved.up = next(data, offset, inner_);
  saved.u_gate = next(data, offset, lora_.gate.rank());
  saved.u_up = next(data, offset, lora_.up.rank());
  saved.u_down = next(data, offset, lora_.down.rank());
  return saved;
}

AnyMatrix SavedLayout::next(void* data, index_t& offset, index_t cols) const {
  const index_t begin = std::exchange(offset, offset + extent(cols));
  if (cols == 0) return {};
  if (dtype_ == DType::kBf16) return {static_cast<bf16*>(data) + begin, rows_, cols, cols};
  return {static_cast<float*>(data) + begin, rows_, cols, cols};
}

}  // namespace amx_sft_moe::python
