// Views on tensors that were read, and what a view asks of strides.
#include <vector>

#include "amx_sft_moe/core/overlap.hpp"
#include "tensor.hpp"

namespace amx_sft_moe::python {
namespace {

[[noreturn]] void refuse_strides(const Tensor& tensor, std::string_view argument, std::string_view expected) {
  std::string got;
  for (int d = 0; d < tensor.dims; ++d) {
    got += concat(d > 0 ? ", " : "", tensor.strides[static_cast<std::size_t>(d)]);
  }
  throw ArgumentError(
      concat(argument, ": expected ", expected, ", got strides (", got, ") for shape ", shape_text(tensor)));
}

void require_adjacent_columns(const Tensor& tensor, std::string_view argument) {
  if (tensor.shape[1] > 1 && tensor.strides[1] != 1 && tensor.elements() > 0) {
    refuse_strides(tensor, argument, "adjacent elements in the last dimension (stride 1)");
  }
}

void require_writable(const Tensor& tensor, std::string_view argument) {
  if (tensor.read_only)
    throw ArgumentError(concat(argument, ": expected a writable tensor, got a read-only one"));
}

// Of two or three dimensions.
void require_apart(const Tensor& tensor, std::string_view argument) {
  const auto dim = [&](std::size_t d) {
    return d < static_cast<std::size_t>(tensor.dims) ? Extent{tensor.shape[d], tensor.strides[d]}
                                                     : Extent{1, 0};
  };
  const std::array<Extent, 3> dims{dim(0), dim(1), dim(2)};
  if (!addressable(dims)) refuse_strides(tensor, argument, "elements within an address space");
  if (elements_overlap(dims)) {
    refuse_strides(tensor, argument, "elements that do not overlap");
  }
}

// The elements of a matrix row by row; `element` gives the one at an offset.
template <class T, class F>
void gather(const Tensor& matrix, std::vector<T>& into, F&& element) {
  into.clear();
  for (index_t row = 0; row < matrix.shape[0]; ++row) {
    for (index_t col = 0; col < matrix.shape[1]; ++col) {
      into.push_back(element(row * matrix.strides[0] + col * matrix.strides[1]));
    }
  }
}

template <class View>
View typed_view(const Tensor& tensor, index_t offset, auto... extents) {
  if (tensor.element == ElementType::kBf16) return View(static_cast<bf16*>(tensor.data) + offset, extents...);
  return View(static_cast<float*>(tensor.data) + offset, extents...);
}

}  // namespace

AnyConstMatrix input_matrix(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols) {
  require_float(tensor, argument);
  require_shape(tensor, argument, {rows, cols});
  require_adjacent_columns(tensor, argument);
  return typed_view<AnyConstMatrix>(tensor, 0, tensor.shape[0], tensor.shape[1],
                                    tensor.shape[0] > 1 ? tensor.strides[0] : tensor.shape[1]);
}

AnyMatrix output_matrix(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols) {
  require_float(tensor, argument);
  require_shape(tensor, argument, {rows, cols});
  require_writable(tensor, argument);
  require_adjacent_columns(tensor, argument);
  const index_t row_stride = tensor.shape[0] > 1 ? tensor.strides[0] : tensor.shape[1];
  if (row_stride < tensor.shape[1] && tensor.elements() > 0)
    refuse_strides(tensor, argument, "rows that do not overlap");
  return typed_view<AnyMatrix>(tensor, 0, tensor.shape[0], tensor.shape[1], row_stride);
}

AnyConstMatrix input_columns(const Tensor& tensor, index_t col_begin, index_t cols) {
  return typed_view<AnyConstMatrix>(tensor, col_begin * tensor.strides[1], tensor.shape[0], cols,
                                    tensor.strides[0], tensor.strides[1]);
}

AnyMatrix output_columns(const Tensor& tensor, std::string_view argument, index_t col_begin, index_t cols) {
  require_writable(tensor, argument);
  require_apart(tensor, argument);
  return typed_view<AnyMatrix>(tensor, col_begin * tensor.strides[1], tensor.shape[0], cols, tensor.strides[0],
                               tensor.strides[1]);
}

ExpertIds input_ids(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols,
                    std::vector<std::int64_t>& storage) {
  if (tensor.element != ElementType::kInt64 && tensor.element != ElementType::kInt32) {
    throw TypeMismatch(concat(argument, ": expected dtype int64 or int32, got ", element_name(tensor)));
  }
  require_shape(tensor, argument, {rows, cols});
  const auto* wide = static_cast<const std::int64_t*>(tensor.data);
  const auto* narrow = static_cast<const std::int32_t*>(tensor.data);
  const index_t row_stride = tensor.shape[0] > 1 ? tensor.strides[0] : tensor.shape[1];
  if (row_stride < 0 || (tensor.shape[1] > 1 && tensor.strides[1] != 1)) {
    const bool is_wide = tensor.element == ElementType::kInt64;
    gather(tensor, storage, [&](index_t i) -> std::int64_t { return is_wide ? wide[i] : narrow[i]; });
    return ExpertIds(storage.data(), tensor.shape[1]);
  }
  if (tensor.element == ElementType::kInt64) return ExpertIds(wide, row_stride);
  return ExpertIds(narrow, row_stride);
}

AnyConstMatrix input_weights(const Tensor& tensor, std::string_view argument, index_t rows, index_t cols,
                             std::vector<float>& storage) {
  require_float(tensor, argument);
  require_shape(tensor, argument, {rows, cols});
  const AnyConstMatrix view = input_columns(tensor, 0, cols);
  if (view.row_stride() >= 0) return view;
  view.visit(
      [&](const auto* data) { gather(tensor, storage, [data](index_t i) { return to_float(data[i]); }); });
  return {storage.data(), rows, cols, cols};
}

AnyConstExpertTensor input_experts(const Tensor& tensor, index_t row_begin, index_t rows) {
  return typed_view<AnyConstExpertTensor>(tensor, row_begin * tensor.strides[1], tensor.shape[0], rows,
                                          tensor.shape[2], tensor.strides[0], tensor.strides[1],
                                          tensor.strides[2]);
}

AnyExpertTensor output_experts(const Tensor& tensor, std::string_view argument, index_t row_begin,
                               index_t rows) {
  require_writable(tensor, argument);
  require_apart(tensor, argument);
  return typed_view<AnyExpertTensor>(tensor, row_begin * tensor.strides[1], tensor.shape[0], rows,
                                     tensor.shape[2], tensor.strides[0], tensor.strides[1], tensor.strides[2]);
}

}  // namespace amx_sft_moe::python
