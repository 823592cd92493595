// Wrong arguments of forward_sft and backward: refused before anything is written, saved or popped, and the
// next correct call gives the right bits.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "bad_calls.hpp"
#include "compare.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::ArgumentError;
using amx_sft_moe::Config;

using Kernel = PortableBf16;  // the checks are the operator's, the same for every kernel

inline constexpr Case kCase = with_trained_base(with_biases({"misuse", 9, 2, 3, 17, 33, {4, 5, 6}}));

class MisuseOfCalls : public testing::Test {
 protected:
  Call correct_call() const {
    return {problem_.routing(), problem_.x(),         outputs_.y(),
            problem_.grad_y(),  outputs_.gradients(), saved_.view()};
  }
  Call spoiled(const BadCall& bad) const {
    Call call = correct_call();
    bad.spoil(call);
    return call;
  }
  static amx_sft_moe::Config config_of(const Problem& problem) {
    amx_sft_moe::Config config = problem.config();
    config.max_tokens = 12;
    return config;
  }
  // Neither into the results nor where the wrong arguments point to.
  void expect_nothing_written() const {
    const Outputs untouched(problem_);
    expect_same_bits(untouched, outputs_);
    EXPECT_TRUE(outputs_.gaps_are_poison());
    EXPECT_TRUE(somewhere_is_untouched()) << "a refused call wrote where its argument points to";
  }
  std::array<std::vector<std::uint32_t>, 5> saved_bits() const {
    return {saved_.gate.bits(), saved_.up.bits(), saved_.u_gate.bits(), saved_.u_up.bits(),
            saved_.u_down.bits()};
  }
  // Of a backward; y, which it does not write, is poison.
  void expect_right_gradients() {
    outputs_[reference::kY].store(want_[reference::kY].values());
    expect_same_bits(want_, outputs_);
    outputs_.poison();
  }
  void expect_still_usable() {
    run_step(moe_, problem_, outputs_);
    expect_same_bits(want_, outputs_);
    outputs_.poison();
  }

  Problem problem_ = random_problem(kCase, kPlain, DType::kBf16);
  Outputs want_ = step_alone<Kernel>(problem_);
  Outputs outputs_{problem_};
  SavedBuffers<Kernel::Stored> saved_{problem_};
  Moe<Kernel> moe_ = make_moe<Kernel>(problem_, config_of(problem_));
};

TEST_F(MisuseOfCalls, ForwardOnTheStack) {
  for (const std::vector<BadCall>& table : {bad_routings(), bad_forwards()}) {
    for (const BadCall& bad : table) {
      SCOPED_TRACE(bad.complaint.argument);
      const Call call = spoiled(bad);
      for (const bool save : {true, false}) {
        expect_refused<ArgumentError>([&] { moe_.forward_sft(call.routing, call.x, call.y, save); },
                                      bad.complaint);
      }
      EXPECT_EQ(moe_.saved_depth(), 0);
      expect_nothing_written();
      expect_still_usable();
    }
  }
}

TEST_F(MisuseOfCalls, ForwardIntoCallersBuffers) {
  const auto poison = saved_bits();
  for (const std::vector<BadCall>& table : {bad_routings(), bad_forwards(), bad_saved_activations()}) {
    for (const BadCall& bad : table) {
      SCOPED_TRACE(bad.complaint.argument);
      const Call call = spoiled(bad);
      expect_refused<ArgumentError>([&] { moe_.forward_sft(call.routing, call.x, call.y, call.saved); },
                                    bad.complaint);
      expect_nothing_written();
      EXPECT_EQ(saved_bits(), poison);
      expect_still_usable();
    }
  }
}

TEST_F(MisuseOfCalls, BackwardFromTheStackKeepsItsEntry) {
  for (const BadCall& bad : bad_backwards()) {
    SCOPED_TRACE(bad.complaint.argument);
    const Call call = spoiled(bad);
    moe_.forward_sft(problem_.routing(), problem_.x(), outputs_.y());
    outputs_.poison();
    expect_refused<ArgumentError>([&] { moe_.backward(call.grad_y, call.grads); }, bad.complaint);
    EXPECT_EQ(moe_.saved_depth(), 1);
    expect_nothing_written();
    moe_.backward(problem_.grad_y(), outputs_.gradients());
    expect_right_gradients();
  }
}

TEST_F(MisuseOfCalls, BackwardFromCallersBuffers) {
  moe_.forward_sft(problem_.routing(), problem_.x(), outputs_.y(), saved_.view());
  outputs_.poison();
  const auto saved_values = saved_bits();
  std::vector<BadCall> wrong_x;
  for (const BadCall& bad : bad_forwards()) {
    if (bad.complaint.argument[0] == 'x') wrong_x.push_back(bad);
  }
  for (const std::vector<BadCall>& table :
       {bad_routings(), wrong_x, bad_backwards(), bad_saved_activations()}) {
    for (const BadCall& bad : table) {
      SCOPED_TRACE(bad.complaint.argument);
      const Call call = spoiled(bad);
      expect_refused<ArgumentError>(
          [&] { moe_.backward(call.routing, call.x, call.saved, call.grad_y, call.grads); }, bad.complaint);
      expect_nothing_written();
      EXPECT_EQ(saved_bits(), saved_values);
      expect_still_usable();
    }
  }
}

TEST_F(MisuseOfCalls, MoreRoutesThan32BitsCount) {
  Config config = problem_.config();
  config.max_tokens.reset();
  Moe<Kernel> moe = make_moe<Kernel>(problem_, config);
  Routing routing = problem_.routing();
  routing.tokens = amx_sft_moe::index_t{1} << 30;
  outputs_.poison();
  expect_refused<ArgumentError>([&] { moe.forward_sft(routing, problem_.x(), outputs_.y()); },
                                {"routing.tokens", "1073741823", "1073741824"});
  expect_nothing_written();
}

// Weights, factors, biases and activations are read while gradients are written.
TEST_F(MisuseOfCalls, GradientOfAWeightWhereAnInputLies) {
  const auto weight_at = [](const void* data, index_t experts, index_t rows, index_t cols) {
    return AnyExpertTensor(static_cast<bf16*>(const_cast<void*>(data)), experts, rows, cols);
  };
  const auto base = problem_.base<bf16>();
  const auto address = [](const auto& view) {
    return view.visit([](const auto* data) { return static_cast<const void*>(data); });
  };
  struct Input {
    const char* name;
    const void* data;
  };
  for (const Input& c :
       {Input{"weights.gate", base.gate.base}, Input{"weights.up", base.up.base + 1682},
        Input{"weights.down", base.down.base}, Input{"weights.biases.up", address(base.biases.up)},
        Input{"lora.up.b", address(problem_.lora().up.b[2])},
        Input{"routing.weights", address(problem_.routing().weights)}, Input{"x", address(problem_.x())},
        Input{"saved.gate", saved_.view().gate.data}, Input{"saved.u_down", saved_.view().u_down.data}}) {
    SCOPED_TRACE(c.name);
    moe_.forward_sft(problem_.routing(), problem_.x(), outputs_.y(), saved_.view());
    Call call = correct_call();
    call.grads.weights.gate = weight_at(c.data, 3, 33, 17);
    outputs_.poison();
    expect_refused<ArgumentError>(
        [&] { moe_.backward(call.routing, call.x, call.saved, call.grad_y, call.grads); },
        {"grads.weights.gate", "memory of its own", c.name});
    expect_nothing_written();
    moe_.backward(call.routing, call.x, call.saved, call.grad_y, outputs_.gradients());  // of the same inputs
    expect_right_gradients();
    expect_still_usable();
  }
  // One pointer for each expert, gradients wherever else.
  const Problem apart = random_problem(kCase, kPeftLike, DType::kBf16);
  Moe<Kernel> moe = make_moe<Kernel>(apart);
  Outputs out(apart);
  moe.forward_sft(apart.routing(), apart.x(), out.y());
  Gradients grads = out.gradients();
  grads.weights.down = {const_cast<bf16*>(apart.base<bf16>().down[2].data), 3, 17, 33};
  expect_refused<ArgumentError>([&] { moe.backward(apart.grad_y(), grads); },
                                {"grads.weights.down", "memory of its own", "weights.down"});
  moe.backward(apart.grad_y(), out.gradients());
  expect_same_bits(step_alone<Kernel>(apart), out);
}

// A factor given in place of its gradient: other tasks of the same region still read it.
TEST_F(MisuseOfCalls, GradientWhereAFactorLies) {
  const auto in_place = [](const amx_sft_moe::AnyConstExpertTensor& factor) {
    return factor[0].visit([&](const auto* data) {
      using T = std::remove_cvref_t<decltype(*data)>;
      return AnyExpertTensor(const_cast<T*>(data), factor.experts(), factor.rows(), factor.cols());
    });
  };
  const amx_sft_moe::LoraWeights lora = problem_.lora();
  struct Given {
    const char* name;
    AnyExpertTensor LoraGradients::*grad;
    const amx_sft_moe::AnyConstExpertTensor& factor;
  };
  for (const Given& given :
       {Given{"gate.a", &LoraGradients::gate_a, lora.gate.a}, Given{"up.b", &LoraGradients::up_b, lora.up.b},
        Given{"down.a", &LoraGradients::down_a, lora.down.a}}) {
    SCOPED_TRACE(given.name);
    moe_.forward_sft(problem_.routing(), problem_.x(), outputs_.y());
    Gradients grads = outputs_.gradients();
    grads.lora.*given.grad = in_place(given.factor);
    outputs_.poison();
    expect_refused<ArgumentError>([&] { moe_.backward(problem_.grad_y(), grads); },
                                  {"grads.lora.", "memory of its own", std::string("lora.") + given.name});
    expect_nothing_written();
    moe_.clear();
    expect_still_usable();
  }
}

TEST_F(MisuseOfCalls, GradientOfAnAbsentAdapter) {
  Case c = kCase;
  c.ranks.up = 0;
  const Problem problem = random_problem(c, kPlain, DType::kBf16);
  Moe<Kernel> moe = make_moe<Kernel>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  Gradients grads = out.gradients();
  grads.lora.up_b = AnyExpertTensor(somewhere(), 3, 33, 4);
  expect_refused<ArgumentError>([&] { moe.backward(problem.grad_y(), grads); }, {"up_b", "none", "a tensor"});
  EXPECT_TRUE(somewhere_is_untouched());
  moe.backward(problem.grad_y(), out.gradients());
  expect_same_bits(step_alone<Kernel>(problem), out);
}

TEST_F(MisuseOfCalls, SecondGradientOfASharedA) {
  const Case c{"shared", 9, 2, 3, 17, 33, {4, 4, 4}, kDistinct, true};
  const Problem problem = random_problem(c, kPlain, DType::kBf16);
  Moe<Kernel> moe = make_moe<Kernel>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  Gradients grads = out.gradients();
  grads.lora.up_a = AnyExpertTensor(somewhere(), 3, 4, 17);
  expect_refused<ArgumentError>([&] { moe.backward(problem.grad_y(), grads); }, {"up_a", "gate_a", "a tensor"});
  EXPECT_TRUE(somewhere_is_untouched());
  moe.backward(problem.grad_y(), out.gradients());
  expect_same_bits(step_alone<Kernel>(problem), out);
}

TEST_F(MisuseOfCalls, StackErrorsNameTheirValues) {
  using amx_sft_moe::StateError;
  expect_refused<StateError>([&] { moe_.backward(problem_.grad_y(), outputs_.gradients()); },
                             {"backward", "saved", "empty"});
  moe_.forward_sft(problem_.routing(), problem_.x(), outputs_.y());
  expect_refused<StateError>([&] { moe_.forward_sft(problem_.routing(), problem_.x(), outputs_.y()); },
                             {"save_for_backward", "cache_depth = 1", "1"});
}

// Exactly max_tokens is allowed, and null pointers are where there is nothing to point to.
TEST_F(MisuseOfCalls, LimitsThemselvesAreLegal) {
  const Problem full = another_batch(problem_, kCase, 12, 3);
  Outputs of_full(full);
  run_step(moe_, full, of_full);
  expect_same_bits(step_alone<Kernel>(full), of_full);

  Routing routing;
  routing.weights = null_matrix(0, 2);
  const Problem none = another_batch(problem_, kCase, 0, 3);
  Outputs of_none(none);
  moe_.forward_sft(routing, null_matrix(0, 17), {static_cast<float*>(nullptr), 0, 17, 17});
  moe_.backward(null_matrix(0, 17), of_none.gradients());
  expect_same_bits(step_alone<Kernel>(none), of_none);
}

}  // namespace
}  // namespace sft_test
