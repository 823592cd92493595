// Saved activations: the operator's own stack, and buffers of the caller's.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "compare.hpp"
#include "refusal.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::ArgumentError;
using amx_sft_moe::Config;
using amx_sft_moe::StateError;

inline constexpr Case kCase{"stack", 17, 2, 3, 33, 18, {5, 3, 2}};
const Complaint kEmpty{"backward", "a saved forward", "an empty stack (depth 0)"};

template <class Kernel>
class OperatorStack : public KernelTest<Kernel> {
 protected:
  // Batches of different sizes on one layer; one of them without tokens.
  static std::vector<Problem> batches() {
    std::vector<Problem> out;
    out.push_back(random_problem(kCase, kPlain, kWeightDType<Kernel>));
    const int tokens[] = {3, 0, 40};
    for (unsigned n = 0; n < 3; ++n) out.push_back(another_batch(out.front(), kCase, tokens[n], 50 + n));
    return out;
  }
  static Config deep(const Problem& problem, index_t depth) {
    Config config = problem.config();
    config.cache_depth = depth;
    return config;
  }
  static bool is_poison(const Tensor& tensor) { return tensor.bits() == poisoned_like(tensor).bits(); }

 private:
  static Tensor poisoned_like(const Tensor& tensor) {
    return Tensor(tensor.dtype(), tensor.extents(), Strides::rows(tensor.extents()));
  }
};
TYPED_TEST_SUITE(OperatorStack, AllKernels, KernelLabels);

TYPED_TEST(OperatorStack, SeveralForwardsThenTheirBackwardsInReverse) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0], this->deep(batches[0], 4));
  for (int round = 0; round < 2; ++round) {  // the second round reuses the stack's memory
    std::vector<Outputs> outputs;
    for (std::size_t n = 0; n < batches.size(); ++n) {
      outputs.emplace_back(batches[n]);
      moe.forward_sft(batches[n].routing(), batches[n].x(), outputs[n].y());
      EXPECT_EQ(moe.saved_depth(), static_cast<index_t>(n + 1));
    }
    for (std::size_t n = batches.size(); n-- > 0;) {
      moe.backward(batches[n].grad_y(), outputs[n].gradients());
      EXPECT_EQ(moe.saved_depth(), static_cast<index_t>(n));
    }
    for (std::size_t n = 0; n < batches.size(); ++n) {
      SCOPED_TRACE("batch " + std::to_string(n));
      expect_same_bits(step_alone<TypeParam>(batches[n]), outputs[n]);
    }
  }
}

TYPED_TEST(OperatorStack, FullStackRefusesAndChangesNothing) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0], this->deep(batches[0], 2));
  Outputs first(batches[0]);
  Outputs second(batches[1]);
  Outputs refused(batches[3]);
  moe.forward_sft(batches[0].routing(), batches[0].x(), first.y());
  moe.forward_sft(batches[1].routing(), batches[1].x(), second.y());
  expect_refused<StateError>([&] { moe.forward_sft(batches[3].routing(), batches[3].x(), refused.y()); },
                             {"save_for_backward", "at most cache_depth = 2", "one more"});
  EXPECT_EQ(moe.saved_depth(), 2);
  EXPECT_TRUE(this->is_poison(refused[reference::kY]));
  moe.backward(batches[1].grad_y(), second.gradients());
  moe.backward(batches[0].grad_y(), first.gradients());
  expect_same_bits(step_alone<TypeParam>(batches[1]), second);
  expect_same_bits(step_alone<TypeParam>(batches[0]), first);
}

TYPED_TEST(OperatorStack, EmptyPopRefuses) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0]);
  Outputs out(batches[0]);
  expect_refused<StateError>([&] { moe.backward(batches[0].grad_y(), out.gradients()); }, kEmpty);
  EXPECT_TRUE(this->is_poison(out[reference::kGradX]));
  run_step(moe, batches[0], out);
  expect_same_bits(step_alone<TypeParam>(batches[0]), out);
  expect_refused<StateError>([&] { moe.backward(batches[0].grad_y(), out.gradients()); }, kEmpty);
}

TYPED_TEST(OperatorStack, ClearDropsEverything) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0], this->deep(batches[0], 2));
  Outputs out(batches[0]);
  moe.forward_sft(batches[0].routing(), batches[0].x(), out.y());
  moe.forward_sft(batches[0].routing(), batches[0].x(), out.y());
  moe.clear();
  EXPECT_EQ(moe.saved_depth(), 0);
  expect_refused<StateError>([&] { moe.backward(batches[0].grad_y(), out.gradients()); }, kEmpty);
  run_step(moe, batches[0], out);
  expect_same_bits(step_alone<TypeParam>(batches[0]), out);
}

// An evaluation forward works on a full stack, saves nothing, and leaves what is there alone.
TYPED_TEST(OperatorStack, EvaluationForwardSavesNothing) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0]);
  Outputs training(batches[0]);
  Outputs evaluation(batches[3]);
  moe.forward_sft(batches[0].routing(), batches[0].x(), training.y());
  const index_t saved_bytes = moe.memory().saved_bytes;
  moe.forward_sft(batches[3].routing(), batches[3].x(), evaluation.y(), false);
  EXPECT_EQ(moe.saved_depth(), 1);
  EXPECT_EQ(moe.memory().saved_bytes, saved_bytes);
  moe.backward(batches[0].grad_y(), training.gradients());
  expect_same_bits(step_alone<TypeParam>(batches[0]), training);
  EXPECT_EQ(step_alone<TypeParam>(batches[3])[reference::kY].bits(), evaluation[reference::kY].bits());
}

TYPED_TEST(OperatorStack, OperatorThatOnlyEvaluatesKeepsNoActivations) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0]);
  Outputs out(batches[0]);
  moe.forward_sft(batches[0].routing(), batches[0].x(), out.y(), false);
  EXPECT_EQ(moe.saved_depth(), 0);
  EXPECT_EQ(moe.memory().saved_bytes, 0);
  expect_refused<StateError>([&] { moe.backward(batches[0].grad_y(), out.gradients()); }, kEmpty);
}

TYPED_TEST(OperatorStack, RefusedBackwardKeepsItsEntry) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0]);
  Outputs out(batches[0]);
  moe.forward_sft(batches[0].routing(), batches[0].x(), out.y());
  // grad_y of another batch: its number of tokens is not that of the forward.
  expect_refused<ArgumentError>([&] { moe.backward(batches[1].grad_y(), out.gradients()); },
                                {"grad_y.rows", "expected 17", "got 3"});
  EXPECT_EQ(moe.saved_depth(), 1);
  for (std::size_t t = reference::kGradX; t < reference::kTensors; ++t) {
    EXPECT_TRUE(this->is_poison(out[static_cast<reference::Tensor>(t)])) << reference::kTensorNames[t];
  }
  moe.backward(batches[0].grad_y(), out.gradients());
  expect_same_bits(step_alone<TypeParam>(batches[0]), out);
}

// Factors of other ranks than the forward's do not fit what it saved.
TYPED_TEST(OperatorStack, BackwardWithOtherRanksRefuses) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  amx_sft_moe::LoraWeights other = problem.lora();
  other.up = other.down = {};
  moe.set_lora(other);
  try {
    moe.backward(problem.grad_y(), out.gradients());
    FAIL() << "accepted";
  } catch (const StateError& error) {
    EXPECT_STREQ(
        error.what(),
        "backward: expected LoRA ranks of gate, up and down as in the saved forward (5, 3, 2), got (5, 0, 0)");
  }
  EXPECT_EQ(moe.saved_depth(), 1);
  moe.set_lora(problem.lora());
  moe.backward(problem.grad_y(), out.gradients());
  expect_same_bits(step_alone<TypeParam>(problem), out);
}

TYPED_TEST(OperatorStack, RefusedForwardPushesNothing) {
  const std::vector<Problem> batches = this->batches();
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0]);
  Outputs out(batches[0]);
  const Outputs other(batches[1]);
  expect_refused<ArgumentError>([&] { moe.forward_sft(batches[0].routing(), batches[1].x(), out.y()); },
                                {"x.rows", "expected 17", "got 3"});
  expect_refused<ArgumentError>([&] { moe.forward_sft(batches[0].routing(), batches[0].x(), other.y()); },
                                {"y.rows", "expected 17", "got 3"});
  EXPECT_EQ(moe.saved_depth(), 0);
  EXPECT_TRUE(this->is_poison(out[reference::kY]));
  run_step(moe, batches[0], out);
  expect_same_bits(step_alone<TypeParam>(batches[0]), out);
}

// What the stack saves is the operator's: a trainer's buffers may be used again before the backward.
TYPED_TEST(OperatorStack, InputsMayBeOverwrittenBeforeTheBackward) {
  Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  problem.x_tensor().poison();
  problem.routing_weights().poison();
  problem.poison_ids();
  moe.backward(problem.grad_y(), out.gradients());
  expect_same_bits(want, out);
}

// y is written where x lay, and grad_x where grad_y lay.
TYPED_TEST(OperatorStack, OutputsMayBeTheInputs) {
  Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), problem.x_tensor().matrix_view());
  EXPECT_EQ(problem.x_tensor().bits(), want[reference::kY].bits());
  amx_sft_moe::Gradients grads = out.gradients();
  grads.x = problem.grad_y_tensor().matrix_view();
  moe.backward(problem.grad_y(), grads);
  out[reference::kY].store(problem.x_tensor().values());
  out[reference::kGradX].store(problem.grad_y_tensor().values());
  expect_same_bits(want, out);
}

// grad_x is written where x lay, which the gradients of the A factors and of the base weights still read. (The
// stack keeps x in the kernel's own type: an fp32 x does not give the bits that it gives with the caller's
// buffers.)
TYPED_TEST(OperatorStack, GradXMayBeX) {
  const Case c = with_trained_base(with_biases({"grad_x_is_x", 41, 3, 4, 37, 29, {5, 3, 7}}));
  for (const Storage& storage : {kPlain, kWide}) {
    SCOPED_TRACE(storage.name);
    for (const bool on_stack : {true, false}) {
      SCOPED_TRACE(on_stack ? "stack" : "the caller's buffers");
      Problem problem = random_problem(c, storage, kWeightDType<TypeParam>);
      const SavedBuffers<typename TypeParam::Stored> saved(problem);
      Moe<TypeParam> moe = make_moe<TypeParam>(problem);
      const auto run = [&](const Outputs& out, const amx_sft_moe::Gradients& grads) {
        if (on_stack) {
          moe.forward_sft(problem.routing(), problem.x(), out.y());
          moe.backward(problem.grad_y(), grads);
        } else {
          moe.forward_sft(problem.routing(), problem.x(), out.y(), saved.view());
          moe.backward(problem.routing(), problem.x(), saved.view(), problem.grad_y(), grads);
        }
      };
      const Outputs want(problem);
      run(want, want.gradients());
      Outputs got(problem);
      amx_sft_moe::Gradients grads = got.gradients();
      grads.x = problem.x_tensor().matrix_view();
      run(got, grads);
      got[reference::kGradX].store(problem.x_tensor().values());
      expect_same_bits(want, got);
      EXPECT_TRUE(problem.x_tensor().gaps_are_poison());
    }
  }
}

TYPED_TEST(OperatorStack, CallersBuffersGiveTheSameBits) {
  for (const Case& c :
       {kCase, Case{"skipped", 17, 3, 3, 33, 18, {5, 0, 2}, kSkipped},
        Case{"shared_a", 9, 2, 3, 33, 18, {4, 4, 4}, kDistinct, true},
        Case{"no_lora", 9, 2, 3, 33, 18, {0, 0, 0}}, Case{"none", 0, 2, 3, 33, 18, {2, 2, 2}}}) {
    SCOPED_TRACE(c.name);
    const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
    const Outputs want = step_alone<TypeParam>(problem);
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    using Buffers = SavedBuffers<typename TypeParam::Stored>;
    const index_t rows = routed_rows(problem);
    // Just enough, with padded rows, and more rows than needed.
    const Buffers buffers[] = {Buffers(problem), Buffers(problem, rows, 3, Edge::kStart),
                               Buffers(problem, rows + 5)};
    for (const Buffers& saved : buffers) {
      Outputs out(problem);
      moe.forward_sft(problem.routing(), problem.x(), out.y(), saved.view());
      EXPECT_EQ(moe.saved_depth(), 0);
      moe.backward(problem.routing(), problem.x(), saved.view(), problem.grad_y(), out.gradients());
      expect_same_bits(want, out);
      EXPECT_TRUE(saved.gate.gaps_are_poison() && saved.u_down.gaps_are_poison());
    }
  }
}

// Autograd may run backwards in any order, twice, and with the stack in use beside.
TYPED_TEST(OperatorStack, CallersBuffersInAnyOrder) {
  const std::vector<Problem> batches = this->batches();
  using Buffers = SavedBuffers<typename TypeParam::Stored>;
  Moe<TypeParam> moe = make_moe<TypeParam>(batches[0]);
  const Buffers saved[] = {Buffers(batches[0]), Buffers(batches[1])};
  Outputs out[] = {Outputs(batches[0]), Outputs(batches[1])};
  Outputs on_stack(batches[3]);
  moe.forward_sft(batches[0].routing(), batches[0].x(), out[0].y(), saved[0].view());
  moe.forward_sft(batches[3].routing(), batches[3].x(), on_stack.y());
  moe.forward_sft(batches[1].routing(), batches[1].x(), out[1].y(), saved[1].view());
  for (const std::size_t n : {0U, 1U, 0U}) {
    out[n][reference::kGradX].poison();
    moe.backward(batches[n].routing(), batches[n].x(), saved[n].view(), batches[n].grad_y(),
                 out[n].gradients());
    expect_same_bits(step_alone<TypeParam>(batches[n]), out[n]);
  }
  moe.backward(batches[3].grad_y(), on_stack.gradients());
  expect_same_bits(step_alone<TypeParam>(batches[3]), on_stack);
}

// What is saved is what the documentation of SavedActivations says: g and u before the activation, scaled u's, that of
// down weighted.
TYPED_TEST(OperatorStack, SavedValuesAreTheDocumentedOnes) {
  const Case c{"one_expert", 9, 1, 1, 33, 18, {5, 3, 2}};  // rows in the order of tokens
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  const SavedBuffers<typename TypeParam::Stored> saved(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y(), saved.view());
  reference::Exact exact;
  const reference::Layer& layer = problem.layer();
  const double tolerance = std::is_same_v<typename TypeParam::Stored, float> ? 1e-5 : 0.01;
  for (int token = 0; token < c.tokens; ++token) {
    const reference::Route route =
        reference::forward_route(layer, reference::row_of(problem.batch().x, token, c.hidden), 0, exact);
    const auto expect_row = [&](const Tensor& got, const std::vector<double>& want, double factor,
                                const char* name) {
      for (std::size_t n = 0; n < want.size(); ++n) {
        EXPECT_NEAR(got.get(0, token, static_cast<index_t>(n)), factor * want[n],
                    tolerance * (std::abs(factor * want[n]) + 1))
            << name;
      }
    };
    expect_row(saved.gate, route.g, 1, "gate");
    expect_row(saved.up, route.u, 1, "up");
    expect_row(saved.u_gate, route.u_gate, layer.lora_gate.scaling, "u_gate");
    expect_row(saved.u_up, route.u_up, layer.lora_up.scaling, "u_up");
    const double weight = problem.batch().weights[static_cast<std::size_t>(token)];
    expect_row(saved.u_down, route.u_down, weight * layer.lora_down.scaling, "u_down");
  }
}

}  // namespace
}  // namespace sft_test
