// What this binary and this machine offer, as a Python dict.
#pragma once

#include <pybind11/pybind11.h>

namespace amx_sft_moe::python {

// The CPUs that OpenMP found before it bound this thread to some of them (OMP_PROC_BIND, OMP_PLACES); 1 without OpenMP.
int available_cpus();

// With the kernels of `provider` (see kernels_of) behind the module's own, where it is not None.
pybind11::dict info(pybind11::handle provider);

}  // namespace amx_sft_moe::python
