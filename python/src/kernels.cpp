#include "kernels.hpp"

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

}  // namespace amx_sft_moe::python
