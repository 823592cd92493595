// What profiles need of the machine: its measured limits, and NVTX ranges around what they time.
#pragma once

#include <pybind11/pybind11.h>

namespace amx_sft_moe::python {

// `measure_machine(threads, bandwidth_bytes)` and `NvtxRange(name)`, a context manager.
void bind_machine(pybind11::module_& m);

}  // namespace amx_sft_moe::python
