// Base weights as callers hold them: stacked tensors or one tensor per expert, gate and up apart or fused.
#pragma once

#include <vector>

#include "tensor.hpp"

namespace amx_sft_moe::python {

// The operator's views and all that has to stay alive and in place for them. Not copied: the views point into
// it.
struct BaseTensors {
  AnyBaseWeights views;
  DType dtype = DType::kBf16;
  std::vector<py::object> owners;
  std::vector<std::vector<const void*>> pointers;  // of weights given as one tensor per expert

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

}  // namespace amx_sft_moe::python
