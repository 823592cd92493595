#include "tensor.hpp"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "dlpack_abi.hpp"

namespace amx_sft_moe::python {
namespace {

// Stands in for the address of a tensor without elements, which is often null and must not look like "not
// given".
alignas(64) char empty_tensor_storage[64];

ElementType element_of(dlpack::DataType type) {
  if (type.lanes != 1) return ElementType::kOther;
  if (type.code == dlpack::kBfloat && type.bits == 16) return ElementType::kBf16;
  if (type.code == dlpack::kFloat && type.bits == 32) return ElementType::kFp32;
  if (type.code == dlpack::kInt && type.bits == 64) return ElementType::kInt64;
  if (type.code == dlpack::kInt && type.bits == 32) return ElementType::kInt32;
  return ElementType::kOther;
}

std::string name_of_dlpack(dlpack::DataType type) {
  static constexpr std::array<std::string_view, 7> kNames{"int",    "uint",    "float", "handle",
                                                          "bfloat", "complex", "bool"};
  const std::string_view base = type.code < kNames.size() ? kNames[type.code] : "dlpack type ";
  std::string name = concat(base, static_cast<int>(type.bits));
  if (type.lanes != 1) name += concat("x", type.lanes);
  return name;
}

void set_dims(Tensor& tensor, std::string_view argument, std::int64_t dims) {
  if (dims > kMaxDims)
    throw ArgumentError(concat(argument, ": expected at most ", kMaxDims, " dimensions, got ", dims));
  tensor.dims = static_cast<int>(dims);
}

void fill_from_dlpack(Tensor& tensor, const dlpack::Tensor& from, std::string_view argument) {
  if (from.device.type != dlpack::kCpu && from.device.type != dlpack::kCudaHost &&
      from.device.type != dlpack::kRocmHost) {
    throw ArgumentError(concat(argument, ": expected a tensor in CPU memory, got DLPack device type ",
                               from.device.type, " (index ", from.device.id, ")"));
  }
  set_dims(tensor, argument, from.ndim);
  tensor.element = element_of(from.dtype);
  if (tensor.element == ElementType::kOther) tensor.other_element = name_of_dlpack(from.dtype);
  tensor.data = from.data == nullptr ? nullptr : static_cast<char*>(from.data) + from.byte_offset;
  index_t contiguous = 1;
  for (int d = tensor.dims - 1; d >= 0; --d) {
    const auto i = static_cast<std::size_t>(d);
    tensor.shape[i] = from.shape[d];
    tensor.strides[i] = from.strides != nullptr ? from.strides[d] : contiguous;
    contiguous *= from.shape[d];
  }
}

// ---- torch
// -------------------------------------------------------------------------------------------------------

const dlpack::ExchangeApi* exchange_api_of(py::handle type) {
  PyObject* capsule = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto holder = py::reinterpret_steal<py::object>(capsule);
  if (PyCapsule_CheckExact(capsule) == 0) return nullptr;
  const auto* api = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->version.major > dlpack::kMajorVersion) api = api->previous;
  if (api == nullptr || api->version.major != dlpack::kMajorVersion) return nullptr;
  return api->tensor_from_py_object_no_sync != nullptr ? api : nullptr;
}

// torch as far as it is imported. Kept for the life of the process, as torch itself is.
struct TorchTypes {
  PyObject* tensor = nullptr;     // torch.Tensor
  PyObject* parameter = nullptr;  // torch.nn.Parameter
  PyObject* is_neg = nullptr;     // the name of a method
  const dlpack::ExchangeApi* api = nullptr;
};

const TorchTypes* torch_types() {
  static TorchTypes types;  // written under the GIL, once
  if (types.tensor == nullptr) {
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");  // borrowed
    if (module == nullptr || PyObject_HasAttrString(module, "nn") == 0) return nullptr;
    const auto torch = py::reinterpret_borrow<py::object>(module);
    const py::object tensor = torch.attr("Tensor");
    types.api = exchange_api_of(tensor);
    types.parameter = py::object(torch.attr("nn").attr("Parameter")).release().ptr();
    types.is_neg = PyUnicode_InternFromString("is_neg");
    types.tensor = py::object(tensor).release().ptr();
  }
  return &types;
}

ElementType torch_element(const std::string& name) {
  if (name == "torch.bfloat16") return ElementType::kBf16;
  if (name == "torch.float32") return ElementType::kFp32;
  if (name == "torch.int64") return ElementType::kInt64;
  if (name == "torch.int32") return ElementType::kInt32;
  return ElementType::kOther;
}

// Subclasses of torch.Tensor, and torch before it had the table of C functions.
void fill_from_torch_attributes(Tensor& tensor, py::handle object, std::string_view argument) {
  const auto device = py::cast<std::string>(object.attr("device").attr("type"));
  if (device != "cpu") {
    throw ArgumentError(concat(argument, ": expected a tensor on device cpu, got ", device));
  }
  const auto layout = py::cast<std::string>(py::str(object.attr("layout")));
  if (layout != "torch.strided") {
    throw ArgumentError(concat(argument, ": expected layout torch.strided, got ", layout));
  }
  if (py::cast<bool>(object.attr("is_nested"))) {  // may be strided too, and has no shape
    throw ArgumentError(concat(argument, ": expected one tensor, got a nested one"));
  }
  const auto name = py::cast<std::string>(py::str(object.attr("dtype")));
  tensor.element = torch_element(name);
  if (tensor.element == ElementType::kOther) tensor.other_element = name;
  const auto shape = py::cast<py::tuple>(object.attr("shape"));
  const auto strides = py::cast<py::tuple>(object.attr("stride")());
  set_dims(tensor, argument, static_cast<std::int64_t>(shape.size()));
  for (std::size_t d = 0; d < shape.size(); ++d) {
    tensor.shape[d] = py::cast<index_t>(shape[d]);
    tensor.strides[d] = py::cast<index_t>(strides[d]);
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): torch gives the address as a number
  tensor.data = reinterpret_cast<void*>(py::cast<std::uintptr_t>(object.attr("data_ptr")()));
}

// Memory of such a view holds the negated values.
void require_no_negative_bit(py::handle object, std::string_view argument) {
  PyObject* const name = torch_types()->is_neg;
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name));
  if (!answer) throw py::error_already_set();
  if (answer.ptr() == Py_True) {
    throw ArgumentError(
        concat(argument, ": expected a tensor without the negative bit, got one (resolve_neg() it)"));
  }
}

void fill_from_torch(Tensor& tensor, py::handle object, std::string_view argument, const TorchTypes& torch) {
  tensor.family = Family::kTorch;
  require_no_negative_bit(object, argument);
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  if (torch.api != nullptr && (type == torch.tensor || type == torch.parameter)) {
    dlpack::Tensor found{};
    if (torch.api->tensor_from_py_object_no_sync(object.ptr(), &found) == 0) {
      fill_from_dlpack(tensor, found, argument);
      return;
    }
    PyErr_Clear();  // sparse, meta and the like: the attributes say better what is wrong
  }
  fill_from_torch_attributes(tensor, object, argument);
}

// ---- numpy and other DLPack producers
// ----------------------------------------------------------------------------

ElementType numpy_element(const py::dtype& dtype) {
  const char kind = dtype.kind();
  const auto size = dtype.itemsize();
  if (dtype.byteorder() == '>') return ElementType::kOther;
  if (kind == 'f' && size == 4) return ElementType::kFp32;
  if (kind == 'i' && size == 8) return ElementType::kInt64;
  if (kind == 'i' && size == 4) return ElementType::kInt32;
  // ml_dtypes registers its bfloat16 with numpy; a raw two-byte void is something else.
  if (size == 2 && py::cast<std::string>(dtype.attr("name")) == "bfloat16") return ElementType::kBf16;
  return ElementType::kOther;
}

void fill_from_numpy(Tensor& tensor, const py::array& array, std::string_view argument) {
  const py::dtype dtype = array.dtype();
  tensor.element = numpy_element(dtype);
  if (tensor.element == ElementType::kOther) tensor.other_element = py::cast<std::string>(py::str(dtype));
  tensor.read_only = !array.writeable();
  set_dims(tensor, argument, array.ndim());
  const index_t size = std::max<index_t>(dtype.itemsize(), 1);
  for (int d = 0; d < tensor.dims; ++d) {
    const auto i = static_cast<std::size_t>(d);
    tensor.shape[i] = array.shape(d);
    const index_t bytes = array.strides(d);
    if (bytes % size != 0) {
      throw ArgumentError(
          concat(argument, ": expected strides that are multiples of ", size, " bytes, got ", bytes));
    }
    tensor.strides[i] = bytes / size;
  }
  tensor.data = const_cast<void*>(array.data());
}

void delete_managed(PyObject* capsule) {
  if (auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, "amx_sft_moe_dltensor"))) {
    if (managed->deleter != nullptr) managed->deleter(managed);
  }
}

void delete_managed_versioned(PyObject* capsule) {
  auto* managed =
      static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule, "amx_sft_moe_dltensor_versioned"));
  if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
}

// The protocol of __dlpack__: whoever takes the tensor renames the capsule and calls its deleter in the end.
void fill_from_dlpack_capsule(Tensor& tensor, py::handle object, std::string_view argument) {
  py::object capsule;
  try {
    capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    capsule = object.attr("__dlpack__")();  // from before versions were spoken of
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    auto* managed =
        static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != dlpack::kMajorVersion) {
      throw ArgumentError(concat(argument, ": expected DLPack version 1, got ", managed->version.major));
    }
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    tensor.owner = py::reinterpret_steal<py::object>(
        PyCapsule_New(managed, "amx_sft_moe_dltensor_versioned", delete_managed_versioned));
    tensor.read_only = (managed->flags & dlpack::kFlagReadOnly) != 0;
    fill_from_dlpack(tensor, managed->tensor, argument);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    tensor.owner =
        py::reinterpret_steal<py::object>(PyCapsule_New(managed, "amx_sft_moe_dltensor", delete_managed));
    fill_from_dlpack(tensor, managed->tensor, argument);
  } else {
    throw TypeMismatch(concat(argument, ": expected a DLPack capsule from __dlpack__, got another object"));
  }
}

// Typed access to any other address is undefined, whatever the CPU does with it.
void require_aligned(const Tensor& tensor, std::string_view argument) {
  if (tensor.element == ElementType::kOther || tensor.elements() == 0) return;
  const bool is_bf16 = tensor.element == ElementType::kBf16;
  const std::uintptr_t size = is_bf16 ? 2 : tensor.element == ElementType::kInt64 ? 8 : 4;
  const std::uintptr_t beyond = reinterpret_cast<std::uintptr_t>(tensor.data) % size;
  if (beyond != 0) {
    throw ArgumentError(concat(argument, ": expected an address aligned to ", size, " bytes, got one that is ",
                               beyond, " modulo ", size));
  }
}

}  // namespace

index_t Tensor::elements() const {
  index_t count = 1;
  for (int d = 0; d < dims; ++d) count *= shape[static_cast<std::size_t>(d)];
  return count;
}

Tensor read_tensor(py::handle object, std::string_view argument) {
  Tensor tensor;
  tensor.owner = py::reinterpret_borrow<py::object>(object);
  const TorchTypes* torch = torch_types();
  const int is_torch = torch == nullptr ? 0 : PyObject_IsInstance(object.ptr(), torch->tensor);
  if (is_torch < 0) throw py::error_already_set();
  if (is_torch > 0) {
    fill_from_torch(tensor, object, argument, *torch);
  } else if (py::isinstance<py::array>(object)) {
    fill_from_numpy(tensor, py::reinterpret_borrow<py::array>(object), argument);
  } else if (py::hasattr(object, "__dlpack__")) {
    fill_from_dlpack_capsule(tensor, object, argument);
  } else if (py::hasattr(object, "__array_interface__")) {
    tensor.owner = py::module_::import("numpy").attr("asarray")(object);
    fill_from_numpy(tensor, py::reinterpret_borrow<py::array>(tensor.owner), argument);
  } else {
    throw TypeMismatch(
        concat(argument, ": expected a tensor (torch, numpy, ml_dtypes or DLPack), got ", type_name(object)));
  }
  if (tensor.elements() == 0 && tensor.data == nullptr) tensor.data = empty_tensor_storage;
  if (tensor.data == nullptr) {
    throw ArgumentError(concat(argument, ": expected a tensor with memory of its own, got a null pointer from ",
                               type_name(object)));
  }
  require_aligned(tensor, argument);
  return tensor;
}

std::string type_name(py::handle object) {
  if (object.is_none()) return "None";
  return py::cast<std::string>(py::type::handle_of(object).attr("__name__"));
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int d = 0; d < tensor.dims; ++d) {
    text += concat(d > 0 ? ", " : "", tensor.shape[static_cast<std::size_t>(d)]);
  }
  return text + "]";
}

std::string element_name(const Tensor& tensor) {
  switch (tensor.element) {
    case ElementType::kBf16:
      return "bfloat16";
    case ElementType::kFp32:
      return "float32";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kInt32:
      return "int32";
    default:
      return tensor.other_element;
  }
}

void require_shape(const Tensor& tensor, std::string_view argument, std::initializer_list<index_t> expected) {
  bool fits = static_cast<std::size_t>(tensor.dims) == expected.size();
  std::string wanted = "[";
  std::size_t d = 0;
  for (const index_t extent : expected) {
    fits = fits && (extent == kAnyExtent || extent == tensor.shape[d]);
    wanted += d > 0 ? ", " : "";
    wanted += extent == kAnyExtent ? "*" : std::to_string(extent);
    ++d;
  }
  if (!fits) throw ArgumentError(concat(argument, ": expected shape ", wanted, "], got ", shape_text(tensor)));
}

void require_float(const Tensor& tensor, std::string_view argument) {
  if (tensor.element != ElementType::kBf16 && tensor.element != ElementType::kFp32) {
    throw TypeMismatch(concat(argument, ": expected dtype bfloat16 or float32, got ", element_name(tensor)));
  }
}

void require_element(const Tensor& tensor, std::string_view argument, DType expected) {
  require_float(tensor, argument);
  if (tensor.dtype() != expected) {
    throw TypeMismatch(concat(argument, ": expected dtype ", expected == DType::kBf16 ? "bfloat16" : "float32",
                              ", got ", element_name(tensor)));
  }
}

}  // namespace amx_sft_moe::python
