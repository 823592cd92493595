// The record of a step as a Python dict: phases and groups in milliseconds under their published names, and
// what each thread did.
#pragma once

#include <pybind11/pybind11.h>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace amx_sft_moe::python {

// Empty for null or for a record of nothing. `backward` says which half of the list of phases belongs to it.
pybind11::dict step_times(const StepRecord* record, bool backward);

}  // namespace amx_sft_moe::python
