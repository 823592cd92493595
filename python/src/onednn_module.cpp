// The extension module `amx_sft_moe._onednn`: kernel `onednn`, apart from `_core` so that only those who ask
// for it load oneDNN. It has no functions: `_core` makes operators of what stands in `provider`.
#include <pybind11/pybind11.h>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "amx_sft_moe/kernels/onednn.hpp"

namespace py = pybind11;
using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

PYBIND11_MODULE(_onednn, m) {
  static const ProviderOf<kernels::OneDnnKernels> provider;
  static const std::string name = KernelProvider::binary_interface();
  m.doc() = "Kernel onednn of amx_sft_moe.";
  m.attr("provider") = py::capsule(static_cast<const KernelProvider*>(&provider), name.c_str());
  const dnnl_version_t* version = dnnl_version();
  m.attr("onednn_version") = concat(version->major, ".", version->minor, ".", version->patch);
}
