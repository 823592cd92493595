// Base weights as callers hold them: stacked tensors or one tensor per expert, gate and up apart or fused; and their
// gradients, stacked tensors.
#pragma once

#include <array>
#include <string_view>
#include <tuple>
#include <vector>

#include "tensor.hpp"

namespace amx_sft_moe::python {

// Order of the weights everywhere. kGateUpProj [E, 2I, H], gate rows first, stands for the first two.
enum BaseWeight : std::size_t { kGateProj, kUpProj, kDownProj, kGateUpProj, kBaseWeightCount };

std::string_view name_of_weight(std::size_t weight);

// The operator's views and all that has to stay alive and in place for them. Not copied: the views point into
// it.
struct BaseTensors {
  AnyBaseWeights views;
  DType dtype = DType::kBf16;
  bool fused = false;  // kGateUpProj instead of kGateProj and kUpProj
  std::vector<py::object> owners;
  // Of weights given as one tensor per expert, in their type.
  template <class T>
  using PointerLists = std::vector<std::vector<const T*>>;
  std::tuple<PointerLists<bf16>, PointerLists<float>> pointers;

  BaseTensors() = default;
  BaseTensors(const BaseTensors&) = delete;
  BaseTensors& operator=(const BaseTensors&) = delete;
  BaseTensors(BaseTensors&&) = default;
  BaseTensors& operator=(BaseTensors&&) = default;
};

// gate_proj, up_proj [E, I, H] or gate_up_proj [E, 2I, H] (gate rows first), and down_proj [E, H, I]; each a
// stacked tensor or a sequence of E matrices; None for the form that is not used. All bfloat16 or all float32.
BaseTensors read_base(const Config& config, py::handle gate_proj, py::handle up_proj, py::handle down_proj,
                      py::handle gate_up_proj);

// Whether `base` has this weight, and not another form of it.
inline bool has_weight(const BaseTensors& base, std::size_t weight) {
  return weight == kDownProj || (weight == kGateUpProj) == base.fused;
}
// [E, rows, cols] of a weight.
std::array<index_t, 3> shape_of_weight(std::size_t weight, const Config& config);
// Makes `tensor`, which must have the weight's shape, the place of the gradient of `weight`.
void bind_weight_gradient(WeightGradients& gradients, std::size_t weight, const Tensor& tensor,
                          const Config& config);

}  // namespace amx_sft_moe::python
