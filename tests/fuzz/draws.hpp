// What the fuzzer makes of its bytes: layers, how they are stored, kernels, options.
#pragma once

#include <utility>
#include <vector>

#include "bytes.hpp"
#include "problem.hpp"
#include "random.hpp"

namespace sft_fuzz {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using namespace sft_test;     // NOLINT(google-build-using-namespace)

inline Case draw_case(Bytes& in) {
  const int largest = in.in(0, 3) == 0 ? 40 : 12;  // small ones mostly: the reference is most of the time
  Case c{"fuzz", 0, in.in(1, 4), in.in(1, 6), in.in(1, largest), in.in(1, largest), {0, 0, 0}};
  c.tokens = in.in(0, largest);
  c.ranks = {in.in(0, 9), in.in(0, 9), in.in(0, 20)};
  const RoutingPattern patterns[] = {kDistinct,  kDuplicates,  kSkipped, kAllSkipped,
                                     kOneExpert, kIdleExperts, kSkewed};
  const Form forms[] = {kSilu, kSilu, kClamped, kGelu, kGeluTanh};
  c.routing = in.one_of(patterns);
  c.form = in.one_of(forms);
  if (in.flag()) c.biases = {in.flag(), in.flag(), in.flag()};
  c.trains_base = in.flag();
  c.shared_a = in.flag() && c.ranks.gate > 0;
  if (c.shared_a) c.ranks.up = c.ranks.gate;
  return c;
}

// The same layer with an adapter of another rank at gate at least.
inline Case draw_other_ranks(Bytes& in, Case c) {
  c.ranks = {(c.ranks.gate + in.in(1, 9)) % 10, in.in(0, 9), in.in(0, 20)};
  c.shared_a = in.flag() && c.ranks.gate > 0;
  if (c.shared_a) c.ranks.up = c.ranks.gate;
  return c;
}

inline Storage draw_storage(Bytes& in) {
  Storage s{.name = "fuzz"};
  const auto dtype = [&] { return in.flag() ? DType::kFp32 : DType::kBf16; };
  s.activations = dtype();
  s.factors = dtype();
  s.routing = dtype();
  s.narrow_ids = in.flag();
  const WeightLayout layouts[] = {WeightLayout::kStacked, WeightLayout::kFused, WeightLayout::kPerExpert};
  s.weights = in.one_of(layouts);
  s.lora = in.flag() ? LoraLayout::kPeft : LoraLayout::kContiguous;
  s.padding = in.in(0, 3);
  s.edge = in.flag() ? Edge::kStart : Edge::kEnd;
  return s;
}

inline KernelInfo draw_kernel(Bytes& in) {
  std::vector<KernelInfo> available;
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.available) available.push_back(kernel);
  }
  return available[static_cast<std::size_t>(in.in(0, static_cast<int>(available.size()) - 1))];
}

// Bounds that cut many values, some, and next to none: rounding seldom decides about the latter.
inline reference::Glu draw_clamp(Bytes& in) {
  const double limits[] = {0.75, 2.5, 7.0};
  const double alphas[] = {1.702, 0.5};
  const double limit = in.one_of(limits);
  return {reference::Glu::kClamped, limit, in.one_of(alphas)};
}

inline Problem draw_problem(Bytes& in, const Case& c, DType weights) {
  const Storage storage = draw_storage(in);
  Random random(in.seed());
  reference::Layer layer = random_layer(random, c);
  if (c.form == kClamped) layer.glu = draw_clamp(in);
  reference::Batch batch = random_batch(random, c, c.tokens, storage.narrow_ids);
  return Problem(storage, weights, std::move(layer), std::move(batch));
}

// The base weights of `problem` with the adapters of `c`.
inline Problem draw_other_adapters(Bytes& in, const Case& c, const Problem& problem) {
  Random random(in.seed());
  reference::Layer layer = problem.layer();
  layer.lora_gate = random_adapter(random, c.experts, c.ranks.gate, c.hidden, c.intermediate, 1.1);
  layer.lora_up = random_adapter(random, c.experts, c.ranks.up, c.hidden, c.intermediate, 0.6);
  layer.lora_down = random_adapter(random, c.experts, c.ranks.down, c.intermediate, c.hidden, 0.8);
  layer.shared_a = c.shared_a;
  if (c.shared_a) layer.lora_up.a = layer.lora_gate.a;
  return Problem(problem.storage(), problem.weight_dtype(), std::move(layer), problem.batch());
}

// `longest`: the most tokens of any call that will be made.
inline Config draw_config(Bytes& in, const Problem& problem, int longest) {
  Config config = problem.config();
  config.num_threads = in.in(0, 3);
  config.cache_depth = in.in(1, 3);
  if (in.in(0, 3) == 0) config.max_tokens = in.in(0, longest);
  config.record_spans = in.flag();
  if (in.flag()) config.name = "fuzzed";
  return config;
}

// What a backward multiplies its gradients of parameters by; mostly one, as mostly in training.
inline float draw_scale(Bytes& in) {
  const float scales[] = {1.0F, 1.0F, 1.0F, 0.0F, 0.125F, 1.0F / 3, -1.75F, 1000.0F};
  return in.one_of(scales);
}

}  // namespace sft_fuzz
