// Checks of the contract that need no operator: sizes of a configuration, and gradients that share memory.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "amx_sft_moe/operator/validate.hpp"
#include "amx_sft_moe/operator/validate_apart.hpp"
#include "refusal.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::AnyMatrix;
using amx_sft_moe::ArgumentError;
using amx_sft_moe::bf16;
using amx_sft_moe::index_t;

amx_sft_moe::Config tiny_config() {
  amx_sft_moe::Config config;
  config.num_experts = config.top_k = config.hidden_size = config.intermediate_size = 1;
  return config;
}

TEST(Validate, ThreadsThatNoMachineHas) {
  amx_sft_moe::Config config = tiny_config();
  for (const int good : {0, 1, 4096}) {
    config.num_threads = good;
    EXPECT_NO_THROW(amx_sft_moe::validate::config(config));
  }
  for (const int wrong : {4097, std::numeric_limits<int>::max()}) {
    config.num_threads = wrong;
    expect_refused<ArgumentError>([&] { amx_sft_moe::validate::config(config); },
                                  {"num_threads", "expected at most 4096", "got " + std::to_string(wrong)});
  }
}

TEST(Validate, AnyDepthIsOne) {
  amx_sft_moe::Config config = tiny_config();
  config.cache_depth = std::numeric_limits<index_t>::max();
  EXPECT_NO_THROW(amx_sft_moe::validate::config(config));
}

constexpr index_t kTokens = 6, kHidden = 40, kTopK = 4;

void check(const AnyMatrix& x, const AnyMatrix& routing_weights) {
  amx_sft_moe::Gradients grads;
  grads.x = x;
  grads.routing_weights = routing_weights;
  amx_sft_moe::validate::gradients_apart<float, float>(grads, tiny_config(), {}, {}, {}, {}, {}, {});
}

void expect_shared(const AnyMatrix& x, const AnyMatrix& routing_weights) {
  expect_refused<ArgumentError>([&] { check(x, routing_weights); },
                                {"grads.routing_weights", "memory of its own", "grads.x has too"});
}

TEST(Validate, InputGradientsInOneBuffer) {
  std::vector<float> buffer(kTokens * (kHidden + kTopK));
  float* data = buffer.data();
  const AnyMatrix x(data, kTokens, kHidden, kHidden);
  expect_shared(x, {data, kTokens, kTopK, kTopK});
  expect_shared(x, {data + kTokens * kHidden - 1, kTokens, kTopK, kTopK});
  expect_shared(x, {data + 1, kTokens, kTopK, kHidden});
  expect_shared({data + kTopK, kTokens, kHidden, kHidden}, {data, kTokens, kTopK, 1, kTokens});
  EXPECT_NO_THROW(check(x, {data + kTokens * kHidden, kTokens, kTopK, kTopK})) << "one behind the other";
  EXPECT_NO_THROW(check(x, {}));
  EXPECT_NO_THROW(check({}, {data, kTokens, kTopK, kTopK}));
  EXPECT_NO_THROW(check({data, 0, kHidden, kHidden}, {data, 0, kTopK, kTopK})) << "no tokens, no memory";
}

TEST(Validate, InputGradientsWhoseRowsTakeTurns) {
  constexpr index_t kStride = kHidden + kTopK;
  std::vector<float> buffer(kTokens * (kStride + 7));
  float* data = buffer.data();
  EXPECT_NO_THROW(check({data, kTokens, kHidden, kStride}, {data + kHidden, kTokens, kTopK, kStride}));
  EXPECT_NO_THROW(check({data + kTopK, kTokens, kHidden, kStride}, {data, kTokens, kTopK, kStride}));
  expect_shared({data, kTokens, kHidden, kStride}, {data + kHidden - 1, kTokens, kTopK, kStride});
  EXPECT_NO_THROW(check({data, kTokens, kHidden, kStride + 6}, {data + kHidden, kTokens, kTopK, kStride + 7}))
      << "strides that do not tell";
}

TEST(Validate, InputGradientsOfUnlikeTypes) {
  std::vector<float> buffer(kTokens * kHidden);
  auto* halves = reinterpret_cast<bf16*>(buffer.data());
  const AnyMatrix x(halves, kTokens, kHidden, kHidden);
  expect_shared(x, {buffer.data() + kTokens * kHidden / 2 - 1, kTokens, kTopK, kTopK});
  EXPECT_NO_THROW(check(x, {buffer.data() + kTokens * kHidden / 2, kTokens, kTopK, kTopK}));
}

// Rows that no route has are nobody's: views may overlap there, and have strides of which nothing is made.
TEST(Validate, SavedRowsBeyondTheRoutedOnes) {
  constexpr index_t kRouted = 2;
  std::vector<float> buffer(2 * kTokens * kHidden);
  float* data = buffer.data();
  const auto check_saved = [&](index_t routed, const amx_sft_moe::MatrixView<float>& gate,
                               const amx_sft_moe::MatrixView<float>& up) {
    const amx_sft_moe::SavedActivations<float> saved{gate, up, {}, {}, {}};
    amx_sft_moe::validate::outputs_apart<float, float>({}, saved.first_rows(routed), tiny_config(), {}, {}, {},
                                                       {});
  };
  const amx_sft_moe::MatrixView<float> gate{data, kTokens, kHidden, kHidden};
  const amx_sft_moe::MatrixView<float> up{data + kRouted * kHidden, kTokens, kHidden, kHidden};
  EXPECT_NO_THROW(check_saved(kRouted, gate, up));
  expect_refused<ArgumentError>([&] { check_saved(kRouted + 1, gate, up); },
                                {"saved.gate", "memory of its own", "saved.up has too"});
  EXPECT_NO_THROW(check_saved(0, gate, gate));
  const amx_sft_moe::MatrixView<float> huge{data, index_t{1} << 40, kHidden, index_t{1} << 40};
  EXPECT_NO_THROW(check_saved(0, huge, huge));
  const amx_sft_moe::SavedActivations<float> first =
      amx_sft_moe::SavedActivations<float>{gate, gate, gate, gate, gate}.first_rows(kRouted);
  for (const auto& m : {first.gate, first.up, first.u_gate, first.u_up, first.u_down}) {
    EXPECT_EQ(m.data, data);
    EXPECT_EQ(m.rows, kRouted);
    EXPECT_EQ(m.cols, kHidden);
  }
}

TEST(Validate, RoomThatNoAddressSpaceHas) {
  amx_sft_moe::Config config = tiny_config();
  amx_sft_moe::LoraWeights lora;
  const float one = 1.0F;
  const auto check_room = [&](index_t tokens) {
    amx_sft_moe::validate::room_for_routes({tokens, {}, {}}, config, lora);
  };
  EXPECT_NO_THROW(check_room(std::numeric_limits<std::int32_t>::max()));
  lora.up.a = {&one, 1, index_t{1} << 50, 1, 0, 0, 1};
  EXPECT_NO_THROW(check_room(1));
  EXPECT_THROW(check_room(2), std::bad_alloc);
  EXPECT_NO_THROW(check_room(0)) << "no tokens, no rows";
  config.top_k = 2;
  EXPECT_THROW(check_room(1), std::bad_alloc);
  lora.up.a = {};
  config.hidden_size = (index_t{1} << 50) + 1;
  config.top_k = 1;
  EXPECT_THROW(check_room(1), std::bad_alloc);
}

// When the gradients of inputs are written, what the call brought has been read.
TEST(Validate, InputGradientsWhereInputsLie) {
  std::vector<float> buffer(kTokens * kHidden);
  float* data = buffer.data();
  const AnyMatrix lent(data, kTokens, kHidden, kHidden);
  const amx_sft_moe::AnyConstMatrix read(data, kTokens, kHidden, kHidden);
  const amx_sft_moe::MatrixView<float> saved{data, kTokens, kHidden, kHidden};
  const amx_sft_moe::Routing routing{kTokens, {}, read};
  amx_sft_moe::Gradients of_x, of_routing_weights;
  of_x.x = of_routing_weights.routing_weights = lent;
  for (const amx_sft_moe::Gradients& grads : {of_x, of_routing_weights}) {
    EXPECT_NO_THROW((amx_sft_moe::validate::gradients_apart<float, float>(
        grads, tiny_config(), {}, {}, routing, read, {saved, saved, saved, saved, saved}, read)));
  }
}

}  // namespace
}  // namespace sft_test
