// Tensors of Python callers as the library's views: torch, numpy (with ml_dtypes' bfloat16) and anything that
// speaks DLPack. Nothing is copied here, and everything that does not fit raises, naming the argument and both
// values: TypeError for what is not such a tensor or has another element type, ArgumentError for shape, strides
// and device.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace amx_sft_moe::python {

namespace py = pybind11;

enum class ElementType : std::uint8_t { kBf16, kFp32, kInt64, kInt32, kOther };

// Whose kind of tensor results are made of: torch's for torch callers, numpy's for everybody else.
enum class Family : std::uint8_t { kNumpy, kTorch };

inline constexpr int kMaxDims = 4;

// What was read from one Python object. Valid while `owner` lives and is not resized.
struct Tensor {
  void* data = nullptr;  // never null, also where there are no elements
  ElementType element = ElementType::kOther;
  Family family = Family::kNumpy;
  bool read_only = false;
  int dims = 0;
  std::array<index_t, kMaxDims> shape{};
  std::array<index_t, kMaxDims> strides{};  // of elements
  std::string other_element;                // the name of the element type where it is kOther
  py::object owner;

  index_t elements() const;
  DType dtype() const { return element == ElementType::kBf16 ? DType::kBf16 : DType::kFp32; }
};

// A wrong element type, or no tensor at all: becomes Python's TypeError.
class TypeMismatch : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// An expected extent that may have any value.
inline constexpr index_t kAnyExtent = -1;

Tensor read_tensor(py::handle object, std::string_view argument);

std::string shape_text(const Tensor& tensor);
std::string element_name(const Tensor& tensor);
std::string type_name(py::handle object);

void require_shape(const Tensor& tensor, std::string_view argument, std::initializer_list<index_t> expected);
void require_float(const Tensor& tensor, std::string_view argument);
void require_element(const Tensor& tensor, std::string_view argument, DType expected);

// [rows, cols] bf16 or fp32. Rows may be strided, columns of a row are adjacent.
AnyConstMatrix input_matrix(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols);
// The same, writable: rows must not overlap.
AnyMatrix output_matrix(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols);

// [rows, cols] bf16 or fp32 of any strides. `col_begin` skips columns of each row, for fused tensors of which
// one view takes a half.
AnyConstMatrix input_columns(const Tensor& tensor, index_t col_begin, index_t cols);
AnyMatrix output_columns(const Tensor& tensor, std::string_view argument, index_t col_begin, index_t cols);

// [rows, cols] int64 or int32 of any strides. Those that the library does not take are gathered into `storage`.
ExpertIds input_ids(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols,
                    std::vector<std::int64_t>& storage);
// The same, bf16 or fp32.
AnyConstMatrix input_weights(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols,
                             std::vector<float>& storage);

// [experts, rows, cols] bf16 or fp32 of any strides. `row_begin` skips rows of each expert, for fused tensors
// of which one view takes a half.
AnyConstExpertTensor input_experts(const Tensor& tensor, index_t row_begin, index_t rows);
AnyExpertTensor output_experts(const Tensor& tensor, std::string_view argument, index_t row_begin,
                               index_t rows);

}  // namespace amx_sft_moe::python
