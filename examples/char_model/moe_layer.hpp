// y = sum over the k best experts of w_e expert_e(x): a softmax router of our own in front of the operator.
//
// The experts' base weights are random and stay as they are; their LoRA factors are trained, A from random
// values and B from zero, with a rank of a quarter of the width.
#pragma once

#include <algorithm>
#include <amx_sft_moe/amx_sft_moe.hpp>
#include <cstdint>
#include <memory>
#include <numeric>

#include "dense.hpp"

namespace char_model {

namespace sft = amx_sft_moe;
using sft::index_t;

struct MoeShape {
  index_t hidden = 128, intermediate = 128, experts = 8, top_k = 2, rank = 32;
};

// One projection of all experts, W + B A: W [E, out, in] frozen, A [E, r, in] and B [E, out, r] trained.
class Projection {
 public:
  Projection(const std::string& name, const MoeShape& shape, index_t out, index_t in, std::mt19937_64& random)
      : lora_a(name + ".lora_a", size(shape.experts * shape.rank * in)),
        lora_b(name + ".lora_b", size(shape.experts * out * shape.rank)),
        shape_(shape),
        out_(out),
        in_(in),
        base_(size(shape.experts * out * in)) {
    const float deviation = 1.0F / std::sqrt(static_cast<float>(in));
    fill_normal(base_, deviation, random);
    fill_normal(lora_a.value, deviation, random);
    // Values that bf16 has, so that kernels of either weight type train the same model.
    for (const float value : base_) base_bf16_.push_back(sft::to_bf16(value));
    std::transform(base_bf16_.begin(), base_bf16_.end(), base_.begin(),
                   [](sft::bf16 w) { return to_float(w); });
  }

  template <class T>
  sft::ExpertMatrices<const T> base() const {
    if constexpr (std::is_same_v<T, float>) {
      return sft::ExpertMatrices<const float>::stacked(base_.data(), out_, in_);
    } else {
      return sft::ExpertMatrices<const sft::bf16>::stacked(base_bf16_.data(), out_, in_);
    }
  }
  sft::LoraAdapter adapter() const {
    return {{lora_a.value.data(), shape_.experts, shape_.rank, in_},
            {lora_b.value.data(), shape_.experts, out_, shape_.rank},
            1.0F};
  }
  sft::AnyExpertTensor grad_a() { return {lora_a.grad.data(), shape_.experts, shape_.rank, in_}; }
  sft::AnyExpertTensor grad_b() { return {lora_b.grad.data(), shape_.experts, out_, shape_.rank}; }

  Parameter lora_a, lora_b;

 private:
  static std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

  MoeShape shape_;
  index_t out_, in_;
  Floats base_;
  std::vector<sft::bf16> base_bf16_;
};

class MoeLayer {
 public:
  MoeLayer(const std::string& name, const MoeShape& shape, std::mt19937_64& random)
      : shape_(shape),
        name_(name),
        router_(name + ".router", static_cast<std::size_t>(shape.hidden),
                static_cast<std::size_t>(shape.experts), random),
        gate_(name + ".gate", shape, shape.intermediate, shape.hidden, random),
        up_(name + ".up", shape, shape.intermediate, shape.hidden, random),
        down_(name + ".down", shape, shape.hidden, shape.intermediate, random) {}

  // Layers that run one after another share a workspace.
  void use_kernel(const std::string& kernel, sft::DType weights,
                  const std::shared_ptr<sft::Workspace>& workspace) {
    sft::Config config;
    config.num_experts = shape_.experts;
    config.top_k = shape_.top_k;
    config.hidden_size = shape_.hidden;
    config.intermediate_size = shape_.intermediate;
    config.name = name_;
    const sft::AnyBaseWeights base =
        weights == sft::DType::kFp32 ? sft::AnyBaseWeights(base_weights<float>()) : base_weights<sft::bf16>();
    const sft::LoraWeights lora{gate_.adapter(), up_.adapter(), down_.adapter()};
    experts_ = sft::make_sft_moe(kernel, config, base, lora, workspace);
  }

  // x, y [T, H]. `keep_routes`: the experts of the last call, for differences at fixed routes.
  Floats forward(const Floats& x, bool save_for_backward, bool keep_routes) {
    probabilities_ = router_.forward(x);  // [T, E]
    const auto experts = static_cast<std::size_t>(shape_.experts);
    for (std::size_t row = 0; row < probabilities_.size(); row += experts)
      softmax(&probabilities_[row], experts);
    if (!keep_routes) choose();
    weigh();
    Floats y(x.size());
    experts_->forward_sft(routing(), view(x), view(y), save_for_backward);
    return y;
  }

  // grad_x [T, H], through the experts and through the router; gradients of router and factors.
  Floats backward(const Floats& x, const Floats& grad_y) {
    Floats grad_x(x.size()), grad_weights(weights_.size());
    sft::Gradients grads;
    grads.x = view(grad_x);
    grads.routing_weights = {grad_weights.data(), tokens(), shape_.top_k, shape_.top_k};
    grads.lora = {gate_.grad_a(), gate_.grad_b(), up_.grad_a(), up_.grad_b(), down_.grad_a(), down_.grad_b()};
    experts_->backward(view(grad_y), grads);

    const Floats grad_from_router = router_.backward(x, grad_logits(grad_weights));
    for (std::size_t i = 0; i < grad_x.size(); ++i) grad_x[i] += grad_from_router[i];
    return grad_x;
  }

  std::vector<Parameter*> parameters() {
    return {&router_.weight, &gate_.lora_a, &gate_.lora_b, &up_.lora_a,
            &up_.lora_b,     &down_.lora_a, &down_.lora_b};
  }
  const sft::AnySftMoe& experts() const { return *experts_; }

 private:
  template <class T>
  sft::BaseWeights<T> base_weights() const {
    sft::BaseWeights<T> base;
    base.gate = gate_.base<T>();
    base.up = up_.base<T>();
    base.down = down_.base<T>();
    return base;
  }
  index_t tokens() const { return static_cast<index_t>(ids_.size()) / shape_.top_k; }
  sft::AnyConstMatrix view(const Floats& rows) const {
    return {rows.data(), static_cast<index_t>(rows.size()) / shape_.hidden, shape_.hidden, shape_.hidden};
  }
  sft::AnyMatrix view(Floats& rows) const {
    return {rows.data(), static_cast<index_t>(rows.size()) / shape_.hidden, shape_.hidden, shape_.hidden};
  }
  sft::Routing routing() const {
    return {tokens(), {ids_.data(), shape_.top_k}, {weights_.data(), tokens(), shape_.top_k, shape_.top_k}};
  }

  // The k most probable experts of each token.
  void choose() {
    const auto experts = static_cast<std::size_t>(shape_.experts);
    std::vector<std::int64_t> order(experts);
    ids_.clear();
    for (std::size_t row = 0; row < probabilities_.size(); row += experts) {
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + shape_.top_k, order.end(),
                        [p = &probabilities_[row]](std::int64_t a, std::int64_t b) { return p[a] > p[b]; });
      ids_.insert(ids_.end(), order.begin(), order.begin() + shape_.top_k);
    }
    weights_.resize(ids_.size());
  }

  // w_j = p_j / sum of the chosen p.
  void weigh() {
    for_each_token([this](const float* p, const std::int64_t* ids, std::size_t first, std::size_t top_k) {
      float sum = 0.0F;
      for (std::size_t j = 0; j < top_k; ++j) sum += p[ids[j]];
      for (std::size_t j = 0; j < top_k; ++j) weights_[first + j] = p[ids[j]] / sum;
    });
  }

  // The renormalised w are a softmax over the chosen logits alone: d w_i / d logit_j = w_i ((i == j) - w_j).
  Floats grad_logits(const Floats& grad_weights) const {
    Floats grad(probabilities_.size());
    for_each_token([&](const float* p, const std::int64_t* ids, std::size_t first, std::size_t top_k) {
      const float mean = dot(&weights_[first], &grad_weights[first], top_k);
      float* row = &grad[static_cast<std::size_t>(p - probabilities_.data())];
      for (std::size_t j = 0; j < top_k; ++j)
        row[ids[j]] = weights_[first + j] * (grad_weights[first + j] - mean);
    });
    return grad;
  }

  // Calls f(probabilities [E], ids [k], index of the token's first route, k).
  template <class F>
  void for_each_token(F&& f) const {
    const auto top_k = static_cast<std::size_t>(shape_.top_k);
    const float* p = probabilities_.data();
    for (std::size_t first = 0; first < ids_.size(); first += top_k, p += shape_.experts) {
      f(p, &ids_[first], first, top_k);
    }
  }

  MoeShape shape_;
  std::string name_;
  Linear router_;
  Projection gate_, up_, down_;
  std::unique_ptr<sft::AnySftMoe> experts_;
  Floats probabilities_;           // [T, E]
  std::vector<std::int64_t> ids_;  // [T, k]
  Floats weights_;                 // [T, k]
};

}  // namespace char_model
