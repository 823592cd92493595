// What a pass writes for its caller has memory of its own: writing it must not change what the pass still reads, nor what
// else it writes. A parameter is easily given in place of its gradient, or one tensor for two of them; tasks of several
// threads would write it. Two exceptions: grads.x and grads.routing_weights are the last to be written, at the same
// time, and may be memory of what the call brought and has been read by then: x, grad_y, routing weights, saved
// activations. Not of parameters, which later calls read too. And y may be x.
#pragma once

#include <array>
#include <utility>

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

struct NamedMemory {
  std::string_view name;
  Footprint memory;
};

// Tensors that are written, and the check of all of them against something else.
template <std::size_t Most>
class OwnMemory {
 public:
  bool empty() const { return count_ == 0; }

  template <class View>
  void add(std::string_view name, const View& written) {
    add(name, footprint(written));
  }
  void add(std::string_view name, const Footprint& memory) {
    if (memory.element == 0) return;
    expect_apart_from(name, memory);
    own_[count_++] = {name, memory};
  }
  void expect_apart_from(std::string_view name, const Footprint& other) const {
    for (std::size_t i = 0; i < count_; ++i) {
      if (!memory_overlaps(own_[i].memory, other)) continue;
      throw ArgumentError(
          concat(own_[i].name, ": expected memory of its own, got memory that ", name, " has too"));
    }
  }
  template <class T>
  void expect_apart_from(std::string_view name, const ExpertMatrices<const T>& weights, index_t experts) const {
    if (weights.pointers == nullptr) return expect_apart_from(name, footprint(weights, experts));
    for (index_t e = 0; e < experts; ++e) expect_apart_from(name, footprint(weights[e]));
  }

 private:
  std::array<NamedMemory, Most> own_;
  std::size_t count_ = 0;
};

// The wanted gradients of parameters.
inline OwnMemory<12> memory_of_gradients(const Gradients& grads) {
  OwnMemory<12> memory;
  memory.add("grads.lora.gate_a", grads.lora.gate_a);
  memory.add("grads.lora.gate_b", grads.lora.gate_b);
  memory.add("grads.lora.up_a", grads.lora.up_a);
  memory.add("grads.lora.up_b", grads.lora.up_b);
  memory.add("grads.lora.down_a", grads.lora.down_a);
  memory.add("grads.lora.down_b", grads.lora.down_b);
  memory.add("grads.biases.gate", grads.biases.gate);
  memory.add("grads.biases.up", grads.biases.up);
  memory.add("grads.biases.down", grads.biases.down);
  memory.add("grads.weights.gate", grads.weights.gate);
  memory.add("grads.weights.up", grads.weights.up);
  memory.add("grads.weights.down", grads.weights.down);
  return memory;
}

// With rows as slices: gradients whose rows take turns in one buffer are told apart also where strides alone do not tell.
inline Footprint footprint_of_rows(const AnyMatrix& m) {
  Footprint memory = footprint(m);
  std::swap(memory.dims[0], memory.dims[1]);
  return memory;
}

inline OwnMemory<2> memory_of_input_gradients(const Gradients& grads) {
  OwnMemory<2> memory;
  memory.add("grads.routing_weights", footprint_of_rows(grads.routing_weights));
  memory.add("grads.x", footprint_of_rows(grads.x));
  return memory;
}

// What outlives a pass and is read by the next one.
template <std::size_t Most, class Weight>
void expect_apart_from_parameters(const OwnMemory<Most>& memory, const Config& config,
                                  const BaseWeights<Weight>& weights, const LoraWeights& lora) {
  if (memory.empty()) return;
  memory.expect_apart_from("weights.gate", weights.gate, config.num_experts);
  memory.expect_apart_from("weights.up", weights.up, config.num_experts);
  memory.expect_apart_from("weights.down", weights.down, config.num_experts);
  memory.expect_apart_from("weights.biases.gate", footprint(weights.biases.gate));
  memory.expect_apart_from("weights.biases.up", footprint(weights.biases.up));
  memory.expect_apart_from("weights.biases.down", footprint(weights.biases.down));
  memory.expect_apart_from("lora.gate.a", footprint(lora.gate.a));
  memory.expect_apart_from("lora.gate.b", footprint(lora.gate.b));
  memory.expect_apart_from("lora.up.a", footprint(lora.up.a));
  memory.expect_apart_from("lora.up.b", footprint(lora.up.b));
  memory.expect_apart_from("lora.down.a", footprint(lora.down.a));
  memory.expect_apart_from("lora.down.b", footprint(lora.down.b));
}

// Everything that a pass reads from its caller, but for expert ids and what is named after these.
template <std::size_t Most, class Weight, class... Named>
void expect_apart_from_inputs(const OwnMemory<Most>& memory, const Config& config,
                              const BaseWeights<Weight>& weights, const LoraWeights& lora,
                              const Routing& routing, const Named&... others) {
  expect_apart_from_parameters(memory, config, weights, lora);
  memory.expect_apart_from("routing.weights", footprint(routing.weights));
  (memory.expect_apart_from(others.first, footprint(others.second)), ...);
}

template <class Weight, class Stored>
void outputs_apart(const AnyMatrix& y, const SavedActivations<Stored>& saved, const Config& config,
                   const BaseWeights<Weight>& weights, const LoraWeights& lora, const Routing& routing,
                   const AnyConstMatrix& x) {
  OwnMemory<6> memory;
  memory.add("saved.gate", saved.gate);
  memory.add("saved.up", saved.up);
  memory.add("saved.u_gate", saved.u_gate);
  memory.add("saved.u_up", saved.u_up);
  memory.add("saved.u_down", saved.u_down);
  memory.expect_apart_from("x", footprint(x));
  memory.add("y", y);
  expect_apart_from_inputs(memory, config, weights, lora, routing);
}

template <class Weight, class Stored>
void gradients_apart(const Gradients& grads, const Config& config, const BaseWeights<Weight>& weights,
                     const LoraWeights& lora, const Routing& routing, const AnyConstMatrix& x,
                     const SavedActivations<Stored>& saved, const AnyConstMatrix& grad_y) {
  using std::pair;
  expect_apart_from_parameters(memory_of_input_gradients(grads), config, weights, lora);
  expect_apart_from_inputs(memory_of_gradients(grads), config, weights, lora, routing, pair("x", x),
                           pair("grad_y", grad_y), pair("saved.gate", saved.gate), pair("saved.up", saved.up),
                           pair("saved.u_gate", saved.u_gate), pair("saved.u_up", saved.u_up),
                           pair("saved.u_down", saved.u_down), pair("grads.x", grads.x),
                           pair("grads.routing_weights", grads.routing_weights));
}

}  // namespace validate
AMX_SFT_MOE_NAMESPACE_END
