#include "info.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>

#include "kernels.hpp"
#include "text.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace amx_sft_moe::python {

namespace py = pybind11;

namespace {

std::string dtype_name(DType dtype) {
  return dtype == DType::kBf16 ? "bfloat16" : "float32";
}

void append_kernels(const KernelProvider& kernels, py::list& result) {
  for (const KernelInfo& kernel : kernels.list()) {
    py::dict one;
    one["name"] = std::string(kernel.name);
    one["weights"] = dtype_name(kernel.weights);
    one["available"] = kernel.available;
    one["why_not"] = kernel.why_not;
    result.append(one);
  }
}

bool has_kernel(const KernelProvider& kernels, std::string_view name) {
  const auto listed = kernels.list();
  return std::any_of(listed.begin(), listed.end(),
                     [name](const KernelInfo& info) { return info.name == name; });
}

// The kernel that "auto" means for these weights, or why there is none (the environment may ask for one in
// vain).
py::object chosen(const KernelProvider& kernels, DType weights) {
  try {
    return py::str(kernels.resolve("auto", weights));
  } catch (const KernelError& error) {
    return as_str(concat("none: ", error.what()));
  }
}

py::dict instruction_sets() {
  const CpuFeatures cpu = arch::cpu_features();
  const std::string refusal = arch::amx_refusal(cpu);
  py::dict result;
  result["avx2"] = cpu.avx2;
  result["avx512"] = cpu.avx512;
  result["avx512_bf16"] = cpu.avx512_bf16;
  result["amx_tile"] = cpu.amx_tile;
  result["amx_bf16"] = cpu.amx_bf16;
  result["amx_int8"] = cpu.amx_int8;
  result["amx_emulated"] = cpu.amx_emulated;
  result["slow_dpbf16"] = cpu.slow_dpbf16;
  result["amx"] = !refusal.empty() ? "no: " + refusal : cpu.amx_emulated ? "amx (emulated)" : "amx";
  return result;
}

// What the operating system said when it was asked for AMX tile data: "granted", "denied: why", or "not asked"
// where the CPU leaves nothing to ask for.
std::string amx_permission() {
  const CpuFeatures cpu = arch::cpu_features();
  if (cpu.amx_emulated) return "not asked: AMX is emulated";
  if (!cpu.amx_tile) return "not asked: no AMX on this CPU, or hidden by the operating system or a hypervisor";
  if (arch::request_amx_permission() == 0) return "granted";
  return "denied: " + arch::amx_denial(errno);
}

int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

}  // namespace

int available_cpus() {
#ifdef _OPENMP
  return omp_get_num_procs();
#else
  return 1;
#endif
}

py::dict info(py::handle provider) {
  const KernelProvider& own = kernels_of(py::none());
  const KernelProvider& loaded = kernels_of(provider);
  py::dict result;
  result["version"] = AMX_SFT_MOE_VERSION_STRING;
  result["instruction_sets"] = instruction_sets();
  result["amx_permission"] = amx_permission();
  py::list kernels;
  append_kernels(own, kernels);
  if (&loaded != &own) append_kernels(loaded, kernels);
  result["kernels"] = kernels;
  // The environment may name a kernel of the other module.
  const char* wanted = std::getenv("AMX_SFT_MOE_KERNEL");
  const bool is_loaded = wanted != nullptr && has_kernel(loaded, wanted);
  const KernelProvider& choosing = is_loaded ? loaded : own;
  py::dict defaults;
  defaults["bfloat16"] = chosen(choosing, DType::kBf16);
  defaults["float32"] = chosen(choosing, DType::kFp32);
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
