// Wrong arguments of forward_sft and backward: refused before anything is written, saved or popped, and the
// next correct call gives the right bits.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "compare.hpp"
#include "refusal.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::AnyConstMatrix;
using amx_sft_moe::AnyExpertTensor;
using amx_sft_moe::AnyMatrix;
using amx_sft_moe::ArgumentError;
using amx_sft_moe::Config;
using amx_sft_moe::Gradients;
using amx_sft_moe::LoraGradients;
using amx_sft_moe::Routing;

using Kernel = PortableBf16;  // the checks are the operator's, the same for every kernel
using Saved = amx_sft_moe::SavedActivations<Kernel::Stored>;

inline constexpr Case kCase = with_trained_base(with_biases({"misuse", 9, 2, 3, 17, 33, {4, 5, 6}}));

// Every argument of a forward and its backward.
struct Call {
  Routing routing;
  AnyConstMatrix x;
  AnyMatrix y;
  AnyConstMatrix grad_y;
  Gradients grads;
  Saved saved;
};

struct BadCall {
  Complaint complaint;
  std::function<void(Call&)> spoil;
};

// Any pointer will do: a refused call must not touch it.
float* somewhere() {
  static std::vector<float> storage(4096);
  return storage.data();
}
AnyMatrix floats(index_t rows, index_t cols, index_t row_stride, index_t col_stride = 1) {
  return {somewhere(), rows, cols, row_stride, col_stride};
}
AnyConstMatrix const_floats(index_t rows, index_t cols, index_t row_stride, index_t col_stride = 1) {
  return {somewhere(), rows, cols, row_stride, col_stride};
}
// A gradient [3, rows, cols] of a factor with strides of expert, row and column.
std::function<void(Call&)> overlapping(AnyExpertTensor LoraGradients::*which, index_t rows, index_t cols,
                                       std::array<index_t, 3> strides) {
  return
      [=](Call& c) { c.grads.lora.*which = {somewhere(), 3, rows, cols, strides[0], strides[1], strides[2]}; };
}
AnyConstMatrix null_matrix(index_t rows, index_t cols) {
  return {static_cast<const float*>(nullptr), rows, cols, cols};
}

std::vector<BadCall> bad_routings() {
  return {
      {{"tokens", "0", "-1"}, [](Call& c) { c.routing.tokens = -1; }},
      {{"tokens", "12", "13"}, [](Call& c) { c.routing.tokens = 13; }},  // max_tokens
      {{"weights.rows", "8", "9"}, [](Call& c) { c.routing.tokens = 8; }},
      {{"expert_ids", "non-null", "null"}, [](Call& c) { c.routing.expert_ids = {}; }},
      {{"expert_ids", "non-null", "null"},  // of a single token
       [](Call& c) {
         c.routing = {1, {}, const_floats(1, 2, 2)};
       }},
      {{"expert_ids.row_stride", "", "-2"},
       [](Call& c) {
         static const std::int64_t ids[64] = {};
         c.routing.expert_ids = {ids, -2};
       }},
      {{"weights", "non-null", "null"}, [](Call& c) { c.routing.weights = null_matrix(9, 2); }},
      {{"weights.rows", "9", "0"}, [](Call& c) { c.routing.weights = {}; }},
      {{"weights.rows", "9", "10"}, [](Call& c) { c.routing.weights = const_floats(10, 2, 2); }},
      {{"weights.cols", "2", "3"}, [](Call& c) { c.routing.weights = const_floats(9, 3, 3); }},
      {{"weights.row_stride", "", "-2"}, [](Call& c) { c.routing.weights = const_floats(9, 2, -2); }},
  };
}

std::vector<BadCall> bad_forwards() {
  return {
      {{"x", "non-null", "null"}, [](Call& c) { c.x = null_matrix(9, 17); }},
      {{"x.rows", "9", "0"}, [](Call& c) { c.x = {}; }},
      {{"x.rows", "9", "8"}, [](Call& c) { c.x = const_floats(8, 17, 17); }},
      {{"x.cols", "17", "16"}, [](Call& c) { c.x = const_floats(9, 16, 17); }},
      {{"x.row_stride", "", "-17"}, [](Call& c) { c.x = const_floats(9, 17, -17); }},
      {{"x.col_stride", "1", "2"}, [](Call& c) { c.x = const_floats(9, 17, 34, 2); }},
      {{"y", "non-null", "null"},
       [](Call& c) {
         c.y = {static_cast<float*>(nullptr), 9, 17, 17};
       }},
      {{"y.rows", "9", "10"}, [](Call& c) { c.y = floats(10, 17, 17); }},
      {{"y.cols", "17", "33"}, [](Call& c) { c.y = floats(9, 33, 33); }},
      {{"y.row_stride", "17", "16"}, [](Call& c) { c.y = floats(9, 17, 16); }},
      {{"y.col_stride", "1", "9"}, [](Call& c) { c.y = floats(9, 17, 17, 9); }},
  };
}

std::vector<BadCall> bad_backwards() {
  const auto factor = [](index_t experts, index_t rows, index_t cols) {
    return AnyExpertTensor(somewhere(), experts, rows, cols);
  };
  return {
      {{"grad_y", "non-null", "null"}, [](Call& c) { c.grad_y = null_matrix(9, 17); }},
      {{"grad_y.rows", "9", "0"}, [](Call& c) { c.grad_y = {}; }},
      {{"grad_y.rows", "9", "7"}, [](Call& c) { c.grad_y = const_floats(7, 17, 17); }},
      {{"grad_y.cols", "17", "18"}, [](Call& c) { c.grad_y = const_floats(9, 18, 18); }},
      {{"grad_y.row_stride", "", "-1"}, [](Call& c) { c.grad_y = const_floats(9, 17, -1); }},
      {{"grad_y.col_stride", "1", "0"}, [](Call& c) { c.grad_y = const_floats(9, 17, 17, 0); }},
      {{"grads.x.rows", "9", "10"}, [](Call& c) { c.grads.x = floats(10, 17, 17); }},
      {{"grads.x.cols", "17", "16"}, [](Call& c) { c.grads.x = floats(9, 16, 16); }},
      {{"grads.x.row_stride", "17", "1"}, [](Call& c) { c.grads.x = floats(9, 17, 1); }},
      {{"grads.x.col_stride", "1", "3"}, [](Call& c) { c.grads.x = floats(9, 17, 51, 3); }},
      {{"grads.routing_weights.rows", "9", "8"}, [](Call& c) { c.grads.routing_weights = floats(8, 2, 2); }},
      {{"grads.routing_weights.cols", "2", "1"}, [](Call& c) { c.grads.routing_weights = floats(9, 1, 2); }},
      {{"gate_a.experts", "3", "2"}, [=](Call& c) { c.grads.lora.gate_a = factor(2, 4, 17); }},
      {{"gate_a.rows", "4", "5"}, [=](Call& c) { c.grads.lora.gate_a = factor(3, 5, 17); }},
      {{"gate_b.cols", "4", "5"}, [=](Call& c) { c.grads.lora.gate_b = factor(3, 33, 5); }},
      {{"up_a.cols", "17", "33"}, [=](Call& c) { c.grads.lora.up_a = factor(3, 5, 33); }},
      {{"up_b.rows", "33", "17"}, [=](Call& c) { c.grads.lora.up_b = factor(3, 17, 5); }},
      {{"down_a.cols", "33", "17"}, [=](Call& c) { c.grads.lora.down_a = factor(3, 6, 17); }},
      {{"down_b.experts", "3", "1"}, [=](Call& c) { c.grads.lora.down_b = factor(1, 17, 6); }},
      {{"biases.gate.rows", "3", "9"}, [](Call& c) { c.grads.biases.gate = floats(9, 33, 33); }},
      {{"biases.up.cols", "33", "17"}, [](Call& c) { c.grads.biases.up = floats(3, 17, 17); }},
      {{"biases.down.cols", "17", "33"}, [](Call& c) { c.grads.biases.down = floats(3, 33, 33); }},
      {{"biases.down", "not overlap", "(0, 1)"}, [](Call& c) { c.grads.biases.down = floats(3, 17, 0); }},
      {{"biases.up", "not overlap", "(33, 0)"}, [](Call& c) { c.grads.biases.up = floats(3, 33, 33, 0); }},
      {{"biases.gate", "not overlap", "(32, 1)"}, [](Call& c) { c.grads.biases.gate = floats(3, 33, 32); }},
      {{"weights.gate.experts", "3", "2"}, [=](Call& c) { c.grads.weights.gate = factor(2, 33, 17); }},
      {{"weights.gate.rows", "33", "66"}, [=](Call& c) { c.grads.weights.gate = factor(3, 66, 17); }},
      {{"weights.up.cols", "17", "33"}, [=](Call& c) { c.grads.weights.up = factor(3, 33, 33); }},
      {{"weights.down.rows", "17", "33"}, [=](Call& c) { c.grads.weights.down = factor(3, 33, 17); }},
      {{"weights.down", "not overlap", "(0, 33, 1)"},
       [](Call& c) { c.grads.weights.down = {somewhere(), 3, 17, 33, 0, 33, 1}; }},
      {{"grads.weights.up", "memory of its own", "grads.weights.gate"},
       [](Call& c) { c.grads.weights.up = c.grads.weights.gate; }},
      {{"grads.weights.up", "memory of its own", "grads.lora.down_a"},
       [=](Call& c) {
         c.grads.weights.up = factor(3, 33, 17);
         c.grads.lora.down_a = {somewhere() + 1682, 3, 6, 33};
       }},
      {{"grads.weights.down", "memory of its own", "grads.biases.gate"},
       [=](Call& c) {
         c.grads.weights.down = factor(3, 17, 33);
         c.grads.biases.gate = floats(3, 33, 100);
       }},
      {{"grads.weights.down", "memory of its own", "grads.x"},
       [=](Call& c) {
         c.grads.weights.down = factor(3, 17, 33);
         c.grads.x = floats(9, 17, 17);
       }},
      {{"grads.weights.gate", "memory of its own", "grads.routing_weights"},
       [=](Call& c) {
         c.grads.weights.gate = factor(3, 33, 17);
         c.grads.routing_weights = floats(9, 2, 2);
       }},
      {{"grads.weights.gate", "memory of its own", "grad_y"},
       [=](Call& c) {
         c.grads.weights.gate = factor(3, 33, 17);
         c.grad_y = const_floats(9, 17, 17);
       }},
      {{"grads.lora.gate_b", "memory of its own", "grads.lora.up_a"},
       [](Call& c) {
         c.grads.lora.gate_b = {somewhere(), 3, 33, 4};
         c.grads.lora.up_a = {somewhere() + 395, 3, 5, 17};
       }},
      {{"grads.lora.down_b", "memory of its own", "grads.biases.down"},
       [](Call& c) {
         c.grads.lora.down_b = {somewhere(), 3, 17, 6};
         c.grads.biases.down = floats(3, 17, 17);
       }},
      {{"grads.lora.down_a", "memory of its own", "grads.x"},
       [](Call& c) {
         c.grads.lora.down_a = {somewhere(), 3, 6, 33};
         c.grads.x = floats(9, 17, 17);
       }},
      {{"grads.biases.up", "memory of its own", "grad_y"},
       [](Call& c) {
         c.grads.biases.up = floats(3, 33, 33);
         c.grad_y = const_floats(9, 17, 17);
       }},
      {{"grads.routing_weights", "not overlap", "(1, 1)"},
       [](Call& c) { c.grads.routing_weights = floats(9, 2, 1); }},
      {{"lora.gate_a", "not overlap", "(67, 17, 1)"}, overlapping(&LoraGradients::gate_a, 4, 17, {67, 17, 1})},
      {{"lora.gate_b", "not overlap", "(0, 4, 1)"}, overlapping(&LoraGradients::gate_b, 33, 4, {0, 4, 1})},
      {{"lora.up_a", "not overlap", "(85, 0, 1)"}, overlapping(&LoraGradients::up_a, 5, 17, {85, 0, 1})},
      {{"lora.up_b", "not overlap", "(165, 5, 0)"}, overlapping(&LoraGradients::up_b, 33, 5, {165, 5, 0})},
      {{"lora.down_a", "not overlap", "(1, 9, 3)"}, overlapping(&LoraGradients::down_a, 6, 33, {1, 9, 3})},
      {{"lora.down_b", "not overlap", "(102, 6, 6)"}, overlapping(&LoraGradients::down_b, 17, 6, {102, 6, 6})},
      {{"scale", "finite", "nan"}, [](Call& c) { c.grads.scale = std::numeric_limits<float>::quiet_NaN(); }},
  };
}

std::vector<BadCall> bad_saved_activations() {
  return {
      {{"saved.gate", "non-null", "null"}, [](Call& c) { c.saved.gate.data = nullptr; }},
      {{"saved.up", "non-null", "null"}, [](Call& c) { c.saved.up = {}; }},
      {{"saved.gate.rows", "18", "17"}, [](Call& c) { c.saved.gate.rows = 17; }},
      {{"saved.up.cols", "33", "34"}, [](Call& c) { c.saved.up.cols = c.saved.up.row_stride = 34; }},
      {{"saved.up.row_stride", "33", "32"}, [](Call& c) { c.saved.up.row_stride = 32; }},
      {{"saved.u_gate", "non-null", "null"}, [](Call& c) { c.saved.u_gate = {}; }},
      {{"saved.u_up.cols", "5", "4"}, [](Call& c) { c.saved.u_up.cols = 4; }},
      {{"saved.u_down.rows", "18", "9"}, [](Call& c) { c.saved.u_down.rows = 9; }},
      {{"saved.u_down.row_stride", "6", "0"}, [](Call& c) { c.saved.u_down.row_stride = 0; }},
  };
}

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
  void expect_nothing_written() const {
    const Outputs untouched(problem_);
    expect_same_bits(untouched, outputs_);
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
  for (const std::vector<BadCall>& table : {bad_routings(), bad_forwards(), bad_saved_activations()}) {
    for (const BadCall& bad : table) {
      SCOPED_TRACE(bad.complaint.argument);
      const Call call = spoiled(bad);
      expect_refused<ArgumentError>([&] { moe_.forward_sft(call.routing, call.x, call.y, call.saved); },
                                    bad.complaint);
      expect_nothing_written();
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
    EXPECT_EQ(want_[reference::kGradX].bits(), outputs_[reference::kGradX].bits());
    EXPECT_EQ(want_[reference::kGateA].bits(), outputs_[reference::kGateA].bits());
    outputs_.poison();
  }
}

TEST_F(MisuseOfCalls, BackwardFromCallersBuffers) {
  moe_.forward_sft(problem_.routing(), problem_.x(), outputs_.y(), saved_.view());
  outputs_.poison();
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
