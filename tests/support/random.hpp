// Random layers and batches for the reference. The same numbers on every platform: only the engine is the
// standard library's, not its distributions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cases.hpp"
#include "reference.hpp"

namespace sft_test {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(engine_() >> 11) * 0x1p-53;
  }
  // From 0 to n - 1.
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  // Uniform with this standard deviation.
  std::vector<double> values(std::size_t count, double deviation) {
    std::vector<double> out(count);
    for (double& value : out) value = uniform(-1, 1) * deviation * std::sqrt(3.0);
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

inline reference::Adapter random_adapter(Random& random, int experts, int rank, int in, int out,
                                         double scaling) {
  const auto size = [](int a, int b, int c) { return static_cast<std::size_t>(a) * b * c; };
  reference::Adapter lora{rank, scaling, {}, {}};
  lora.a = random.values(size(experts, rank, in), 1 / std::sqrt(in));
  lora.b = random.values(size(experts, out, rank), 1 / std::sqrt(std::max(rank, 1)));
  return lora;
}

inline reference::Layer random_layer(Random& random, const Case& c) {
  const std::size_t block = static_cast<std::size_t>(c.experts) * c.hidden * c.intermediate;
  reference::Layer layer;
  layer.experts = c.experts;
  layer.hidden = c.hidden;
  layer.intermediate = c.intermediate;
  layer.gate = random.values(block, 1 / std::sqrt(c.hidden));
  layer.up = random.values(block, 1 / std::sqrt(c.hidden));
  layer.down = random.values(block, 1 / std::sqrt(c.intermediate));
  layer.lora_gate = random_adapter(random, c.experts, c.ranks.gate, c.hidden, c.intermediate, 0.7);
  layer.lora_up = random_adapter(random, c.experts, c.ranks.up, c.hidden, c.intermediate, 1.3);
  layer.lora_down = random_adapter(random, c.experts, c.ranks.down, c.intermediate, c.hidden, 1.9);
  layer.shared_a = c.shared_a;
  layer.trains_base = c.trains_base;
  if (c.shared_a) layer.lora_up.a = layer.lora_gate.a;
  layer.glu.form = static_cast<reference::Glu::Form>(c.form);
  // A low limit, so that a good part of the values is cut.
  if (c.form == Form::kClamped) layer.glu.limit = 0.75;
  const auto bias = [&](bool there, int width) {
    const std::size_t count = static_cast<std::size_t>(c.experts) * static_cast<std::size_t>(width);
    return there ? random.values(count, 0.5) : reference::Vector();
  };
  layer.gate_bias = bias(c.biases.gate, c.intermediate);
  layer.up_bias = bias(c.biases.up, c.intermediate);
  layer.down_bias = bias(c.biases.down, c.hidden);
  return layer;
}

// An id that must be skipped. Half of the wide ones would be a legal expert if cut to 32 bits.
inline std::int64_t id_to_skip(Random& random, int experts, bool narrow) {
  const std::int64_t inside = random.below(experts);
  const std::int64_t wide[] = {(std::int64_t{1} << 32) + inside, (std::int64_t{-1} << 32) + inside,
                               std::numeric_limits<std::int64_t>::max(),
                               std::numeric_limits<std::int64_t>::min()};
  const std::int64_t any[] = {-1,
                              experts,
                              -experts,
                              experts + 1000,
                              std::numeric_limits<std::int32_t>::max(),
                              std::numeric_limits<std::int32_t>::min()};
  if (!narrow && random.below(2) == 0) return wide[random.below(4)];
  return any[random.below(6)];
}

inline std::vector<std::int64_t> token_ids(Random& random, const Case& c, int token, bool narrow) {
  std::vector<std::int64_t> experts(static_cast<std::size_t>(c.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::size_t n = experts.size(); n > 1; --n) {
    std::swap(experts[n - 1], experts[static_cast<std::size_t>(random.below(static_cast<int>(n)))]);
  }
  std::vector<std::int64_t> ids(static_cast<std::size_t>(c.top_k));
  for (std::size_t slot = 0; slot < ids.size(); ++slot) {
    const std::int64_t distinct = experts[slot % experts.size()];
    std::int64_t& id = ids[slot];
    switch (c.routing) {
      case RoutingPattern::kDistinct:
        id = distinct;
        break;
      case RoutingPattern::kDuplicates:
        id = token == 0 ? c.experts - 1 : random.below(c.experts);
        break;
      case RoutingPattern::kSkipped:
        id = random.below(3) == 0 ? id_to_skip(random, c.experts, narrow) : distinct;
        break;
      case RoutingPattern::kAllSkipped:
        id = id_to_skip(random, c.experts, narrow);
        break;
      case RoutingPattern::kOneExpert:
        id = c.experts - 1;
        break;
      case RoutingPattern::kIdleExperts:
        id = distinct / 2 * 2;
        break;
      case RoutingPattern::kSkewed:
        id = slot == 0 ? 0 : distinct;
        break;
    }
  }
  return ids;
}

inline reference::Batch random_batch(Random& random, const Case& c, int tokens, bool narrow_ids) {
  const auto t = static_cast<std::size_t>(tokens);
  reference::Batch batch;
  batch.tokens = tokens;
  batch.top_k = c.top_k;
  batch.x = random.values(t * static_cast<std::size_t>(c.hidden), 1);
  batch.grad_y = random.values(t * static_cast<std::size_t>(c.hidden), 1);
  for (int token = 0; token < tokens; ++token) {
    for (std::int64_t id : token_ids(random, c, token, narrow_ids)) {
      batch.ids.push_back(id);
      batch.weights.push_back(random.uniform(0.1, 1.0));
    }
  }
  // A route of weight zero has a gradient all the same.
  if (batch.weights.size() > 2) batch.weights[1] = 0;
  return batch;
}

}  // namespace sft_test
