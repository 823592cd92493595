// Views that say more than there is: ranks that no memory holds, and rows of saved activations that no route has.
#include <gtest/gtest.h>

#include <cstdint>
#include <new>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace sft_test {
namespace {

using namespace amx_sft_moe;
using Moe = AMX_SFT_MOE<kernels::Portable<float>>;

constexpr index_t kFew = 2, kMany = 256;

// One expert, all of whose sizes are 1: silu(x) x.
struct Layer {
  float one = 1.0F;
  std::vector<float> x = std::vector<float>(kMany, 1.0F), y = x, grad = x;
  std::vector<std::int64_t> ids = std::vector<std::int64_t>(kMany, 0);

  Moe make() const {
    Config config;
    config.num_experts = config.top_k = config.hidden_size = config.intermediate_size = 1;
    const auto weight = ExpertMatrices<const float>::stacked(&one, 1, 1);
    return Moe(config, {weight, weight, weight});
  }
  // A gate's adapter of strides 0.
  LoraWeights of_rank(index_t rank) const {
    LoraWeights lora;
    lora.gate = {{&one, 1, rank, 1, 0, 0, 1}, {&one, 1, 1, rank, 0, 0, 0}, 1.0F};
    return lora;
  }
  Routing routing(index_t tokens) const { return {tokens, {ids.data(), 1}, {x.data(), tokens, 1, 1}}; }
  AnyConstMatrix input(index_t tokens) const { return {x.data(), tokens, 1, 1}; }
  AnyMatrix output(index_t tokens) { return {y.data(), tokens, 1, 1}; }
  Gradients gradients(index_t tokens) {
    Gradients grads;
    grads.x = {grad.data(), tokens, 1, 1};
    return grads;
  }
};

// Tokens times rank are 2^65, and 0 in 64 bits.
TEST(Extremes, RanksThatNoMemoryHolds) {
  Layer layer;
  Moe moe = layer.make();
  for (const int bits : {46, 57}) {
    moe.set_lora(layer.of_rank(index_t{1} << bits));
    for (const bool save : {true, false}) {
      EXPECT_THROW(moe.forward_sft(layer.routing(kMany), layer.input(kMany), layer.output(kMany), save),
                   std::bad_alloc);
    }
    float nothing = 0.0F;
    const MatrixView<float> row{&nothing, kMany, 1, 1};
    const MatrixView<float> u{&nothing, kMany, index_t{1} << bits, index_t{1} << bits};
    EXPECT_THROW(moe.backward(layer.routing(kMany), layer.input(kMany), {row, row, u, {}, {}},
                              layer.input(kMany), layer.gradients(kMany)),
                 std::bad_alloc);
    EXPECT_EQ(moe.saved_depth(), 0);
    moe.set_lora({});
    moe.forward_sft(layer.routing(kFew), layer.input(kFew), layer.output(kFew));
    moe.backward(layer.input(kFew), layer.gradients(kFew));
  }
}

// Buffers of T k rows of which routing has used fewer: what lies behind is not looked at.
TEST(Extremes, SavedRowsBeyondTheRoutedOnes) {
  Layer layer;
  Moe moe = layer.make();
  std::vector<float> buffer(2 * kMany);
  const MatrixView<float> gate{buffer.data(), kMany, 1, 1}, behind{buffer.data() + kFew, kMany, 1, 1};
  const auto step = [&](const MatrixView<float>& up) {
    const SavedActivations<float> saved{gate, up, {}, {}, {}};
    moe.forward_sft(layer.routing(kMany), layer.input(kMany), layer.output(kMany), saved);
    Gradients grads = layer.gradients(kMany);
    grads.weights.gate = {&buffer[kMany - 1], 1, 1, 1};
    moe.backward(layer.routing(kMany), layer.input(kMany), saved, layer.input(kMany), grads);
  };
  std::fill(layer.ids.begin() + kFew, layer.ids.end(), -1);
  step(behind);
  EXPECT_EQ(layer.y[kFew], 0.0F);
  EXPECT_NE(layer.grad[0], 1.0F);
  EXPECT_EQ(layer.grad[kFew], 0.0F);
  EXPECT_THROW(step({buffer.data() + kFew - 1, kMany, 1, 1}), ArgumentError);
  std::fill(layer.ids.begin(), layer.ids.end(), -1);
  step(gate);
  step({buffer.data(), index_t{1} << 40, 1, index_t{1} << 40});
  EXPECT_EQ(layer.y[0], 0.0F);
}

}  // namespace
}  // namespace sft_test
