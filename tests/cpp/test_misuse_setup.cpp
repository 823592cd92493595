// Wrong configurations, base weights and LoRA factors, on every kernel: refused by the constructor and by set_base
// and set_lora, which then leave what was set before.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "compare.hpp"
#include "emulation.hpp"
#include "refusal.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::AnyConstExpertTensor;
using amx_sft_moe::ArgumentError;
using amx_sft_moe::Config;
using amx_sft_moe::LoraWeights;
using amx_sft_moe::StateError;

inline constexpr Case kCase = with_biases({"misuse", 9, 2, 3, 17, 33, {4, 5, 6}});

template <class Kernel>
class MisuseOfSetup : public KernelTest<Kernel> {};
TYPED_TEST_SUITE(MisuseOfSetup, AllKernels, KernelLabels);

struct BadConfig {
  Complaint complaint;
  std::function<void(Config&)> spoil;
};

std::vector<BadConfig> bad_configs() {
  return {
      {{"num_experts", "1", "0"}, [](Config& c) { c.num_experts = 0; }},
      {{"num_experts", "1", "-3"}, [](Config& c) { c.num_experts = -3; }},
      {{"num_experts", "2147483647", "2147483648"}, [](Config& c) { c.num_experts = index_t{1} << 31; }},
      {{"top_k", "1", "0"}, [](Config& c) { c.top_k = 0; }},
      {{"top_k", "1", "-1"}, [](Config& c) { c.top_k = -1; }},
      {{"hidden_size", "1", "0"}, [](Config& c) { c.hidden_size = 0; }},
      {{"intermediate_size", "1", "-33"}, [](Config& c) { c.intermediate_size = -33; }},
      {{"max_tokens", "0", "-1"}, [](Config& c) { c.max_tokens = -1; }},
      {{"cache_depth", "1", "-2"}, [](Config& c) { c.cache_depth = -2; }},
      {{"num_threads", "0", "-4"}, [](Config& c) { c.num_threads = -4; }},
      {{"limit", "positive", "-7"},
       [](Config& c) {
         c.activation = amx_sft_moe::ClampedGlu{-7.0F, 1.702F};
       }},
      {{"limit", "positive", "got 0"},
       [](Config& c) {
         c.activation = amx_sft_moe::ClampedGlu{0.0F, 1.702F};
       }},
      {{"limit", "positive", "nan"},
       [](Config& c) {
         c.activation = amx_sft_moe::ClampedGlu{std::numeric_limits<float>::quiet_NaN(), 1.702F};
       }},
      {{"alpha", "finite", "inf"},
       [](Config& c) {
         c.activation = amx_sft_moe::ClampedGlu{7.0F, std::numeric_limits<float>::infinity()};
       }},
  };
}

TYPED_TEST(MisuseOfSetup, ConfigIsRefused) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  for (const BadConfig& bad : bad_configs()) {
    Config config = problem.config();
    bad.spoil(config);
    expect_refused<ArgumentError>(
        [&] { Moe<TypeParam>(config, problem.base<typename TypeParam::Weight>(), problem.lora()); },
        bad.complaint);
  }
}

template <class Weight>
struct BadBase {
  Complaint complaint;
  std::function<void(amx_sft_moe::BaseWeights<Weight>&)> spoil;
};

template <class Weight>
std::vector<BadBase<Weight>> bad_base_weights() {
  using BaseWeights = amx_sft_moe::BaseWeights<Weight>;
  static const std::vector<Weight> storage(17 * 33);
  static const Weight* const one_is_null[] = {storage.data(), storage.data(), nullptr};
  return {
      {{"gate", "non-null", "null"}, [](BaseWeights& w) { w.gate.base = nullptr; }},
      {{"up", "address space", "9223372036854775807"},
       [](BaseWeights& w) { w.up.expert_stride = std::numeric_limits<index_t>::max(); }},
      {{"up", "non-null", "null"},
       [](BaseWeights& w) {
         w.up = {};
         w.up.rows = 33;
         w.up.cols = w.up.row_stride = 17;
       }},
      {{"down", "non-null", "null"}, [](BaseWeights& w) { w.down.base = nullptr; }},
      {{"down[2]", "non-null", "null"}, [](BaseWeights& w) { w.down.pointers = one_is_null; }},
      {{"gate.rows", "33", "32"}, [](BaseWeights& w) { w.gate.rows = 32; }},
      {{"gate.cols", "17", "18"}, [](BaseWeights& w) { w.gate.cols = 18; }},
      {{"up.rows", "33", "17"}, [](BaseWeights& w) { std::swap(w.up.rows, w.up.cols); }},
      {{"down.rows", "17", "33"}, [](BaseWeights& w) { std::swap(w.down.rows, w.down.cols); }},
      {{"down.cols", "33", "0"}, [](BaseWeights& w) { w.down.cols = 0; }},
      {{"up.row_stride", "17", "16"}, [](BaseWeights& w) { w.up.row_stride = 16; }},
      {{"down.row_stride", "33", "-33"}, [](BaseWeights& w) { w.down.row_stride = -33; }},
      {{"biases.gate.rows", "3", "2"},
       [](BaseWeights& w) {
         w.biases.gate = {storage.data(), 2, 33, 33};
       }},
      {{"biases.up.cols", "33", "17"},
       [](BaseWeights& w) {
         w.biases.up = {storage.data(), 3, 17, 17};
       }},
      {{"biases.down.cols", "17", "33"},
       [](BaseWeights& w) {
         w.biases.down = {storage.data(), 3, 33, 33};
       }},
      {{"biases.gate", "address space", "9223372036854775807"},
       [](BaseWeights& w) {
         w.biases.gate = {storage.data(), 3, 33, std::numeric_limits<index_t>::max()};
       }},
  };
}

TYPED_TEST(MisuseOfSetup, BaseWeightsAreRefusedAndTheOldOnesKept) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  for (const auto& bad : bad_base_weights<typename TypeParam::Weight>()) {
    SCOPED_TRACE(bad.complaint.argument);
    auto weights = problem.base<typename TypeParam::Weight>();
    bad.spoil(weights);
    expect_refused<ArgumentError>([&] { Moe<TypeParam>(problem.config(), weights, problem.lora()); },
                                  bad.complaint);
    expect_refused<ArgumentError>([&] { moe.set_base(weights); }, bad.complaint);
    Outputs got(problem);
    run_step(moe, problem, got);
    expect_same_bits(want, got);
  }
}

struct BadLora {
  Complaint complaint;
  std::function<void(LoraWeights&)> spoil;
};

std::vector<BadLora> bad_lora_weights() {
  static const std::vector<float> storage(4096);
  const auto tensor = [](index_t experts, index_t rows, index_t cols) {
    return AnyConstExpertTensor(storage.data(), experts, rows, cols);
  };
  return {
      {{"gate.b", "", "null"}, [](LoraWeights& l) { l.gate.b = {}; }},
      {{"down.a", "", "null"}, [](LoraWeights& l) { l.down.a = {}; }},
      {{"gate.a.rows", "0", "-4"}, [=](LoraWeights& l) { l.gate.a = tensor(3, -4, 17); }},
      {{"gate.a.experts", "3", "2"}, [=](LoraWeights& l) { l.gate.a = tensor(2, 4, 17); }},
      {{"gate.a.cols", "17", "33"}, [=](LoraWeights& l) { l.gate.a = tensor(3, 4, 33); }},
      {{"gate.b.experts", "3", "4"}, [=](LoraWeights& l) { l.gate.b = tensor(4, 33, 4); }},
      {{"gate.b.rows", "33", "17"}, [=](LoraWeights& l) { l.gate.b = tensor(3, 17, 4); }},
      {{"gate.b.cols", "4", "7"}, [=](LoraWeights& l) { l.gate.b = tensor(3, 33, 7); }},
      {{"up.b.cols", "5", "4"}, [=](LoraWeights& l) { l.up.b = tensor(3, 33, 4); }},
      {{"up.a.cols", "17", "5"}, [=](LoraWeights& l) { l.up.a = tensor(3, 5, 5); }},
      {{"down.a.cols", "33", "17"}, [=](LoraWeights& l) { l.down.a = tensor(3, 6, 17); }},
      {{"down.b.rows", "17", "33"}, [=](LoraWeights& l) { l.down.b = tensor(3, 33, 6); }},
      // A of rank 0 beside a B of rank 4 is a mismatch, not "no adapter".
      {{"gate", "0", "4"}, [=](LoraWeights& l) { l.gate.a = tensor(3, 0, 17); }},
      {{"up", "5", "0"}, [=](LoraWeights& l) { l.up.b = tensor(3, 33, 0); }},
      {{"up.scaling", "finite", "nan"},
       [](LoraWeights& l) { l.up.scaling = std::numeric_limits<float>::quiet_NaN(); }},
  };
}

TYPED_TEST(MisuseOfSetup, LoraWeightsAreRefusedAndTheOldOnesKept) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  for (const BadLora& bad : bad_lora_weights()) {
    SCOPED_TRACE(bad.complaint.argument);
    LoraWeights lora = problem.lora();
    bad.spoil(lora);
    expect_refused<ArgumentError>(
        [&] { Moe<TypeParam>(problem.config(), problem.base<typename TypeParam::Weight>(), lora); },
        bad.complaint);
    expect_refused<ArgumentError>([&] { moe.set_lora(lora); }, bad.complaint);
    if (testing::Test::HasFailure()) moe.set_lora(problem.lora());  // one failure shall not bring others
    Outputs got(problem);
    run_step(moe, problem, got);
    expect_same_bits(want, got);
  }
}

// Between a forward and its backward the ranks must not change: what was saved would not fit.
TYPED_TEST(MisuseOfSetup, OtherRanksBetweenForwardAndBackward) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  for (const Ranks& ranks : {Ranks{9, 5, 6}, Ranks{4, 2, 6}, Ranks{4, 5, 0}}) {
    Case other_case = kCase;
    other_case.ranks = ranks;
    const Problem other = random_problem(other_case, kPlain, kWeightDType<TypeParam>);
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    Outputs got(problem);
    Outputs refused(other);
    moe.forward_sft(problem.routing(), problem.x(), got.y());
    moe.set_lora(other.lora());
    expect_refused<StateError>(
        [&] { moe.backward(problem.grad_y(), refused.gradients()); },
        {"LoRA ranks", "(4, 5, 6)",
         amx_sft_moe::concat("got (", ranks.gate, ", ", ranks.up, ", ", ranks.down, ")")});
    moe.set_lora(problem.lora());
    ASSERT_EQ(moe.saved_depth(), 1);
    moe.backward(problem.grad_y(), got.gradients());
    expect_same_bits(want, got);
  }
}

// Whether the kernel is unavailable; then its constructor must say so.
template <class AnyKernel>
bool is_refused_if_unavailable() {
  if (AnyKernel::available()) return false;
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<AnyKernel>);
  expect_refused<amx_sft_moe::KernelError>([&] { make_moe<AnyKernel>(problem); },
                                           {std::string(AnyKernel::kName), AnyKernel::refusal(), ""});
  return true;
}

template <class... Kernels>
int count_unavailable(testing::Types<Kernels...>) {
  return (0 + ... + (is_refused_if_unavailable<Kernels>() ? 1 : 0));
}

// Without the emulator a kernel is missing on every CPU but those with all of AMX and AVX512-BF16.
TEST(MisuseOfKernel, UnavailableKernelIsAKernelError) {
  const bool amx = AmxBf16::available();
  int unavailable = 0;
  {
    const WithoutEmulation real;
    unavailable = count_unavailable(AllKernels{});
  }
  EXPECT_EQ(AmxBf16::available(), amx) << "the emulator is not back";
  if (unavailable == 0) GTEST_SKIP() << "this CPU has every kernel";
}

}  // namespace
}  // namespace sft_test
