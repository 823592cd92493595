// A layer of a published model with random weights, one batch for it, and where its gradients go.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "random_data.hpp"

namespace bench {

using amx_sft_moe::bf16;
using amx_sft_moe::index_t;

struct LayerShape {
  const char* name;
  index_t experts, top_k, hidden, intermediate;
};
inline constexpr LayerShape kShapes[] = {
    {"qwen3-30b-a3b", 128, 8, 2048, 768}, {"deepseek-v3-32", 32, 8, 7168, 2048},
    {"deepseek-v3", 256, 8, 7168, 2048},  {"mixtral", 8, 2, 4096, 14336},
    {"gpt-oss", 32, 4, 2880, 2880},       {"qwen3-235b-64", 64, 8, 4096, 1536},
    {"small", 16, 4, 512, 256},           {"one-expert", 1, 1, 2048, 768}};
inline constexpr index_t kRank = 16;

inline const LayerShape* shape_named(std::string_view name) {
  for (const LayerShape& shape : kShapes) {
    if (shape.name == name) return &shape;
  }
  return nullptr;
}

enum class Spread : std::uint8_t {
  kUniform,  // every expert equally likely
  kZipf,     // the i-th busiest with probability 1 / i, the order random
  kEven,     // the same number of rows for each expert that is used
};

struct LayerOptions {
  Spread spread = Spread::kUniform;
  bool one_weight = false;   // all experts share one's memory: for runs that do not time memory
  index_t used_experts = 0;  // kEven: how many experts get rows; 0: all
  index_t rank = kRank;
};

class Layer {
 public:
  CallersMemory<bf16> gate, up, down;
  CallersMemory<bf16> lora[6], grads[6];
  CallersMemory<bf16> x, y, grad_y, grad_x;
  CallersMemory<float> weights, grad_weights;
  CallersMemory<std::int64_t> ids;
  index_t active = 0;  // experts with tokens

  Layer(const LayerShape& s, index_t tokens, const LayerOptions& options = {})
      : shape_(s), tokens_(tokens), options_(options) {
    // Below what would overflow; what is too much for this machine is a std::bad_alloc.
    if (tokens > (index_t{1} << 40)) throw std::length_error("tokens: expected at most 2^40");
    const index_t matrix = (options.one_weight ? 1 : s.experts) * s.hidden * s.intermediate;
    fill(gate, matrix, 0.03F, 1);
    fill(up, matrix, 0.03F, 2);
    fill(down, matrix, 0.03F, 3);
    for (int f = 0; f < 6; ++f) {
      const index_t size = s.experts * options.rank * std::max(s.hidden, s.intermediate);
      fill(lora[f], size, 0.03F, 10 + static_cast<std::uint32_t>(f));
      fill(grads[f], size, 0.0F, 1);
    }
    for (auto* buffer : {&x, &y, &grad_y, &grad_x}) fill(*buffer, tokens * s.hidden, 1.0F, 4);
    fill(weights, tokens * s.top_k, 0.0F, 1);
    fill(grad_weights, tokens * s.top_k, 0.0F, 1);
    route();
  }

  amx_sft_moe::Config config(int threads) const {
    amx_sft_moe::Config config;
    config.num_experts = shape_.experts;
    config.top_k = shape_.top_k;
    config.hidden_size = shape_.hidden;
    config.intermediate_size = shape_.intermediate;
    config.num_threads = threads;
    return config;
  }
  amx_sft_moe::Routing routing() const {
    return {tokens_, amx_sft_moe::ExpertIds(ids.data(), shape_.top_k),
            amx_sft_moe::AnyConstMatrix(weights.data(), tokens_, shape_.top_k, shape_.top_k)};
  }
  amx_sft_moe::AnyMatrix rows(const CallersMemory<bf16>& of) const {  // [T, H]
    return {const_cast<bf16*>(of.data()), tokens_, shape_.hidden, shape_.hidden};
  }
  amx_sft_moe::AnyConstMatrix const_rows(const CallersMemory<bf16>& of) const {
    return {of.data(), tokens_, shape_.hidden, shape_.hidden};
  }

  amx_sft_moe::BaseWeights<bf16> base() const {
    auto stacked = [this](const bf16* data, index_t rows, index_t cols) {
      auto view = amx_sft_moe::ExpertMatrices<const bf16>::stacked(data, rows, cols);
      if (options_.one_weight) view.expert_stride = 0;
      return view;
    };
    return {stacked(gate.data(), shape_.intermediate, shape_.hidden),
            stacked(up.data(), shape_.intermediate, shape_.hidden),
            stacked(down.data(), shape_.hidden, shape_.intermediate)};
  }
  amx_sft_moe::LoraWeights adapters() const {
    auto factor = [&](int f) {
      return amx_sft_moe::AnyConstExpertTensor(lora[f].data(), shape_.experts, dims(f).first, dims(f).second);
    };
    return {{factor(0), factor(1), 2.0F}, {factor(2), factor(3), 2.0F}, {factor(4), factor(5), 2.0F}};
  }
  // Elements of factor f and of its gradient.
  index_t factor_size(int f) const { return shape_.experts * dims(f).first * dims(f).second; }
  // Gradients of everything, or of LoRA's A alone, or of its B.
  amx_sft_moe::Gradients gradients(bool of_a = true, bool of_b = true) const {
    auto factor = [&](int f) {
      if (!(f % 2 == 0 ? of_a : of_b)) return amx_sft_moe::AnyExpertTensor();
      return amx_sft_moe::AnyExpertTensor(const_cast<bf16*>(grads[f].data()), shape_.experts, dims(f).first,
                                          dims(f).second);
    };
    amx_sft_moe::Gradients to;
    to.x = rows(grad_x);
    to.routing_weights = {const_cast<float*>(grad_weights.data()), tokens_, shape_.top_k, shape_.top_k};
    to.lora = {factor(0), factor(1), factor(2), factor(3), factor(4), factor(5)};
    return to;
  }

 private:
  // Rows and columns of factor f: gate a, b, up a, b, down a, b.
  std::pair<index_t, index_t> dims(int f) const {
    const index_t in = f < 4 ? shape_.hidden : shape_.intermediate;
    const index_t out = f < 4 ? shape_.intermediate : shape_.hidden;
    return f % 2 == 0 ? std::pair{options_.rank, in} : std::pair{out, options_.rank};
  }

  void route() {
    ids.reserve(tokens_ * shape_.top_k);
    std::mt19937 random(7);
    std::vector<bool> used(static_cast<std::size_t>(shape_.experts));
    const std::vector<double> likelihood = expert_likelihood(random);
    for (index_t t = 0; t < tokens_; ++t) {
      const std::vector<index_t> experts = experts_of(t, likelihood, random);
      for (index_t j = 0; j < shape_.top_k; ++j) {
        const index_t expert = experts[static_cast<std::size_t>(j)];
        ids[t * shape_.top_k + j] = expert;
        used[static_cast<std::size_t>(expert)] = true;
        weights[t * shape_.top_k + j] = 1.0F / static_cast<float>(shape_.top_k);
      }
    }
    active = std::count(used.begin(), used.end(), true);
  }

  std::vector<double> expert_likelihood(std::mt19937& random) const {
    std::vector<double> likelihood(static_cast<std::size_t>(shape_.experts), 1.0);
    if (options_.spread != Spread::kZipf) return likelihood;
    for (std::size_t e = 0; e < likelihood.size(); ++e) likelihood[e] = 1.0 / static_cast<double>(e + 1);
    std::shuffle(likelihood.begin(), likelihood.end(), random);
    return likelihood;
  }

  // top_k different experts: those of which an exponential variable with that rate is smallest.
  std::vector<index_t> experts_of(index_t token, const std::vector<double>& likelihood,
                                  std::mt19937& random) const {
    std::vector<index_t> order(likelihood.size());
    std::iota(order.begin(), order.end(), index_t{0});
    if (options_.spread == Spread::kEven) {
      const index_t used = options_.used_experts > 0 ? options_.used_experts : shape_.experts;
      for (index_t j = 0; j < shape_.top_k; ++j) {
        order[static_cast<std::size_t>(j)] = (token * shape_.top_k + j) % used;
      }
      return order;
    }
    std::vector<double> arrival(likelihood.size());
    for (std::size_t e = 0; e < arrival.size(); ++e) {
      const double uniform = (random() + 0.5) / 4294967296.0;
      arrival[e] = -std::log(uniform) / likelihood[e];
    }
    std::partial_sort(order.begin(), order.begin() + shape_.top_k, order.end(), [&](index_t a, index_t b) {
      return arrival[static_cast<std::size_t>(a)] < arrival[static_cast<std::size_t>(b)];
    });
    return order;
  }

  LayerShape shape_;
  index_t tokens_;
  LayerOptions options_;
};

}  // namespace bench
