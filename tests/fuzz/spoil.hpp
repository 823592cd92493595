// Spoils one argument of a call, so that the contract demands a refusal. Shapes rather than pointers mostly: a null
// view is legal where there are no tokens.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "problem.hpp"

namespace sft_fuzz {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using sft_test::Case;

// Where spoilt arguments point to. A refused call must not touch it.
class Unused {
 public:
  float* data() { return memory_.data(); }
  bool is_untouched() const {
    return std::ranges::all_of(memory_, [](float value) { return value == kValue; });
  }

 private:
  static constexpr float kValue = -123.25F;
  std::vector<float> memory_ = std::vector<float>(10240, kValue);  // the largest is a weight [6, 41, 40]
};

inline void spoil_forward(Bytes& in, const Case& c, Unused& unused, Routing& routing, AnyConstMatrix& x,
                          AnyMatrix& y) {
  const index_t tokens = routing.tokens;
  switch (in.in(0, 5)) {
    case 0:
      routing.tokens = -1 - in.in(0, 9);
      break;
    case 1:
      routing.tokens += 1 + in.in(0, 9);  // x, y and the weights have fewer
      break;
    case 2:
      x = AnyConstMatrix(static_cast<const float*>(nullptr), tokens + 1, c.hidden, c.hidden);
      break;
    case 3:
      y = AnyMatrix(unused.data(), tokens, c.hidden + 1, c.hidden + 1);
      break;
    case 4:
      x = AnyConstMatrix(unused.data(), tokens, c.hidden - 1, c.hidden);
      break;
    default:
      routing.weights = AnyConstMatrix(unused.data(), tokens, c.top_k + 1, c.top_k + 1);
  }
}

// A parameter in place of its gradient, as a trainer's slip gives it.
inline AnyExpertTensor as_gradient(const AnyConstExpertTensor& t) {
  const AnyConstMatrix first = t[0];
  return first.visit([&]<class T>(const T* data) -> AnyExpertTensor {
    return {const_cast<T*>(data), t.experts(),    t.rows(),      t.cols(),
            t.expert_stride(),    t.row_stride(), t.col_stride()};
  });
}

inline void spoil_lora_gradient(Bytes& in, const Case& c, Unused& unused, const LoraWeights& lora,
                                LoraGradients& grads) {
  const index_t experts = c.experts, hidden = c.hidden, inner = c.intermediate;
  const AnyExpertTensor wide(unused.data(), experts, 1, std::max(hidden, inner) + 1);  // has nobody's columns
  switch (in.in(0, 3)) {
    case 0:
      grads.gate_a = AnyExpertTensor(unused.data(), experts + 1, 1, hidden);
      break;
    case 1:
      grads.up_a = wide;
      break;
    case 2:
      grads.down_b = AnyExpertTensor(unused.data(), experts, hidden + 1, 1);
      break;
    default:
      grads.down_a = lora.down.rank() > 0 ? as_gradient(lora.down.a) : wide;
  }
}

inline void spoil_backward(Bytes& in, const Case& c, Unused& unused, const LoraWeights& lora,
                           AnyConstMatrix& grad_y, Gradients& grads) {
  const index_t experts = c.experts, hidden = c.hidden, inner = c.intermediate;
  const index_t tokens = grad_y.rows();
  switch (in.in(0, 9)) {
    case 0:
      grad_y = AnyConstMatrix(unused.data(), tokens + 1, hidden, hidden);
      break;
    case 1:
      grad_y = AnyConstMatrix(unused.data(), tokens, hidden + 1, hidden + 1);
      break;
    case 2:
      grads.x = AnyMatrix(unused.data(), tokens + 1, hidden, hidden);
      break;
    case 3:
      grads.routing_weights = AnyMatrix(unused.data(), tokens, c.top_k + 1, c.top_k + 1);
      break;
    case 4:
      grads.biases.down = AnyMatrix(unused.data(), experts, hidden + 1, hidden + 1);
      break;
    case 5:
      grads.weights.gate = AnyExpertTensor(unused.data(), experts, inner + 1, hidden);
      break;
    case 6:  // one memory for two gradients
      grads.weights.gate = grads.weights.up = AnyExpertTensor(unused.data(), experts, inner, hidden);
      break;
    case 7:
      grads.scale =
          in.flag() ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
      break;
    default:
      spoil_lora_gradient(in, c, unused, lora, grads.lora);
  }
}

// Of the caller's own buffers, for `rows` routes, at least one.
inline void spoil_saved(Bytes& in, const Case& c, Unused& unused, index_t rows, AnySavedActivations& saved) {
  const index_t inner = c.intermediate;
  const auto with_shape = [](const AnyMatrix& m, index_t new_rows, index_t cols) {
    return m.visit([&](auto* data) -> AnyMatrix { return {data, new_rows, cols, cols}; });
  };
  switch (in.in(0, 3)) {
    case 0:
      saved.gate = {};
      break;
    case 1:
      saved.up = with_shape(saved.up, rows, inner + 1);
      break;
    case 2:
      saved.gate = with_shape(saved.gate, rows - 1, inner);
      break;
    default:  // another type than the kernel's
      if (saved.up.dtype() == DType::kBf16) {
        saved.up = AnyMatrix(unused.data(), rows, inner, inner);
      } else {
        saved.up = AnyMatrix(reinterpret_cast<bf16*>(unused.data()), rows, inner, inner);
      }
  }
}

// Gate and up change places too: were a refused call to keep them, later results would be wrong.
template <class T>
AnyBaseWeights spoilt_base(Bytes& in, const Case& c, Unused& unused, BaseWeights<T> base) {
  static const T* const nobody[6] = {};
  const index_t experts = c.experts, hidden = c.hidden, inner = c.intermediate;
  std::swap(base.gate, base.up);
  switch (in.in(0, 6)) {
    case 0:
      ++base.gate.rows;
      break;
    case 1:
      --base.up.cols;
      break;
    case 2:
      base.down.row_stride = inner - 1;
      break;
    case 3:
      base.down.base = nullptr;
      base.down.pointers = nullptr;
      break;
    case 4:
      base.down.pointers = nobody;
      break;
    case 5:
      base.biases.down = AnyConstMatrix(unused.data(), experts, hidden + 1, hidden + 1);
      break;
    default:
      if (std::is_same_v<T, bf16>) return BaseWeights<float>{};
      return BaseWeights<bf16>{};
  }
  return base;
}

// The same with the adapters of gate and up.
inline LoraWeights spoilt_lora(Bytes& in, const Case& c, Unused& unused, LoraWeights lora) {
  const index_t experts = c.experts, hidden = c.hidden, inner = c.intermediate;
  const auto factor = [&](index_t rows, index_t cols) {
    return AnyConstExpertTensor(unused.data(), experts, rows, cols);
  };
  std::swap(lora.gate, lora.up);
  switch (in.in(0, 4)) {
    case 0:
      lora.down = {factor(1, inner), factor(hidden, 1), std::numeric_limits<float>::infinity()};
      break;
    case 1:
      lora.down = {factor(1, inner), factor(hidden, 2), 1.0F};
      break;
    case 2:
      lora.down = {factor(1, inner), {}, 1.0F};
      break;
    case 3:
      lora.down = {{}, factor(hidden, 1), 1.0F};
      break;
    default:
      lora.down = {AnyConstExpertTensor(unused.data(), experts + 1, 1, inner), factor(hidden, 1), 1.0F};
  }
  return lora;
}

}  // namespace sft_fuzz
