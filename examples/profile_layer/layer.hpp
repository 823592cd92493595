// One layer's weights, LoRA factors, inputs and results, as views of plain vectors.
#pragma once

#include <algorithm>
#include <amx_sft_moe/amx_sft_moe.hpp>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace profile_layer {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace): an example

struct Shape {
  const char* name;
  index_t experts, top_k, hidden, intermediate;
};
inline constexpr Shape kShapes[] = {
    {"deepseek-v3", 256, 8, 7168, 2048},  {"qwen3-235b-a22b", 128, 8, 4096, 1536},
    {"qwen3-30b-a3b", 128, 8, 2048, 768}, {"gpt-oss", 32, 4, 2880, 2880},
    {"mixtral", 8, 2, 4096, 14336},       {"small", 16, 4, 512, 256}};

inline std::size_t size(index_t count) {
  return static_cast<std::size_t>(count);
}

template <class T>
std::vector<T> random_values(index_t count, double scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0F, static_cast<float>(scale));
  std::vector<T> values(size(count));
  for (T& value : values) value = from_float<T>(normal(random));
  return values;
}

// Matrices [rows, cols] of all experts: the first is random, each of the others the same with its rows moved on, so
// that filling gigabytes takes seconds.
inline std::vector<bf16> random_experts(index_t experts, index_t rows, index_t cols, std::mt19937& random) {
  const std::vector<bf16> one =
      random_values<bf16>(rows * cols, 1 / std::sqrt(static_cast<double>(cols)), random);
  std::vector<bf16> all(size(experts * rows * cols));
  for (index_t e = 0; e < experts; ++e) {
    const auto first = one.begin() + e * 7 % rows * cols;
    const auto to = std::copy(first, one.end(), all.begin() + e * rows * cols);
    std::copy(one.begin(), first, to);
  }
  return all;
}

// The six factors: gate a and b, up a and b, down a and b.
inline constexpr int kFactors = 6;

struct Layer {
  Shape shape;
  index_t rank;
  float scaling;  // alpha / rank
  std::vector<bf16> gate, up, down;
  std::array<std::vector<float>, kFactors> factors;

  Layer(const Shape& s, index_t r, float alpha, std::mt19937& random)
      : shape(s),
        rank(r),
        scaling(alpha / static_cast<float>(r)),
        gate(random_experts(s.experts, s.intermediate, s.hidden, random)),
        up(random_experts(s.experts, s.intermediate, s.hidden, random)),
        down(random_experts(s.experts, s.hidden, s.intermediate, random)) {
    for (int f = 0; f < kFactors; ++f) {
      const double scale = 1 / std::sqrt(static_cast<double>(f % 2 == 0 ? cols(f) : 4 * rank));
      factors[size(f)] = random_values<float>(s.experts * rows(f) * cols(f), scale, random);
    }
  }
  index_t rows(int factor) const {
    return factor % 2 == 0 ? rank : factor < 4 ? shape.intermediate : shape.hidden;
  }
  index_t cols(int factor) const {
    return factor % 2 == 1 ? rank : factor < 4 ? shape.hidden : shape.intermediate;
  }

  BaseWeights<bf16> base() const {
    using Experts = ExpertMatrices<const bf16>;
    return {Experts::stacked(gate.data(), shape.intermediate, shape.hidden),
            Experts::stacked(up.data(), shape.intermediate, shape.hidden),
            Experts::stacked(down.data(), shape.hidden, shape.intermediate)};
  }
  LoraWeights lora() const {
    const auto view = [this](int f) {
      return AnyConstExpertTensor(factors[size(f)].data(), shape.experts, rows(f), cols(f));
    };
    return {{view(0), view(1), scaling}, {view(2), view(3), scaling}, {view(4), view(5), scaling}};
  }
};

// Inputs of a step over `tokens` tokens, and everything that it writes.
struct Batch {
  index_t tokens, hidden, top_k;
  std::vector<std::int64_t> ids;
  std::vector<float> weights, x, grad_y, y, grad_x, grad_weights;
  std::array<std::vector<float>, kFactors> grads;

  Batch(const Layer& layer, index_t t, std::mt19937& random)
      : tokens(t),
        hidden(layer.shape.hidden),
        top_k(layer.shape.top_k),
        weights(size(t * layer.shape.top_k), 1.0F / static_cast<float>(layer.shape.top_k)),
        x(random_values<float>(t * hidden, 1, random)),
        grad_y(random_values<float>(t * hidden, 1, random)),
        y(x.size()),
        grad_x(x.size()),
        grad_weights(weights.size()) {
    std::vector<std::int64_t> experts(size(layer.shape.experts));
    std::iota(experts.begin(), experts.end(), 0);
    for (index_t token = 0; token < t; ++token) {  // top_k distinct experts each
      std::shuffle(experts.begin(), experts.end(), random);
      ids.insert(ids.end(), experts.begin(), experts.begin() + top_k);
    }
    for (std::size_t f = 0; f < kFactors; ++f) grads[f].resize(layer.factors[f].size());
  }

  Routing routing() const { return {tokens, {ids.data(), top_k}, {weights.data(), tokens, top_k, top_k}}; }
  AnyConstMatrix x_view() const { return {x.data(), tokens, hidden, hidden}; }
  AnyConstMatrix grad_y_view() const { return {grad_y.data(), tokens, hidden, hidden}; }
  AnyMatrix y_view() { return {y.data(), tokens, hidden, hidden}; }
  Gradients gradients(const Layer& layer) {
    const auto view = [&](int f) {
      return AnyExpertTensor(grads[size(f)].data(), layer.shape.experts, layer.rows(f), layer.cols(f));
    };
    Gradients to;
    to.x = {grad_x.data(), tokens, hidden, hidden};
    to.routing_weights = {grad_weights.data(), tokens, top_k, top_k};
    to.lora = {view(0), view(1), view(2), view(3), view(4), view(5)};
    return to;
  }
};

}  // namespace profile_layer
