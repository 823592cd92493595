#include "allocate.hpp"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>

namespace amx_sft_moe::python {
namespace {

struct TorchNames {
  py::object empty, bf16, fp32, cpu, increment_version;
};

const TorchNames& torch_names() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<TorchNames> storage;
  return storage
      .call_once_and_store_result([] {
        const auto torch = py::module_::import("torch");
        return TorchNames{torch.attr("empty"), torch.attr("bfloat16"), torch.attr("float32"),
                          torch.attr("device")("cpu"),
                          torch.attr("autograd").attr("graph").attr("increment_version")};
      })
      .get_stored();
}

py::dtype numpy_bf16(std::string_view argument) {
  try {
    return py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16"));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    throw TypeMismatch(concat(argument,
                              ": a bfloat16 result for a caller without torch needs the package ml_dtypes, ",
                              "which is not installed; install it or pass out="));
  }
}

}  // namespace

Tensor allocate(Family family, DType dtype, std::initializer_list<index_t> shape, std::string_view argument) {
  py::object made;
  if (family == Family::kTorch) {
    const TorchNames& torch = torch_names();
    py::tuple sizes(shape.size());
    std::size_t d = 0;
    for (const index_t extent : shape) sizes[d++] = py::int_(extent);
    // The device is named: torch.set_default_device() may say another one.
    made = torch.empty(sizes, py::arg("dtype") = dtype == DType::kBf16 ? torch.bf16 : torch.fp32,
                       py::arg("device") = torch.cpu);
  } else {
    const std::vector<py::ssize_t> sizes(shape.begin(), shape.end());
    made = py::array(dtype == DType::kBf16 ? numpy_bf16(argument) : py::dtype::of<float>(), sizes);
  }
  Tensor tensor = read_tensor(made, argument);
  // Gradients of all factors are tens of megabytes, new in every step: one page fault for 2 MiB instead of 512.
  ask_for_huge_pages(tensor.data, static_cast<std::size_t>(tensor.elements() * size_of(dtype)));
  return tensor;
}

void mark_written(const Tensor& tensor) {
  if (tensor.family == Family::kTorch) torch_names().increment_version(tensor.owner);
}

}  // namespace amx_sft_moe::python
