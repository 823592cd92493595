// What this binary and this machine offer, as a Python dict.
#pragma once

#include <pybind11/pybind11.h>

namespace amx_sft_moe::python {

// With the kernels of `provider` (see kernels_of) behind the module's own, where it is not None.
pybind11::dict info(pybind11::handle provider);

}  // namespace amx_sft_moe::python
