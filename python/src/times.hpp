// Records of steps as Python dicts: phases and groups in milliseconds under their published names, FLOP and bytes,
// and what each thread did.
#pragma once

#include <pybind11/pybind11.h>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace amx_sft_moe::python {

// Empty for null or for a record of nothing. `kind` says which half of the list of phases belongs to it.
pybind11::dict step_times(const StepRecord* record, StepKind kind);

// Sums over passes of one kind.
pybind11::dict total_times(const StepTotals& totals, StepKind kind);

// Name of each phase to the name of its group.
pybind11::dict phase_groups();

}  // namespace amx_sft_moe::python
