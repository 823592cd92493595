// Which kernels an operator is made of: those of this module, or those of a module that was loaded for them.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace amx_sft_moe::python {

// `provider` is None, or the capsule of a module such as _onednn, which must outlive what is made of it.
const KernelProvider& kernels_of(pybind11::handle provider);

// What a kernel's name comes to for each type of weights. The environment is asked when this is made, and not again.
class KernelChoice {
 public:
  // Throws KernelError for an unknown kernel, or one that runs nowhere here. `provider`: see kernels_of().
  KernelChoice(std::string kernel, pybind11::object provider);

  const std::string& requested() const { return requested_; }
  // Throws KernelError where there is none for these weights.
  const std::string& name_for(DType weights) const;
  const KernelProvider& kernels() const { return kernels_; }

 private:
  // The kernel, or why there is none.
  struct Resolved {
    std::string name;
    std::string refusal;
  };
  Resolved resolved(DType weights) const;

  std::string requested_;
  pybind11::object provider_;
  const KernelProvider& kernels_;
  Resolved bf16_, fp32_;
};

}  // namespace amx_sft_moe::python
