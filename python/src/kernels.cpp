#include "kernels.hpp"

#include <utility>

namespace amx_sft_moe {

// Each in a unit of its own, kernel_*.cpp: a kernel takes as long to compile as everything else here.
extern template class registry::TypedSftMoe<kernels::AmxBf16>;
extern template class registry::TypedSftMoe<kernels::Avx512Bf16>;
extern template class registry::TypedSftMoe<kernels::Avx512<bf16>>;
extern template class registry::TypedSftMoe<kernels::Avx512<float>>;
extern template class registry::TypedSftMoe<kernels::Avx2<bf16>>;
extern template class registry::TypedSftMoe<kernels::Avx2<float>>;
extern template class registry::TypedSftMoe<kernels::Portable<bf16>>;
extern template class registry::TypedSftMoe<kernels::Portable<float>>;

}  // namespace amx_sft_moe

namespace amx_sft_moe::python {

namespace py = pybind11;

const KernelProvider& kernels_of(py::handle provider) {
  static const ProviderOf<DefaultKernels> own;
  if (provider.is_none()) return own;
  if (!py::isinstance<py::capsule>(provider))
    throw py::type_error("provider: expected a module's provider or None");
  const auto capsule = py::reinterpret_borrow<py::capsule>(provider);
  const std::string wanted = KernelProvider::binary_interface();
  if (capsule.name() == nullptr || wanted != capsule.name()) {
    throw KernelError(concat("provider: expected a module of the same build (", wanted, "), got one of ",
                             capsule.name() == nullptr ? "no name" : capsule.name()));
  }
  return *static_cast<const KernelProvider*>(capsule.get_pointer());
}

KernelChoice::KernelChoice(std::string kernel, py::object provider)
    : requested_(std::move(kernel)),
      provider_(std::move(provider)),
      kernels_(kernels_of(provider_)),
      bf16_(resolved(DType::kBf16)),
      fp32_(resolved(DType::kFp32)) {
  if (bf16_.name.empty() && fp32_.name.empty()) throw KernelError(bf16_.refusal);
}

const std::string& KernelChoice::name_for(DType weights) const {
  const Resolved& kernel = weights == DType::kBf16 ? bf16_ : fp32_;
  if (kernel.name.empty()) throw KernelError(kernel.refusal);
  return kernel.name;
}

KernelChoice::Resolved KernelChoice::resolved(DType weights) const {
  try {
    return {kernels_.resolve(requested_, weights), {}};
  } catch (const KernelError& error) {
    return {{}, error.what()};
  }
}

}  // namespace amx_sft_moe::python
