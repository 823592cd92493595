// The experts of one layer in a checkpoint of `transformers`, as views of the mapped file.
#pragma once

#include <amx_sft_moe/amx_sft_moe.hpp>
#include <array>

#include "safetensors.hpp"

namespace mmap_safetensors {

using amx_sft_moe::BaseWeights;
using amx_sft_moe::bf16;
using amx_sft_moe::ExpertMatrices;
using amx_sft_moe::index_t;

template <class T>
inline constexpr const char* kDTypeName = std::is_same_v<T, float> ? "F32" : "BF16";

// Names of a layer's tensors: one per expert and projection, or all experts of the layer in one.
struct LayerNames {
  std::string prefix;  // model.layers.N.mlp.experts.

  explicit LayerNames(index_t layer) : prefix("model.layers." + std::to_string(layer) + ".mlp.experts.") {}
  std::string gate_up() const { return prefix + "gate_up_proj"; }  // [E, 2I, H]
  std::string down() const { return prefix + "down_proj"; }        // [E, H, I]
  std::string of(index_t expert, const char* projection) const {   // gate, up [I, H]; down [H, I]
    return prefix + std::to_string(expert) + "." + projection + "_proj.weight";
  }
};

struct LayerShape {
  bool fused = false;
  std::string dtype;
  index_t experts = 0, intermediate = 0, hidden = 0;
};

inline LayerShape shape_of_layer(const SafetensorsFile& file, index_t layer) {
  const LayerNames names(layer);
  LayerShape shape;
  shape.fused = file.has(names.gate_up());
  const std::string first = shape.fused ? names.gate_up() : names.of(0, "gate");
  const Tensor& tensor = file.at(first);
  shape.dtype = tensor.dtype;
  if (tensor.shape.size() != (shape.fused ? 3 : 2))
    throw Error(first + ": expected [E, 2I, H], or [I, H] of one expert");
  shape.hidden = static_cast<index_t>(tensor.shape.back());
  if (shape.fused) {
    shape.experts = static_cast<index_t>(tensor.shape[0]);
    shape.intermediate = static_cast<index_t>(tensor.shape[1] / 2);
  } else {
    shape.intermediate = static_cast<index_t>(tensor.shape[0]);
    while (file.has(names.of(shape.experts, "gate"))) ++shape.experts;
  }
  // With all of them above 0 a tensor that the file has room for has no product that overflows.
  if (shape.experts == 0 || shape.intermediate == 0 || shape.hidden == 0)
    throw Error(first + ": expected no dimension of 0");
  return shape;
}

// Owns the arrays of pointers that the views of separate tensors need; the weights stay in the file.
template <class T>
class ExpertsOfLayer {
 public:
  ExpertsOfLayer(const SafetensorsFile& file, index_t layer) : file_(file), names_(layer) {
    const LayerShape shape = shape_of_layer(file, layer);
    shape.fused ? view_fused(shape) : view_separate(shape);
  }
  ExpertsOfLayer(const ExpertsOfLayer&) = delete;
  ExpertsOfLayer& operator=(const ExpertsOfLayer&) = delete;

  const BaseWeights<T>& weights() const { return weights_; }

 private:
  const T* elements(const std::string& name, std::initializer_list<index_t> shape) const {
    return file_.elements<T>(name, kDTypeName<T>, {shape.begin(), shape.end()});
  }

  void view_fused(const LayerShape& s) {
    const index_t half = s.intermediate * s.hidden;
    const T* gate_up = elements(names_.gate_up(), {s.experts, 2 * s.intermediate, s.hidden});
    const T* down = elements(names_.down(), {s.experts, s.hidden, s.intermediate});
    weights_.gate = {gate_up, nullptr, 2 * half, s.intermediate, s.hidden, s.hidden};
    weights_.up = {gate_up + half, nullptr, 2 * half, s.intermediate, s.hidden, s.hidden};
    weights_.down = ExpertMatrices<const T>::stacked(down, s.hidden, s.intermediate);
  }

  void view_separate(const LayerShape& s) {
    for (index_t e = 0; e < s.experts; ++e) {
      gate_.push_back(elements(names_.of(e, "gate"), {s.intermediate, s.hidden}));
      up_.push_back(elements(names_.of(e, "up"), {s.intermediate, s.hidden}));
      down_.push_back(elements(names_.of(e, "down"), {s.hidden, s.intermediate}));
    }
    weights_.gate = ExpertMatrices<const T>::per_expert(gate_.data(), s.intermediate, s.hidden);
    weights_.up = ExpertMatrices<const T>::per_expert(up_.data(), s.intermediate, s.hidden);
    weights_.down = ExpertMatrices<const T>::per_expert(down_.data(), s.hidden, s.intermediate);
  }

  const SafetensorsFile& file_;
  LayerNames names_;
  std::vector<const T*> gate_, up_, down_;
  BaseWeights<T> weights_;
};

}  // namespace mmap_safetensors
