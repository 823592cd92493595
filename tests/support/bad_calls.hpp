// Calls with one wrong argument each, for test_misuse_calls.cpp, and the memory that wrong arguments point to.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "moe.hpp"
#include "problem.hpp"
#include "refusal.hpp"

namespace sft_test {

using amx_sft_moe::AnyConstMatrix;
using amx_sft_moe::AnyExpertTensor;
using amx_sft_moe::AnyMatrix;
using amx_sft_moe::Gradients;
using amx_sft_moe::LoraGradients;
using amx_sft_moe::Routing;

// Every argument of a forward and its backward. The activations' type is the kernel's: the tables do without.
struct Call {
  Routing routing;
  AnyConstMatrix x;
  AnyMatrix y;
  AnyConstMatrix grad_y;
  Gradients grads;
  amx_sft_moe::SavedActivations<std::byte> saved;
};

template <class To, class From>
amx_sft_moe::SavedActivations<To> cast_saved(const amx_sft_moe::SavedActivations<From>& saved) {
  const auto cast = [](const amx_sft_moe::MatrixView<From>& m) {
    return amx_sft_moe::MatrixView<To>{reinterpret_cast<To*>(m.data), m.rows, m.cols, m.row_stride};
  };
  return {cast(saved.gate), cast(saved.up), cast(saved.u_gate), cast(saved.u_up), cast(saved.u_down)};
}

struct BadCall {
  Complaint complaint;
  std::function<void(Call&)> spoil;
};

// Where wrong arguments point to: any memory will do, a refused call must not touch it. A pattern shows whether
// one did.
inline constexpr float kUntouched = -123.25F;
inline std::vector<float>& somewhere_storage() {
  static std::vector<float> storage(4096, kUntouched);
  return storage;
}
inline float* somewhere() {
  return somewhere_storage().data();
}
// Since the last time: one failure shall not bring others.
inline bool somewhere_is_untouched() {
  const bool untouched = std::ranges::count(somewhere_storage(), kUntouched) == std::ssize(somewhere_storage());
  std::ranges::fill(somewhere_storage(), kUntouched);
  return untouched;
}
inline AnyMatrix floats(index_t rows, index_t cols, index_t row_stride, index_t col_stride = 1) {
  return {somewhere(), rows, cols, row_stride, col_stride};
}
inline AnyConstMatrix const_floats(index_t rows, index_t cols, index_t row_stride, index_t col_stride = 1) {
  return {somewhere(), rows, cols, row_stride, col_stride};
}
// A gradient [3, rows, cols] of a factor with strides of expert, row and column.
inline std::function<void(Call&)> overlapping(AnyExpertTensor LoraGradients::*which, index_t rows, index_t cols,
                                              std::array<index_t, 3> strides) {
  return
      [=](Call& c) { c.grads.lora.*which = {somewhere(), 3, rows, cols, strides[0], strides[1], strides[2]}; };
}
// A stride that no tensor in memory has, and how it is told.
inline constexpr index_t kNowhere = index_t{1} << 62;
inline constexpr const char* kNowhereText = "4611686018427387904";
inline AnyConstMatrix null_matrix(index_t rows, index_t cols) {
  return {static_cast<const float*>(nullptr), rows, cols, cols};
}

inline std::vector<BadCall> bad_routings() {
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
      {{"weights", "address space", kNowhereText},
       [](Call& c) { c.routing.weights = const_floats(9, 2, 2, kNowhere); }},
      {{"expert_ids", "address space", kNowhereText},
       [](Call& c) {
         static const std::int64_t ids[64] = {};
         c.routing.expert_ids = {ids, kNowhere};
       }},
  };
}

inline std::vector<BadCall> bad_forwards() {
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
      {{"x", "address space", kNowhereText}, [](Call& c) { c.x = const_floats(9, 17, kNowhere); }},
      {{"y", "address space", kNowhereText}, [](Call& c) { c.y = floats(9, 17, kNowhere); }},
      {{"y", "memory of its own", "routing.weights"},
       [](Call& c) {
         c.y = floats(9, 17, 17);
         c.routing.weights = const_floats(9, 2, 2);
       }},
  };
}

inline std::vector<BadCall> bad_backwards() {
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
      {{"gate_b", "address space", kNowhereText},
       [](Call& c) { c.grads.lora.gate_b = {somewhere(), 3, 33, 4, kNowhere, 4, 1}; }},
      {{"weights.up", "address space", "-" + std::string(kNowhereText)},
       [](Call& c) { c.grads.weights.up = {somewhere(), 3, 33, 17, 561, -kNowhere, 1}; }},
      {{"biases.gate", "address space", kNowhereText},
       [](Call& c) { c.grads.biases.gate = floats(3, 33, kNowhere); }},
      {{"scale", "finite", "nan"}, [](Call& c) { c.grads.scale = std::numeric_limits<float>::quiet_NaN(); }},
  };
}

inline std::vector<BadCall> bad_saved_activations() {
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
      {{"saved.gate", "address space", kNowhereText}, [](Call& c) { c.saved.gate.row_stride = kNowhere; }},
  };
}

// Of a forward, which writes them.
inline std::vector<BadCall> shared_saved_activations() {
  const auto here = [] { return reinterpret_cast<std::byte*>(somewhere()); };
  return {
      {{"saved.up", "memory of its own", "saved.gate"}, [](Call& c) { c.saved.up = c.saved.gate; }},
      {{"saved.u_up", "memory of its own", "saved.u_gate"},
       [=](Call& c) { c.saved.u_gate.data = c.saved.u_up.data = here(); }},
      {{"saved.u_down", "memory of its own", "x"},
       [=](Call& c) {
         c.saved.u_down.data = here();
         c.x = const_floats(9, 17, 17);
       }},
      {{"saved.gate", "memory of its own", "y"},
       [=](Call& c) {
         c.saved.gate.data = here();
         c.y = floats(9, 17, 17);
       }},
      {{"saved.u_gate", "memory of its own", "routing.weights"},
       [=](Call& c) {
         c.saved.u_gate.data = here();
         c.routing.weights = const_floats(9, 2, 2);
       }},
  };
}

}  // namespace sft_test
