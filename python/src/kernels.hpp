// Which kernels an operator is made of: those of this module, or those of a module that was loaded for them.
#pragma once

#include <pybind11/pybind11.h>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace amx_sft_moe::python {

// `provider` is None, or the capsule of a module such as _onednn, which must outlive what is made of it.
const KernelProvider& kernels_of(pybind11::handle provider);

}  // namespace amx_sft_moe::python
