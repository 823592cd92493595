// The operator's own stack of saved activations: what C++ trainers use instead of owning buffers. Entries keep
// their memory when they are popped, so that a steady-state step allocates nothing. Those that were never needed do
// not exist: a depth that nobody reaches costs nothing.
#pragma once

#include <algorithm>
#include <deque>
#include <iterator>
#include <limits>

#include "amx_sft_moe/core/aligned_buffer.hpp"
#include "amx_sft_moe/gemm/operand.hpp"
#include "amx_sft_moe/lora/adapter.hpp"
#include "amx_sft_moe/moe/saved_activations.hpp"
#include "amx_sft_moe/operator/config.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// One forward: its inputs, copied, and its activations.
template <class Stored>
class SavedForward {
 public:
  // Room for a forward of `routing` with the ranks of `lora`. Activations are written by the forward itself.
  void reserve(const Routing& routing, const Config& config, const LoraWeights& lora) {
    tokens_ = routing.tokens;
    const index_t routes = tokens_ * config.top_k;  // at least as many as routed rows
    auto matrix = [](AlignedBuffer<Stored>& buffer, index_t rows, index_t cols) {
      buffer.reserve(rows * cols);
      return MatrixView<Stored>{buffer.data(), rows, cols, cols};
    };
    x_ = matrix(x_buffer_, tokens_, config.hidden_size);
    activations_.gate = matrix(gate_, routes, config.intermediate_size);
    activations_.up = matrix(up_, routes, config.intermediate_size);
    activations_.u_gate = matrix(u_gate_, routes, lora.gate.rank());
    activations_.u_up = matrix(u_up_, routes, lora.up.rank());
    activations_.u_down = matrix(u_down_, routes, lora.down.rank());
    expert_ids_.reserve(routes);
    weights_.reserve(routes);
    top_k_ = config.top_k;
  }

  // Copies the inputs; an id that does not fit 32 bits becomes -1, which is as much out of range.
  template <class Rows>
  void keep_inputs(const Routing& routing, const AnyConstMatrix& x) {
    for (index_t t = 0; t < tokens_; ++t) {
      for (index_t j = 0; j < top_k_; ++j) {
        const std::int64_t id = routing.expert_ids.at(t, j);
        const bool fits = id >= 0 && id <= std::numeric_limits<std::int32_t>::max();
        expert_ids_[t * top_k_ + j] = fits ? static_cast<std::int32_t>(id) : -1;
      }
    }
    routing.weights.visit([&](const auto* w) {
      for (index_t t = 0; t < tokens_; ++t) {
        for (index_t j = 0; j < top_k_; ++j) {
          weights_[t * top_k_ + j] =
              to_float(w[t * routing.weights.row_stride() + j * routing.weights.col_stride()]);
        }
      }
    });
    gemm::AnyRows(x).visit([&](const auto& source) {
      Rows::template stage<Stored>(source, tokens_, x_.cols, x_.cols, x_.data, x_.row_stride);
    });
  }

  Routing routing() const {
    return {tokens_, ExpertIds(expert_ids_.data(), top_k_),
            AnyConstMatrix(weights_.data(), tokens_, top_k_, top_k_)};
  }
  AnyConstMatrix x() const { return {x_.data, x_.rows, x_.cols, x_.row_stride}; }
  const SavedActivations<Stored>& activations() const { return activations_; }

  // Throws StateError where the factors have other ranks than those of the forward.
  void require_ranks(const LoraWeights& lora) const {
    const index_t saved[] = {activations_.u_gate.cols, activations_.u_up.cols, activations_.u_down.cols};
    const index_t now[] = {lora.gate.rank(), lora.up.rank(), lora.down.rank()};
    if (std::equal(std::begin(saved), std::end(saved), std::begin(now))) return;
    throw StateError(concat("backward: expected LoRA ranks of gate, up and down as in the saved forward (",
                            saved[0], ", ", saved[1], ", ", saved[2], "), got (", now[0], ", ", now[1], ", ",
                            now[2], ")"));
  }

  index_t bytes() const {
    return x_buffer_.bytes() + gate_.bytes() + up_.bytes() + u_gate_.bytes() + u_up_.bytes() + u_down_.bytes() +
           expert_ids_.bytes() + weights_.bytes();
  }

 private:
  index_t tokens_ = 0, top_k_ = 0;
  MatrixView<Stored> x_;
  SavedActivations<Stored> activations_;
  AlignedBuffer<Stored> x_buffer_, gate_, up_, u_gate_, u_up_, u_down_;
  AlignedBuffer<std::int32_t> expert_ids_;  // [T, k]
  AlignedBuffer<float> weights_;            // [T, k]
};

template <class Stored>
class SavedStack {
 public:
  explicit SavedStack(index_t depth) : depth_(depth) {}

  index_t size() const { return used_; }
  void clear() { used_ = 0; }

  // The entry that the next push() will add. Throws StateError when the stack is full. References to entries stay
  // valid.
  SavedForward<Stored>& next() {
    if (used_ == depth_) {
      throw StateError(concat("save_for_backward: expected at most cache_depth = ", depth_,
                              " forwards waiting for their backward, got one more"));
    }
    if (used_ == static_cast<index_t>(entries_.size())) entries_.emplace_back();
    return entries_[static_cast<std::size_t>(used_)];
  }
  void push() { ++used_; }

  // Throws StateError when nothing was saved.
  const SavedForward<Stored>& top() const {
    if (used_ == 0) throw StateError("backward: expected a saved forward, got an empty stack (depth 0)");
    return entries_[static_cast<std::size_t>(used_ - 1)];
  }
  void pop() { --used_; }

  index_t bytes() const {
    index_t total = 0;
    for (const auto& entry : entries_) total += entry.bytes();
    return total;
  }

 private:
  index_t depth_;
  std::deque<SavedForward<Stored>> entries_;  // those in use, and above them those kept for reuse
  index_t used_ = 0;
};

AMX_SFT_MOE_NAMESPACE_END
