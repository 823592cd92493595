#include "info.hpp"

#include <string>

#include "amx_sft_moe/amx_sft_moe.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace amx_sft_moe::python {

namespace py = pybind11;

namespace {

std::string dtype_name(DType dtype) {
  return dtype == DType::kBf16 ? "bfloat16" : "float32";
}

py::list kernels() {
  py::list result;
  for (const KernelInfo& kernel : list_kernels()) {
    py::dict one;
    one["name"] = std::string(kernel.name);
    one["weights"] = dtype_name(kernel.weights);
    one["available"] = kernel.available;
    one["why_not"] = kernel.why_not;
    result.append(one);
  }
  return result;
}

// The kernel that "auto" means for these weights, or why there is none (the environment may ask for one in
// vain).
py::object chosen(DType weights) {
  try {
    return py::str(resolve_kernel("auto", weights));
  } catch (const KernelError& error) {
    return py::str(concat("none: ", error.what()));
  }
}

py::dict instruction_sets() {
  const CpuFeatures cpu = arch::cpu_features();
  const std::string refusal = arch::amx_refusal();
  py::dict result;
  result["avx2"] = cpu.avx2;
  result["avx512"] = cpu.avx512;
  result["avx512_bf16"] = cpu.avx512_bf16;
  result["amx_tile"] = cpu.amx_tile;
  result["amx_bf16"] = cpu.amx_bf16;
  result["amx_int8"] = cpu.amx_int8;
  result["amx_emulated"] = cpu.amx_emulated;
  result["amx"] = !refusal.empty() ? "no: " + refusal : cpu.amx_emulated ? "amx (emulated)" : "amx";
  return result;
}

int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

}  // namespace

py::dict info() {
  py::dict result;
  result["version"] = AMX_SFT_MOE_VERSION_STRING;
  result["instruction_sets"] = instruction_sets();
  result["kernels"] = kernels();
  py::dict defaults;
  defaults["bfloat16"] = chosen(DType::kBf16);
  defaults["float32"] = chosen(DType::kFp32);
  result["auto_kernel"] = defaults;
  result["num_threads"] = max_threads();
  result["nvtx"] = nvtx::kCompiledIn;
#if defined(__clang__)
  result["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
  result["compiler"] = "gcc " __VERSION__;
#endif
  return result;
}

}  // namespace amx_sft_moe::python
