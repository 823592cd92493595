#include "allocate.hpp"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "dlpack_abi.hpp"
#include "kept_memory.hpp"

namespace amx_sft_moe::python {
namespace {

struct TorchNames {
  py::object empty, from_dlpack, bf16, fp32, cpu, increment_version;
};

const TorchNames& torch_names() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<TorchNames> storage;
  return storage
      .call_once_and_store_result([] {
        const auto torch = py::module_::import("torch");
        return TorchNames{
            torch.attr("empty"),         py::module_::import("torch.utils.dlpack").attr("from_dlpack"),
            torch.attr("bfloat16"),      torch.attr("float32"),
            torch.attr("device")("cpu"), torch.attr("autograd").attr("graph").attr("increment_version")};
      })
      .get_stored();
}

py::dtype numpy_dtype(DType dtype, std::string_view argument) {
  if (dtype == DType::kFp32) return py::dtype::of<float>();
  try {
    return py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16"));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    throw TypeMismatch(concat(argument,
                              ": a bfloat16 result for a caller without torch needs the package ml_dtypes, ",
                              "which is not installed; install it or pass out="));
  }
}

using Shape = std::initializer_list<index_t>;

index_t bytes_of(DType dtype, Shape shape) {
  return std::accumulate(shape.begin(), shape.end(), size_of(dtype), std::multiplies<>());
}

py::object of_framework(Family family, DType dtype, Shape shape, std::string_view argument) {
  if (family == Family::kNumpy) {
    return py::array(numpy_dtype(dtype, argument), std::vector<py::ssize_t>(shape.begin(), shape.end()));
  }
  const TorchNames& torch = torch_names();
  py::tuple sizes(shape.size());
  std::size_t d = 0;
  for (const index_t extent : shape) sizes[d++] = py::int_(extent);
  // The device is named: torch.set_default_device() may say another one.
  return torch.empty(sizes, py::arg("dtype") = dtype == DType::kBf16 ? torch.bf16 : torch.fp32,
                     py::arg("device") = torch.cpu);
}

// What DLPack hands to torch, with the block that it is about.
struct KeptTensor {
  dlpack::Managed managed;
  std::array<std::int64_t, kMaxDims> shape{};
  std::unique_ptr<KeptMemory::Block> block;

  KeptTensor(std::unique_ptr<KeptMemory::Block> memory, DType dtype, Shape extents) : block(std::move(memory)) {
    std::ranges::copy(extents, shape.begin());
    const bool is_bf16 = dtype == DType::kBf16;
    managed.tensor = {
        .data = block->data(),
        .device = {dlpack::kCpu, 0},
        .ndim = static_cast<std::int32_t>(extents.size()),
        .dtype = {is_bf16 ? dlpack::kBfloat : dlpack::kFloat, static_cast<std::uint8_t>(8 * size_of(dtype)), 1},
        .shape = shape.data(),
        .strides = nullptr,
        .byte_offset = 0};
    managed.manager_context = this;
    managed.deleter = [](dlpack::Managed* done) { delete static_cast<KeptTensor*>(done->manager_context); };
  }
};

py::object torch_kept(std::unique_ptr<KeptMemory::Block> block, DType dtype, Shape shape) {
  auto made = std::make_unique<KeptTensor>(std::move(block), dtype, shape);
  // A capsule that torch took is called otherwise.
  const auto destroy = [](PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
    auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
  };
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(&made->managed, "dltensor", destroy));
  if (!capsule) throw py::error_already_set();
  (void)made.release();
  return torch_names().from_dlpack(capsule);
}

py::object numpy_kept(std::unique_ptr<KeptMemory::Block> block, const py::dtype& dtype, Shape shape) {
  char* const data = block->data();
  const py::capsule owner(block.get(), [](void* held) { delete static_cast<KeptMemory::Block*>(held); });
  (void)block.release();
  return py::array(dtype, std::vector<py::ssize_t>(shape.begin(), shape.end()), data, owner);
}

}  // namespace

Tensor allocate(Family family, DType dtype, Shape shape, std::string_view argument, ResultMemory memory) {
  const index_t bytes = bytes_of(dtype, shape);
  if (memory == ResultMemory::kOfFramework || bytes < KeptMemory::kLeastBytes) {
    Tensor made = read_tensor(of_framework(family, dtype, shape, argument), argument);
    ask_for_huge_pages(made.data, static_cast<std::size_t>(bytes));
    return made;
  }
  if (family == Family::kTorch) {
    return read_tensor(torch_kept(kept_memory()->take(bytes), dtype, shape), argument);
  }
  const py::dtype of_numpy = numpy_dtype(dtype, argument);
  return read_tensor(numpy_kept(kept_memory()->take(bytes), of_numpy, shape), argument);
}

void mark_written(const Tensor& tensor) {
  if (tensor.family == Family::kTorch) torch_names().increment_version(tensor.owner);
}

}  // namespace amx_sft_moe::python
