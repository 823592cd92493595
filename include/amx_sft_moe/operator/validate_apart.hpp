// Gradients of base weights have memory of their own: writing one must not change what the pass still reads, nor
// another gradient. Tensors as large as the weights themselves are easily given twice, such as the weight in place
// of its gradient.
#pragma once

#include "amx_sft_moe/core/overlap.hpp"
#include "amx_sft_moe/moe/base_weights.hpp"
#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/moe/saved_activations.hpp"
#include "amx_sft_moe/operator/config.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace validate {

template <bool Const>
Footprint footprint(const BasicAnyMatrix<Const>& m) {
  if (m.empty()) return {};
  return m.visit([&](const auto* data) -> Footprint {
    return {data, size_of(m.dtype()), {Extent{1, 0}, {m.rows(), m.row_stride()}, {m.cols(), m.col_stride()}}};
  });
}
template <bool Const>
Footprint footprint(const BasicAnyExpertTensor<Const>& t) {
  if (t.empty()) return {};
  const auto first = t[0];
  return first.visit([&](const auto* data) -> Footprint {
    return {data,
            size_of(t.dtype()),
            {Extent{t.experts(), t.expert_stride()}, {t.rows(), t.row_stride()}, {t.cols(), t.col_stride()}}};
  });
}
template <class T>
Footprint footprint(const MatrixView<T>& m) {
  if (m.data == nullptr) return {};
  return {m.data, sizeof(T), {Extent{1, 0}, {m.rows, m.row_stride}, {m.cols, 1}}};
}
template <class T>
Footprint footprint(const ExpertMatrices<const T>& weights, index_t experts) {
  return {weights.base,
          sizeof(T),
          {Extent{experts, weights.expert_stride}, {weights.rows, weights.row_stride}, {weights.cols, 1}}};
}

// The wanted gradients of base weights, and the checks of one of them against everything else.
class WeightGradientMemory {
 public:
  explicit WeightGradientMemory(const WeightGradients& grads)
      : own_{{{"grads.weights.gate", footprint(grads.gate)},
              {"grads.weights.up", footprint(grads.up)},
              {"grads.weights.down", footprint(grads.down)}}} {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      for (std::size_t j = i + 1; j < own_.size(); ++j) expect_apart(own_[j], own_[i].name, own_[i].memory);
    }
  }

  void expect_apart_from(std::string_view name, const Footprint& other) const {
    for (const Named& own : own_) expect_apart(own, name, other);
  }
  template <class T>
  void expect_apart_from(std::string_view name, const ExpertMatrices<const T>& weights, index_t experts) const {
    if (weights.pointers == nullptr) return expect_apart_from(name, footprint(weights, experts));
    for (index_t e = 0; e < experts; ++e) expect_apart_from(name, footprint(weights[e]));
  }

 private:
  struct Named {
    std::string_view name;
    Footprint memory;
  };

  static void expect_apart(const Named& own, std::string_view name, const Footprint& other) {
    if (!memory_overlaps(own.memory, other)) return;
    throw ArgumentError(concat(own.name, ": expected memory of its own, got memory that ", name, " has too"));
  }

  std::array<Named, 3> own_;
};

// Everything that a backward reads from its caller or writes for it, but for expert ids.
template <class Weight, class Stored>
void weight_gradients_apart(const Gradients& grads, const Config& config, const BaseWeights<Weight>& weights,
                            const LoraWeights& lora, const Routing& routing, const AnyConstMatrix& x,
                            const SavedActivations<Stored>& saved, const AnyConstMatrix& grad_y) {
  if (!grads.weights.wanted()) return;
  const WeightGradientMemory memory(grads.weights);
  memory.expect_apart_from("weights.gate", weights.gate, config.num_experts);
  memory.expect_apart_from("weights.up", weights.up, config.num_experts);
  memory.expect_apart_from("weights.down", weights.down, config.num_experts);
  const auto each = [&](auto... named) {
    (memory.expect_apart_from(named.first, footprint(named.second)), ...);
  };
  using std::pair;
  each(pair("weights.biases.gate", weights.biases.gate), pair("weights.biases.up", weights.biases.up),
       pair("weights.biases.down", weights.biases.down), pair("lora.gate.a", lora.gate.a),
       pair("lora.gate.b", lora.gate.b), pair("lora.up.a", lora.up.a), pair("lora.up.b", lora.up.b),
       pair("lora.down.a", lora.down.a), pair("lora.down.b", lora.down.b),
       pair("routing.weights", routing.weights), pair("x", x), pair("grad_y", grad_y),
       pair("saved.gate", saved.gate), pair("saved.up", saved.up), pair("saved.u_gate", saved.u_gate),
       pair("saved.u_up", saved.u_up), pair("saved.u_down", saved.u_down));
  each(pair("grads.x", grads.x), pair("grads.routing_weights", grads.routing_weights),
       pair("grads.lora.gate_a", grads.lora.gate_a), pair("grads.lora.gate_b", grads.lora.gate_b),
       pair("grads.lora.up_a", grads.lora.up_a), pair("grads.lora.up_b", grads.lora.up_b),
       pair("grads.lora.down_a", grads.lora.down_a), pair("grads.lora.down_b", grads.lora.down_b),
       pair("grads.biases.gate", grads.biases.gate), pair("grads.biases.up", grads.biases.up),
       pair("grads.biases.down", grads.biases.down));
}

}  // namespace validate
AMX_SFT_MOE_NAMESPACE_END
