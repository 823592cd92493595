// The contract's checks. Each names the argument and both values, and runs before anything is changed.
#pragma once

#include <algorithm>
#include <limits>
#include <new>

#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/core/overlap.hpp"
#include "amx_sft_moe/moe/base_weights.hpp"
#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/moe/saved_activations.hpp"
#include "amx_sft_moe/operator/config.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace validate {

inline void config(const Config& config) {
  require_at_least("num_experts", 1, config.num_experts);
  require_at_most("num_experts", std::numeric_limits<std::int32_t>::max(), config.num_experts);
  require_at_least("top_k", 1, config.top_k);
  require_at_least("hidden_size", 1, config.hidden_size);
  require_at_least("intermediate_size", 1, config.intermediate_size);
  require_at_least("cache_depth", 1, config.cache_depth);
  require_at_least("num_threads", 0, config.num_threads);
  require_at_most("num_threads", kMaxThreads, config.num_threads);
  if (config.max_tokens) require_at_least("max_tokens", 0, *config.max_tokens);
  if (const auto* clamped = std::get_if<ClampedGlu>(&config.activation)) {
    if (is_nan(clamped->limit) || !(clamped->limit > 0.0F)) {
      throw ArgumentError(concat("activation.limit: expected a positive number, got ", clamped->limit));
    }
    if (!is_finite(clamped->alpha)) {
      throw ArgumentError(concat("activation.alpha: expected a finite number, got ", clamped->alpha));
    }
  }
}

// Strides, in elements, that no tensor in memory has: offsets of its elements would overflow.
template <std::size_t N>
void addressable(std::string_view name, const std::array<Extent, N>& dims) {
  std::array<Extent, 3> all{{{1, 0}, {1, 0}, {1, 0}}};
  std::copy(dims.begin(), dims.end(), all.begin());
  if (amx_sft_moe::addressable(all)) return;
  std::string strides, shape;
  for (const Extent& dim : dims) {
    strides += concat(strides.empty() ? "" : ", ", dim.stride);
    shape += concat(shape.empty() ? "" : ", ", dim.count);
  }
  throw ArgumentError(
      concat(name, ": expected strides within the address space, got (", strides, ") for shape [", shape, "]"));
}

template <class T>
void expert_matrices(std::string_view name, const ExpertMatrices<const T>& matrices, index_t experts,
                     index_t rows, index_t cols) {
  require_equal({name, ".rows"}, rows, matrices.rows);
  require_equal({name, ".cols"}, cols, matrices.cols);
  require_at_least({name, ".row_stride"}, cols, matrices.row_stride);
  const index_t expert_stride = matrices.pointers == nullptr ? matrices.expert_stride : 0;
  addressable<3>(name, {{{experts, expert_stride}, {rows, matrices.row_stride}, {cols, 1}}});
  if (matrices.pointers == nullptr) return require_memory(name, matrices.base != nullptr);
  for (index_t e = 0; e < experts; ++e) {
    if (matrices.pointers[e] == nullptr) require_memory(concat(name, "[", e, "]"), false);
  }
}

inline void bias(std::string_view name, const AnyConstMatrix& bias, index_t experts, index_t out) {
  if (bias.empty()) return;
  require_equal({name, ".rows"}, experts, bias.rows());
  require_equal({name, ".cols"}, out, bias.cols());
  addressable<2>(name, {{{experts, bias.row_stride()}, {out, bias.col_stride()}}});
}

template <class T>
void base_weights(const BaseWeights<T>& weights, const Config& config) {
  const index_t hidden = config.hidden_size;
  const index_t intermediate = config.intermediate_size;
  expert_matrices<T>("weights.gate", weights.gate, config.num_experts, intermediate, hidden);
  expert_matrices<T>("weights.up", weights.up, config.num_experts, intermediate, hidden);
  expert_matrices<T>("weights.down", weights.down, config.num_experts, hidden, intermediate);
  bias("weights.biases.gate", weights.biases.gate, config.num_experts, intermediate);
  bias("weights.biases.up", weights.biases.up, config.num_experts, intermediate);
  bias("weights.biases.down", weights.biases.down, config.num_experts, hidden);
}

template <bool Const>
void expert_tensor(std::string_view name, const BasicAnyExpertTensor<Const>& tensor, index_t experts,
                   index_t rows, index_t cols) {
  require_equal({name, ".experts"}, experts, tensor.experts());
  require_equal({name, ".rows"}, rows, tensor.rows());
  require_equal({name, ".cols"}, cols, tensor.cols());
  addressable<3>(
      name, {{{experts, tensor.expert_stride()}, {rows, tensor.row_stride()}, {cols, tensor.col_stride()}}});
}

inline void adapter(std::string_view name, const LoraAdapter& adapter, index_t experts, index_t in,
                    index_t out) {
  require_at_least({name, ".a.rows"}, 0, adapter.rank());
  if (adapter.rank() == 0) {
    if (adapter.b.empty() || adapter.b.cols() == 0) return;
    if (!adapter.a.empty()) require_equal({name, ".b.cols"}, index_t{0}, adapter.b.cols());
    throw ArgumentError(concat(name, ".a: expected a factor beside ", name, ".b, got null"));
  }
  if (adapter.b.empty())
    throw ArgumentError(concat(name, ".b: expected a factor beside ", name, ".a, got null"));
  expert_tensor(concat(name, ".a"), adapter.a, experts, adapter.rank(), in);
  expert_tensor(concat(name, ".b"), adapter.b, experts, out, adapter.rank());
  if (!is_finite(adapter.scaling)) {
    throw ArgumentError(concat(name, ".scaling: expected a finite number, got ", adapter.scaling));
  }
}

inline void lora_weights(const LoraWeights& lora, const Config& config) {
  adapter("lora.gate", lora.gate, config.num_experts, config.hidden_size, config.intermediate_size);
  adapter("lora.up", lora.up, config.num_experts, config.hidden_size, config.intermediate_size);
  adapter("lora.down", lora.down, config.num_experts, config.intermediate_size, config.hidden_size);
}

enum class Columns : std::uint8_t { kOfAnyStride, kAdjacent };

// [rows, cols]; an output's rows must not overlap.
template <bool Const>
void matrix(std::string_view name, const BasicAnyMatrix<Const>& m, index_t rows, index_t cols,
            Columns columns) {
  const bool adjacent_columns = columns == Columns::kAdjacent;
  require_equal({name, ".rows"}, rows, m.rows());
  require_equal({name, ".cols"}, cols, m.cols());
  if (rows == 0) return;
  require_memory(name, !m.empty());
  if (adjacent_columns) require_equal({name, ".col_stride"}, index_t{1}, m.col_stride());
  if constexpr (Const) {
    require_at_least({name, ".row_stride"}, 0, m.row_stride());
  } else if (rows > 1 && adjacent_columns) {
    require_at_least({name, ".row_stride"}, cols, m.row_stride());
  }
  addressable<2>(name, {{{rows, m.row_stride()}, {cols, m.col_stride()}}});
}

// Elements are written in any order, by several threads.
inline void apart(std::string_view name, const AnyMatrix& m) {
  if (!elements_overlap({Extent{m.rows(), m.row_stride()}, {m.cols(), m.col_stride()}, {1, 0}})) return;
  throw ArgumentError(concat(name, ": expected elements that do not overlap, got strides (", m.row_stride(),
                             ", ", m.col_stride(), ") for shape [", m.rows(), ", ", m.cols(), "]"));
}

inline void apart(std::string_view name, const AnyExpertTensor& t) {
  const Extent rows{t.rows(), t.row_stride()};
  const Extent cols{t.cols(), t.col_stride()};
  if (!elements_overlap({Extent{t.experts(), t.expert_stride()}, rows, cols})) return;
  throw ArgumentError(concat(name, ": expected elements that do not overlap, got strides (", t.expert_stride(),
                             ", ", t.row_stride(), ", ", t.col_stride(), ") for shape [", t.experts(), ", ",
                             t.rows(), ", ", t.cols(), "]"));
}

inline void routing(const Routing& routing, const Config& config) {
  require_at_least("routing.tokens", 0, routing.tokens);
  if (config.max_tokens && routing.tokens > *config.max_tokens) {
    throw ArgumentError(
        concat("routing.tokens: expected at most max_tokens = ", *config.max_tokens, ", got ", routing.tokens));
  }
  const index_t most = std::numeric_limits<std::int32_t>::max() / config.top_k;
  if (routing.tokens > most) {
    throw ArgumentError(concat("routing.tokens: expected at most ", most,
                               " (tokens x top_k is counted in 32 bits), got ", routing.tokens));
  }
  if (routing.tokens > 0) {
    require_memory("routing.expert_ids", !routing.expert_ids.empty());
    require_at_least("routing.expert_ids.row_stride", 0, routing.expert_ids.row_stride());
    addressable<2>("routing.expert_ids",
                   {{{routing.tokens, routing.expert_ids.row_stride()}, {config.top_k, 1}}});
  }
  matrix("routing.weights", routing.weights, routing.tokens, config.top_k, Columns::kOfAnyStride);
}

// A pass keeps rows of all widths for each route, of up to a panel's columns each, in up to 8 bytes an element. Where these
// would not fit in an address space nobody has the memory, and sizes would overflow before it is asked for.
inline void room_for_routes(const Routing& routing, const Config& config, const LoraWeights& lora) {
  constexpr index_t kMost = (index_t{1} << 57) / (arch::kPanelCols * 8);
  const index_t widest = std::max(
      {config.hidden_size, config.intermediate_size, lora.gate.rank(), lora.up.rank(), lora.down.rank()});
  if (routing.tokens > 0 && widest > kMost / (routing.tokens * config.top_k)) throw std::bad_alloc();
}

template <class T>
void saved_matrix(std::string_view name, const MatrixView<T>& m, index_t rows, index_t cols) {
  if (rows == 0) return;
  if (cols > 0) require_memory(name, m.data != nullptr);
  require_equal({name, ".cols"}, cols, m.cols);
  if (cols == 0) return;
  require_at_least({name, ".rows"}, rows, m.rows);
  require_at_least({name, ".row_stride"}, cols, m.row_stride);
  addressable<2>(name, {{{m.rows, m.row_stride}, {cols, 1}}});
}

template <class T>
void saved_activations(const SavedActivations<T>& saved, index_t routed_rows, const Config& config,
                       const LoraWeights& lora) {
  saved_matrix("saved.gate", saved.gate, routed_rows, config.intermediate_size);
  saved_matrix("saved.up", saved.up, routed_rows, config.intermediate_size);
  saved_matrix("saved.u_gate", saved.u_gate, routed_rows, lora.gate.rank());
  saved_matrix("saved.u_up", saved.u_up, routed_rows, lora.up.rank());
  saved_matrix("saved.u_down", saved.u_down, routed_rows, lora.down.rank());
}

inline void gradient(std::string_view name, const AnyExpertTensor& grad,
                     const AnyConstExpertTensor& parameter) {
  if (grad.empty()) return;
  if (parameter.empty()) throw ArgumentError(concat(name, ": expected none (no such adapter), got a tensor"));
  expert_tensor(name, grad, parameter.experts(), parameter.rows(), parameter.cols());
  apart(name, grad);
}

inline void bias_gradient(std::string_view name, const AnyMatrix& grad, const AnyConstMatrix& bias) {
  if (grad.empty()) return;
  if (bias.empty()) throw ArgumentError(concat(name, ": expected none (no such bias), got a tensor"));
  require_equal({name, ".rows"}, bias.rows(), grad.rows());
  require_equal({name, ".cols"}, bias.cols(), grad.cols());
  addressable<2>(name, {{{grad.rows(), grad.row_stride()}, {grad.cols(), grad.col_stride()}}});
  apart(name, grad);
}

inline void weight_gradient(std::string_view name, const AnyExpertTensor& grad, index_t experts, index_t rows,
                            index_t cols) {
  if (grad.empty()) return;
  expert_tensor(name, grad, experts, rows, cols);
  apart(name, grad);
}

inline void gradients(const Gradients& grads, index_t tokens, const Config& config, const LoraWeights& lora,
                      const ExpertBiases& biases) {
  if (!grads.x.empty()) matrix("grads.x", grads.x, tokens, config.hidden_size, Columns::kAdjacent);
  if (!grads.routing_weights.empty()) {
    matrix("grads.routing_weights", grads.routing_weights, tokens, config.top_k, Columns::kOfAnyStride);
    apart("grads.routing_weights", grads.routing_weights);
  }
  gradient("grads.lora.gate_a", grads.lora.gate_a, lora.gate.a);
  gradient("grads.lora.gate_b", grads.lora.gate_b, lora.gate.b);
  gradient("grads.lora.up_a", grads.lora.up_a, lora.up.a);
  gradient("grads.lora.up_b", grads.lora.up_b, lora.up.b);
  gradient("grads.lora.down_a", grads.lora.down_a, lora.down.a);
  gradient("grads.lora.down_b", grads.lora.down_b, lora.down.b);
  if (lora.gate_up_share_a() && !grads.lora.up_a.empty()) {
    throw ArgumentError(
        "grads.lora.up_a: expected none (gate and up share one A, grads.lora.gate_a receives the sum), "
        "got a tensor");
  }
  bias_gradient("grads.biases.gate", grads.biases.gate, biases.gate);
  bias_gradient("grads.biases.up", grads.biases.up, biases.up);
  bias_gradient("grads.biases.down", grads.biases.down, biases.down);
  const index_t inner = config.intermediate_size;
  weight_gradient("grads.weights.gate", grads.weights.gate, config.num_experts, inner, config.hidden_size);
  weight_gradient("grads.weights.up", grads.weights.up, config.num_experts, inner, config.hidden_size);
  weight_gradient("grads.weights.down", grads.weights.down, config.num_experts, config.hidden_size, inner);
  if (!is_finite(grads.scale)) {
    throw ArgumentError(concat("grads.scale: expected a finite number, got ", grads.scale));
  }
}

}  // namespace validate
AMX_SFT_MOE_NAMESPACE_END
