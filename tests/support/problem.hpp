// A layer and a batch in guarded memory, in the element types and layouts that a caller may choose, with the
// views that the library takes; and the outputs of one step. The reference holds the same values, already
// rounded to those types.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "cases.hpp"
#include "reference.hpp"
#include "tensor.hpp"

namespace sft_test {

enum class WeightLayout {
  kStacked,    // gate, up [E, I, H] and down [E, H, I], each one tensor
  kFused,      // gate_up [E, 2I, H], gate rows first; its bias [E, 2I] interleaved, as gpt-oss has it
  kPerExpert,  // every matrix its own allocation, rows padded
};

enum class LoraLayout {
  kContiguous,
  kPeft,  // B stored [out, r * E] and viewed as [E, out, r] with strides (1, r * E, E); A stored [r * E, in]
};

// How a caller stores things. The element type of the base weights is the kernel's.
struct Storage {
  const char* name;
  DType activations = DType::kBf16;  // x, y, grad_y, grad_x
  DType factors = DType::kBf16;      // LoRA factors and their gradients; gradients of base weights
  DType routing = DType::kFp32;      // routing weights and their gradient
  bool narrow_ids = false;           // int32 instead of int64
  WeightLayout weights = WeightLayout::kStacked;
  LoraLayout lora = LoraLayout::kContiguous;
  index_t padding = 0;  // unused elements after each row of x, y, grad_y, grad_x, routing weights and ids
  Edge edge = Edge::kEnd;
};

// Together they take each option at least once, in unlike company.
inline constexpr Storage kPlain{"plain"};
inline constexpr Storage kWide{.name = "fp32_fused_strided",
                               .activations = DType::kFp32,
                               .factors = DType::kFp32,
                               .routing = DType::kBf16,
                               .narrow_ids = true,
                               .weights = WeightLayout::kFused,
                               .padding = 3,
                               .edge = Edge::kStart};
inline constexpr Storage kPeftLike{.name = "peft_per_expert",
                                   .factors = DType::kFp32,
                                   .weights = WeightLayout::kPerExpert,
                                   .lora = LoraLayout::kPeft};
inline constexpr Storage kMixed{.name = "fp32_activations_bf16_peft",
                                .activations = DType::kFp32,
                                .routing = DType::kBf16,
                                .narrow_ids = true,
                                .lora = LoraLayout::kPeft,
                                .padding = 1,
                                .edge = Edge::kStart};

// Base weights in one of the layouts.
class BaseStore {
 public:
  BaseStore() = default;
  BaseStore(DType dtype, WeightLayout layout, const reference::Layer& layer, Edge edge);

  template <class T>
  amx_sft_moe::BaseWeights<T> view() const {
    using amx_sft_moe::ExpertMatrices;
    if (layout_ == WeightLayout::kPerExpert) return {gather<T>(0), gather<T>(1), gather<T>(2)};
    const index_t block = intermediate_ * hidden_;
    const T* down = tensors_[layout_ == WeightLayout::kFused ? 1 : 2].template data<const T>();
    const T* gate = tensors_[0].template data<const T>();
    const ExpertMatrices<const T> d{down, nullptr, block, hidden_, intermediate_, intermediate_};
    if (layout_ == WeightLayout::kFused) {
      return {{gate, nullptr, 2 * block, intermediate_, hidden_, hidden_},
              {gate + block, nullptr, 2 * block, intermediate_, hidden_, hidden_},
              d};
    }
    const T* up = tensors_[1].template data<const T>();
    return {ExpertMatrices<const T>::stacked(gate, intermediate_, hidden_),
            ExpertMatrices<const T>::stacked(up, intermediate_, hidden_), d};
  }

  // As a read-only map of a model file is.
  void protect_read_only();

 private:
  void store_per_expert(DType dtype, const reference::Layer& layer, Edge edge);

  template <class T>
  amx_sft_moe::ExpertMatrices<const T> gather(std::size_t projection) const {
    const index_t rows = projection == 2 ? hidden_ : intermediate_;
    const index_t cols = projection == 2 ? intermediate_ : hidden_;
    amx_sft_moe::ExpertMatrices<const T> out =
        amx_sft_moe::ExpertMatrices<const T>::per_expert(pointers<T>(projection), rows, cols);
    out.row_stride = cols + kRowPadding;
    return out;
  }
  template <class T>
  const T* const* pointers(std::size_t projection) const;

  static constexpr index_t kRowPadding = 2;
  WeightLayout layout_ = WeightLayout::kStacked;
  index_t hidden_ = 0, intermediate_ = 0;
  std::vector<Tensor> tensors_;
  std::vector<const bf16*> bf16_pointers_[3];
  std::vector<const float*> float_pointers_[3];
};

class Problem {
 public:
  // Rounds the values to the types of the storage and stores them.
  Problem(const Storage& storage, DType weights, reference::Layer layer, reference::Batch batch);

  const Storage& storage() const { return storage_; }
  DType weight_dtype() const { return weight_dtype_; }
  const reference::Layer& layer() const { return layer_; }
  const reference::Batch& batch() const { return batch_; }

  amx_sft_moe::Config config() const;  // dimensions and activation; two threads
  template <class T>
  amx_sft_moe::BaseWeights<T> base() const {
    amx_sft_moe::BaseWeights<T> weights = base_.view<T>();
    weights.biases = biases();
    return weights;
  }
  amx_sft_moe::ExpertBiases biases() const;
  BaseStore& base_store() { return base_; }
  amx_sft_moe::LoraWeights lora() const;
  amx_sft_moe::Routing routing() const;
  amx_sft_moe::AnyConstMatrix x() const { return x_.const_matrix_view(); }
  amx_sft_moe::AnyConstMatrix grad_y() const { return grad_y_.const_matrix_view(); }
  Tensor& x_tensor() { return x_; }
  Tensor& grad_y_tensor() { return grad_y_; }
  Tensor& routing_weights() { return routing_weights_; }

  // Overwrites the stored ids by ones that point far outside.
  void poison_ids();

  // Overwrites the stored LoRA factors in place, as an optimiser does.
  void replace_factors(const reference::Adapter& gate, const reference::Adapter& up,
                       const reference::Adapter& down);

 private:
  void round_values();
  Tensor make_factor(const reference::Adapter& lora, bool is_b, index_t in, index_t out) const;
  void make_factors();
  void make_biases();
  void store_ids();

  Storage storage_;
  DType weight_dtype_;
  reference::Layer layer_;
  reference::Batch batch_;
  BaseStore base_;
  Tensor x_, grad_y_, routing_weights_;
  Tensor gate_a_, gate_b_, up_a_, up_b_, down_a_, down_b_;
  Tensor gate_bias_, up_bias_, down_bias_;  // fused weights: gate_bias_ [E, 2I] holds gate and up by turns
  GuardedMemory ids_;
};

// Everything a step writes, pre-filled with NaN.
class Outputs {
 public:
  explicit Outputs(const Problem& problem);

  amx_sft_moe::AnyMatrix y() const { return tensors_[reference::kY].matrix_view(); }
  amx_sft_moe::Gradients gradients() const;
  amx_sft_moe::LoraGradients lora_gradients() const;
  amx_sft_moe::WeightGradients weight_gradients() const;
  Tensor& operator[](reference::Tensor which) { return tensors_[which]; }
  const Tensor& operator[](reference::Tensor which) const { return tensors_[which]; }

  void poison();
  // All results' bit patterns, to compare two runs exactly.
  std::vector<std::vector<std::uint32_t>> bits() const;
  bool gaps_are_poison() const;

 private:
  std::array<Tensor, reference::kTensors> tensors_;
};

// Random values of the usual size: x about 1, weights about 1 / sqrt(inputs), and a LoRA part as large as the
// base part, so that losing either is seen. Scalings differ per projection; one routing weight is zero.
Problem random_problem(const Case& c, const Storage& storage, DType weights, unsigned seed = 1);

// The same layer with another batch of `tokens`.
Problem another_batch(const Problem& problem, const Case& c, int tokens, unsigned seed);

}  // namespace sft_test
