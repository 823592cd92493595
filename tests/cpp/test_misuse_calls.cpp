// Wrong arguments of forward_sft and backward, on every kernel: refused before anything is written, saved or popped, and the
// next correct call gives the right bits.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bad_calls.hpp"
#include "compare.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::ArgumentError;
using amx_sft_moe::Config;

inline constexpr Case kCase = with_trained_base(with_biases({"misuse", 9, 2, 3, 17, 33, {4, 5, 6}}));

template <class Kernel>
class MisuseOfCalls : public KernelTest<Kernel> {};
TYPED_TEST_SUITE(MisuseOfCalls, AllKernels, KernelLabels);

// A matrix [9, cols] where each parameter lies, by the parameter's name: y, or a gradient of an input, given there.
template <class Weight>
std::vector<std::pair<std::string, AnyMatrix>> where_parameters_lie(const Problem& problem, index_t cols) {
  const auto at = [&](const auto* data) {
    using T = std::remove_cvref_t<decltype(*data)>;
    return AnyMatrix(const_cast<T*>(data), kCase.tokens, cols, cols);
  };
  const amx_sft_moe::BaseWeights<Weight> base = problem.template base<Weight>();
  const amx_sft_moe::LoraWeights lora = problem.lora();
  return {
      {"weights.gate", at(base.gate[2].data)},         {"weights.up", at(base.up[1].data)},
      {"weights.down", at(base.down[0].data)},         {"weights.biases.gate", base.biases.gate.visit(at)},
      {"weights.biases.up", base.biases.up.visit(at)}, {"weights.biases.down", base.biases.down.visit(at)},
      {"lora.gate.a", lora.gate.a[0].visit(at)},       {"lora.gate.b", lora.gate.b[0].visit(at)},
      {"lora.up.a", lora.up.a[0].visit(at)},           {"lora.up.b", lora.up.b[0].visit(at)},
      {"lora.down.a", lora.down.a[0].visit(at)},       {"lora.down.b", lora.down.b[0].visit(at)},
  };
}

// A problem, its operator, and where the results go.
template <class Kernel>
struct Trial {
  Call correct_call() const {
    return {problem.routing(), problem.x(),         outputs.y(),
            problem.grad_y(),  outputs.gradients(), cast_saved<std::byte>(saved.view())};
  }
  Call spoiled(const BadCall& bad) const {
    Call call = correct_call();
    bad.spoil(call);
    return call;
  }
  void forward(const Call& call) {
    moe.forward_sft(call.routing, call.x, call.y, cast_saved<typename Kernel::Stored>(call.saved));
  }
  void backward(const Call& call) {
    moe.backward(call.routing, call.x, cast_saved<typename Kernel::Stored>(call.saved), call.grad_y,
                 call.grads);
  }
  static Config config_of(const Problem& problem) {
    Config config = problem.config();
    config.max_tokens = 12;
    return config;
  }
  // Neither into the results nor where the wrong arguments point to.
  void expect_nothing_written() const {
    const Outputs untouched(problem);
    expect_same_bits(untouched, outputs);
    EXPECT_TRUE(outputs.gaps_are_poison());
    EXPECT_TRUE(somewhere_is_untouched()) << "a refused call wrote where its argument points to";
  }
  std::array<std::vector<std::uint32_t>, 5> saved_bits() const {
    return {saved.gate.bits(), saved.up.bits(), saved.u_gate.bits(), saved.u_up.bits(), saved.u_down.bits()};
  }
  // Of a backward; y, which it does not write, is poison.
  void expect_right_gradients() {
    outputs[reference::kY].store(want[reference::kY].values());
    expect_same_bits(want, outputs);
    outputs.poison();
  }
  void expect_still_usable() {
    run_step(moe, problem, outputs);
    expect_same_bits(want, outputs);
    outputs.poison();
  }

  Problem problem = random_problem(kCase, kPlain, kWeightDType<Kernel>);
  Outputs want = step_alone<Kernel>(problem);
  Outputs outputs{problem};
  SavedBuffers<typename Kernel::Stored> saved{problem};
  Moe<Kernel> moe = make_moe<Kernel>(problem, config_of(problem));
};

TYPED_TEST(MisuseOfCalls, ForwardOnTheStack) {
  Trial<TypeParam> t;
  for (const std::vector<BadCall>& table : {bad_routings(), bad_forwards()}) {
    for (const BadCall& bad : table) {
      SCOPED_TRACE(bad.complaint.argument);
      const Call call = t.spoiled(bad);
      for (const bool save : {true, false}) {
        expect_refused<ArgumentError>([&] { t.moe.forward_sft(call.routing, call.x, call.y, save); },
                                      bad.complaint);
      }
      EXPECT_EQ(t.moe.saved_depth(), 0);
      t.expect_nothing_written();
      t.expect_still_usable();
    }
  }
}

TYPED_TEST(MisuseOfCalls, ForwardIntoCallersBuffers) {
  Trial<TypeParam> t;
  const auto poison = t.saved_bits();
  for (const std::vector<BadCall>& table :
       {bad_routings(), bad_forwards(), bad_saved_activations(), shared_saved_activations()}) {
    for (const BadCall& bad : table) {
      SCOPED_TRACE(bad.complaint.argument);
      const Call call = t.spoiled(bad);
      expect_refused<ArgumentError>([&] { t.forward(call); }, bad.complaint);
      t.expect_nothing_written();
      EXPECT_EQ(t.saved_bits(), poison);
      t.expect_still_usable();
    }
  }
}

// What a forward still reads is not where it writes.
TYPED_TEST(MisuseOfCalls, OutputWhereParametersLie) {
  Trial<TypeParam> t;
  for (const auto& [name, y] : where_parameters_lie<typename TypeParam::Weight>(t.problem, kCase.hidden)) {
    SCOPED_TRACE(name);
    for (const bool save : {true, false}) {
      expect_refused<ArgumentError>([&] { t.moe.forward_sft(t.problem.routing(), t.problem.x(), y, save); },
                                    {"y: ", "memory of its own", name + " has too"});
    }
    EXPECT_EQ(t.moe.saved_depth(), 0);
    t.expect_still_usable();
  }
}

// Gradients of inputs are written when the pass has read everything, but the next one reads parameters too.
TYPED_TEST(MisuseOfCalls, GradientsOfInputsWhereParametersLie) {
  using Weight = typename TypeParam::Weight;
  const std::pair<const char*, AnyMatrix Gradients::*> written[] = {
      {"grads.x: ", &Gradients::x}, {"grads.routing_weights: ", &Gradients::routing_weights}};
  for (const Storage& storage : {kPlain, kPeftLike}) {  // weights in one piece, and one pointer for each expert
    const Problem problem = random_problem(kCase, storage, kWeightDType<TypeParam>);
    const Outputs want = step_alone<TypeParam>(problem);
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    Outputs out(problem);
    moe.forward_sft(problem.routing(), problem.x(), out.y());
    for (const auto& [argument, grad] : written) {
      const index_t cols = grad == &Gradients::x ? kCase.hidden : kCase.top_k;
      for (const auto& [name, parameter] : where_parameters_lie<Weight>(problem, cols)) {
        SCOPED_TRACE(argument + name);
        Gradients grads = out.gradients();
        grads.*grad = parameter;
        expect_refused<ArgumentError>([&] { moe.backward(problem.grad_y(), grads); },
                                      {argument, "memory of its own", name + " has too"});
        EXPECT_EQ(moe.saved_depth(), 1);
      }
    }
    moe.backward(problem.grad_y(), out.gradients());
    expect_same_bits(want, out);
  }
}

TYPED_TEST(MisuseOfCalls, BackwardFromTheStackKeepsItsEntry) {
  Trial<TypeParam> t;
  for (const BadCall& bad : bad_backwards()) {
    SCOPED_TRACE(bad.complaint.argument);
    const Call call = t.spoiled(bad);
    t.moe.forward_sft(t.problem.routing(), t.problem.x(), t.outputs.y());
    t.outputs.poison();
    expect_refused<ArgumentError>([&] { t.moe.backward(call.grad_y, call.grads); }, bad.complaint);
    EXPECT_EQ(t.moe.saved_depth(), 1);
    t.expect_nothing_written();
    t.moe.backward(t.problem.grad_y(), t.outputs.gradients());
    t.expect_right_gradients();
  }
}

TYPED_TEST(MisuseOfCalls, BackwardFromCallersBuffers) {
  Trial<TypeParam> t;
  t.moe.forward_sft(t.problem.routing(), t.problem.x(), t.outputs.y(), t.saved.view());
  t.outputs.poison();
  const auto saved_values = t.saved_bits();
  std::vector<BadCall> wrong_x;
  for (const BadCall& bad : bad_forwards()) {
    if (bad.complaint.argument[0] == 'x') wrong_x.push_back(bad);
  }
  for (const std::vector<BadCall>& table :
       {bad_routings(), wrong_x, bad_backwards(), bad_saved_activations()}) {
    for (const BadCall& bad : table) {
      SCOPED_TRACE(bad.complaint.argument);
      const Call call = t.spoiled(bad);
      expect_refused<ArgumentError>([&] { t.backward(call); }, bad.complaint);
      t.expect_nothing_written();
      EXPECT_EQ(t.saved_bits(), saved_values);
      t.expect_still_usable();
    }
  }
}

TYPED_TEST(MisuseOfCalls, MoreRoutesThan32BitsCount) {
  Trial<TypeParam> t;
  Config config = t.problem.config();
  config.max_tokens.reset();
  Moe<TypeParam> moe = make_moe<TypeParam>(t.problem, config);
  Routing routing = t.problem.routing();
  routing.tokens = amx_sft_moe::index_t{1} << 30;
  t.outputs.poison();
  expect_refused<ArgumentError>([&] { moe.forward_sft(routing, t.problem.x(), t.outputs.y()); },
                                {"routing.tokens", "1073741823", "1073741824"});
  t.expect_nothing_written();
}

// Weights, factors, biases and activations are read while gradients are written.
TYPED_TEST(MisuseOfCalls, GradientOfAWeightWhereAnInputLies) {
  using Weight = typename TypeParam::Weight;
  Trial<TypeParam> t;
  const auto weight_at = [](const void* data, index_t experts, index_t rows, index_t cols) {
    return AnyExpertTensor(static_cast<bf16*>(const_cast<void*>(data)), experts, rows, cols);
  };
  const auto base = t.problem.template base<Weight>();
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
        Input{"lora.up.b", address(t.problem.lora().up.b[2])},
        Input{"routing.weights", address(t.problem.routing().weights)}, Input{"x", address(t.problem.x())},
        Input{"saved.gate", t.saved.view().gate.data}, Input{"saved.up", t.saved.view().up.data},
        Input{"saved.u_gate", t.saved.view().u_gate.data}, Input{"saved.u_up", t.saved.view().u_up.data},
        Input{"saved.u_down", t.saved.view().u_down.data}}) {
    SCOPED_TRACE(c.name);
    t.moe.forward_sft(t.problem.routing(), t.problem.x(), t.outputs.y(), t.saved.view());
    Call call = t.correct_call();
    call.grads.weights.gate = weight_at(c.data, 3, 33, 17);
    t.outputs.poison();
    expect_refused<ArgumentError>([&] { t.backward(call); },
                                  {"grads.weights.gate", "memory of its own", c.name});
    t.expect_nothing_written();
    call.grads = t.outputs.gradients();
    t.backward(call);  // of the same inputs
    t.expect_right_gradients();
    t.expect_still_usable();
  }
  // One pointer for each expert, gradients wherever else.
  const Problem apart = random_problem(kCase, kPeftLike, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(apart);
  Outputs out(apart);
  moe.forward_sft(apart.routing(), apart.x(), out.y());
  Gradients grads = out.gradients();
  grads.weights.down = {const_cast<Weight*>(apart.base<Weight>().down[2].data), 3, 17, 33};
  expect_refused<ArgumentError>([&] { moe.backward(apart.grad_y(), grads); },
                                {"grads.weights.down", "memory of its own", "weights.down"});
  moe.backward(apart.grad_y(), out.gradients());
  expect_same_bits(step_alone<TypeParam>(apart), out);
}

// A factor given in place of its gradient: other tasks of the same region still read it.
TYPED_TEST(MisuseOfCalls, GradientWhereAFactorLies) {
  Trial<TypeParam> t;
  const auto in_place = [](const amx_sft_moe::AnyConstExpertTensor& factor) {
    return factor[0].visit([&](const auto* data) {
      using T = std::remove_cvref_t<decltype(*data)>;
      return AnyExpertTensor(const_cast<T*>(data), factor.experts(), factor.rows(), factor.cols());
    });
  };
  const amx_sft_moe::LoraWeights lora = t.problem.lora();
  struct Given {
    const char* name;
    AnyExpertTensor LoraGradients::*grad;
    const amx_sft_moe::AnyConstExpertTensor& factor;
  };
  for (const Given& given :
       {Given{"gate.a", &LoraGradients::gate_a, lora.gate.a}, Given{"up.b", &LoraGradients::up_b, lora.up.b},
        Given{"down.a", &LoraGradients::down_a, lora.down.a}}) {
    SCOPED_TRACE(given.name);
    t.moe.forward_sft(t.problem.routing(), t.problem.x(), t.outputs.y());
    Gradients grads = t.outputs.gradients();
    grads.lora.*given.grad = in_place(given.factor);
    t.outputs.poison();
    expect_refused<ArgumentError>([&] { t.moe.backward(t.problem.grad_y(), grads); },
                                  {"grads.lora.", "memory of its own", std::string("lora.") + given.name});
    t.expect_nothing_written();
    t.moe.clear();
    t.expect_still_usable();
  }
}

TYPED_TEST(MisuseOfCalls, GradientOfAnAbsentAdapter) {
  Case c = kCase;
  c.ranks.up = 0;
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  Gradients grads = out.gradients();
  grads.lora.up_b = AnyExpertTensor(somewhere(), 3, 33, 4);
  expect_refused<ArgumentError>([&] { moe.backward(problem.grad_y(), grads); }, {"up_b", "none", "a tensor"});
  EXPECT_TRUE(somewhere_is_untouched());
  moe.backward(problem.grad_y(), out.gradients());
  expect_same_bits(step_alone<TypeParam>(problem), out);
}

TYPED_TEST(MisuseOfCalls, GradientOfAnAbsentBias) {
  const Case c{"no_biases", 9, 2, 3, 17, 33, {4, 5, 6}};
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  Gradients grads = out.gradients();
  grads.biases.up = floats(3, 33, 33);
  expect_refused<ArgumentError>([&] { moe.backward(problem.grad_y(), grads); },
                                {"grads.biases.up", "none (no such bias)", "a tensor"});
  EXPECT_TRUE(somewhere_is_untouched());
  moe.backward(problem.grad_y(), out.gradients());
  expect_same_bits(step_alone<TypeParam>(problem), out);
}

TYPED_TEST(MisuseOfCalls, SecondGradientOfASharedA) {
  const Case c{"shared", 9, 2, 3, 17, 33, {4, 4, 4}, kDistinct, true};
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  Outputs out(problem);
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  Gradients grads = out.gradients();
  grads.lora.up_a = AnyExpertTensor(somewhere(), 3, 4, 17);
  expect_refused<ArgumentError>([&] { moe.backward(problem.grad_y(), grads); }, {"up_a", "gate_a", "a tensor"});
  EXPECT_TRUE(somewhere_is_untouched());
  moe.backward(problem.grad_y(), out.gradients());
  expect_same_bits(step_alone<TypeParam>(problem), out);
}

TYPED_TEST(MisuseOfCalls, StackErrorsNameTheirValues) {
  using amx_sft_moe::StateError;
  Trial<TypeParam> t;
  expect_refused<StateError>([&] { t.moe.backward(t.problem.grad_y(), t.outputs.gradients()); },
                             {"backward", "saved", "empty"});
  t.moe.forward_sft(t.problem.routing(), t.problem.x(), t.outputs.y());
  expect_refused<StateError>([&] { t.moe.forward_sft(t.problem.routing(), t.problem.x(), t.outputs.y()); },
                             {"save_for_backward", "cache_depth = 1", "1"});
}

// Exactly max_tokens is allowed, and null pointers are where there is nothing to point to.
TYPED_TEST(MisuseOfCalls, LimitsThemselvesAreLegal) {
  Trial<TypeParam> t;
  const Problem full = another_batch(t.problem, kCase, 12, 3);
  Outputs of_full(full);
  run_step(t.moe, full, of_full);
  expect_same_bits(step_alone<TypeParam>(full), of_full);

  Routing routing;
  routing.weights = null_matrix(0, 2);
  const Problem none = another_batch(t.problem, kCase, 0, 3);
  Outputs of_none(none);
  t.moe.forward_sft(routing, null_matrix(0, 17), {static_cast<float*>(nullptr), 0, 17, 17});
  t.moe.backward(null_matrix(0, 17), of_none.gradients());
  expect_same_bits(step_alone<TypeParam>(none), of_none);
}

}  // namespace
}  // namespace sft_test
