// The shape of a pass, as profile/work.hpp wants it.
#pragma once

#include <atomic>

#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/moe/step.hpp"
#include "amx_sft_moe/operator/config.hpp"
#include "amx_sft_moe/profile/work.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// 1, 2, ... in the order in which this shared library (or program) makes operators. For labels in dumps only.
inline std::int64_t next_operator_number() {
  static std::atomic<std::int64_t> made{0};
  return made.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Bytes an element of a view; 0 where it is empty.
template <class AnyView>
index_t element_size(const AnyView& view) {
  return view.empty() ? 0 : size_of(view.dtype());
}

template <class Kernel>
StepShape shape_of(const moe::Step<Kernel>& step, const Routing& routing, index_t experts,
                   const AnyConstMatrix& x, DType y) {
  StepShape s;
  s.tokens = step.tokens;
  s.top_k = step.top_k;
  s.routed_rows = step.work.routing.routed_rows();
  s.experts = experts;
  s.active_experts = static_cast<index_t>(step.work.routing.active().size());
  s.hidden = step.hidden;
  s.intermediate = step.intermediate;
  s.shared_a = step.lora.gate_up_share_a();
  s.weight = sizeof(typename Kernel::Weight);
  s.compute = sizeof(typename Kernel::Compute);
  s.stored = sizeof(typename Kernel::Stored);
  s.id = routing.expert_ids.element_size();
  s.route_weight = element_size(routing.weights);
  s.x = element_size(x);
  s.y = size_of(y);
  const LoraAdapter* adapters[] = {&step.lora.gate, &step.lora.up, &step.lora.down};
  const AnyConstMatrix* biases[] = {&step.weights.biases.gate, &step.weights.biases.up,
                                    &step.weights.biases.down};
  for (std::size_t p = 0; p < kProjections; ++p) {
    s.rank[p] = adapters[p]->rank();
    s.a[p] = element_size(adapters[p]->a);
    s.b[p] = element_size(adapters[p]->b);
    s.bias[p] = element_size(*biases[p]);
  }
  return s;
}

template <class Kernel>
StepShape forward_shape(const moe::Step<Kernel>& step, const Routing& routing, index_t experts,
                        const AnyConstMatrix& x, const AnyMatrix& y) {
  StepShape s = shape_of(step, routing, experts, x, y.dtype());
  s.saves = step.saved.gate.data != nullptr;
  return s;
}

template <class Kernel>
StepShape backward_shape(const moe::Step<Kernel>& step, const Routing& routing, index_t experts,
                         const AnyConstMatrix& x, const AnyConstMatrix& grad_y, const Gradients& grads) {
  StepShape s = shape_of(step, routing, experts, x, grad_y.dtype());
  s.accumulates = grads.accumulate;
  s.grad_x = element_size(grads.x);
  s.grad_route_weight = element_size(grads.routing_weights);
  s.grad_a = {element_size(grads.lora.gate_a), element_size(grads.lora.up_a), element_size(grads.lora.down_a)};
  s.grad_b = {element_size(grads.lora.gate_b), element_size(grads.lora.up_b), element_size(grads.lora.down_b)};
  s.grad_bias = {element_size(grads.biases.gate), element_size(grads.biases.up),
                 element_size(grads.biases.down)};
  s.grad_weight = {element_size(grads.weights.gate), element_size(grads.weights.up),
                   element_size(grads.weights.down)};
  return s;
}

AMX_SFT_MOE_NAMESPACE_END
