// What this binary and this machine offer, as a Python dict.
#pragma once

#include <pybind11/pybind11.h>

namespace amx_sft_moe::python {

pybind11::dict info();

}  // namespace amx_sft_moe::python
