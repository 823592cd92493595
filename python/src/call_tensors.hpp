// What the calls of an operator have in common: inputs, parameters, saved activations and gradients of one
// call, read from Python objects and as the library's views.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base_weights.hpp"
#include "bias_tensors.hpp"
#include "lora_tensors.hpp"

namespace amx_sft_moe::python {

Tensor read_rows(py::handle object, std::string_view argument, index_t tokens, index_t hidden);

// The routing of one call, and what of it had to be gathered.
struct RoutingTensors {
  Tensor expert_ids, weights;
  std::vector<std::int64_t> gathered_ids;
  std::vector<float> gathered_weights;
  Routing view;

  RoutingTensors(py::handle ids_object, py::handle weights_object, index_t tokens, index_t top_k);
  RoutingTensors(const RoutingTensors&) = delete;
  RoutingTensors& operator=(const RoutingTensors&) = delete;

  index_t routed_rows(const Config& config) const;
};

// x [T, H] and where its rows go.
struct InputTensors {
  Tensor x;
  AnyConstMatrix x_view;
  RoutingTensors routing;

  InputTensors(py::handle x_object, py::handle expert_ids, py::handle routing_weights, const Config& config);
  index_t tokens() const { return x.shape[0]; }
};

// LoRA factors and biases, as objects and as read for one call.
struct ParameterObjects {
  LoraObjects lora;
  BiasObjects biases;
};
struct ParameterTensors {
  const ParameterObjects& objects;
  LoraTensors lora;
  BiasTensors biases;

  ParameterTensors(const ParameterObjects& from, const Config& config, const LoraOptions& options);
};

// Order of the gradients of a call: of x, of the routing weights, of the factors, of the biases and of the base
// weights.
enum GradientSlot : std::size_t {
  kGradX,
  kGradRoutingWeights,
  kGradFactors,
  kGradBiases = kGradFactors + kFactorCount,
  kGradWeights = kGradBiases + kBiasCount,
  kGradientCount = kGradWeights + kBaseWeightCount
};

// What the gradients of one call have in common with its inputs.
struct GradientTypes {
  index_t tokens;
  DType x, routing_weights;
};

// Gives the tensor that receives a gradient, or nothing where it is not wanted.
using GradientSource = std::function<std::optional<Tensor>(std::size_t slot, std::string_view name, DType dtype,
                                                           std::initializer_list<index_t> shape)>;

// Asks `source` for every gradient that exists for these parameters and weights.
Gradients bind_gradients(const Config& config, const GradientTypes& types, const ParameterTensors& parameters,
                         const BaseTensors& base, const GradientSource& source);

// Caller-owned activations in one flat tensor, each part on a cache line of its own.
class SavedLayout {
 public:
  SavedLayout(const AnySftMoe& moe, const LoraWeights& lora, index_t rows)
      : rows_(rows), dtype_(moe.stored_dtype()), inner_(moe.config().intermediate_size), lora_(lora) {}

  index_t elements() const;
  DType dtype() const { return dtype_; }
  AnySavedActivations views(void* data) const;

 private:
  index_t extent(index_t cols) const;
  AnyMatrix next(void* data, index_t& offset, index_t cols) const;

  index_t rows_;
  DType dtype_;
  index_t inner_;
  const LoraWeights& lora_;
};

}  // namespace amx_sft_moe::python
