// Non-owning views of tensors. A view never implies alignment beyond that of its element, and bytes outside of
// shape and strides are never read or written. Strides count elements.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "amx_sft_moe/core/element.hpp"
#include "amx_sft_moe/core/errors.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// [rows, cols], the columns of a row adjacent.
template <class T>
struct MatrixView {
  T* data = nullptr;
  index_t rows = 0;
  index_t cols = 0;
  index_t row_stride = 0;

  T* row(index_t r) const { return data + r * row_stride; }
};

// One [rows, cols] matrix per expert: either a base pointer and an expert stride (stacked or fused tensors) or
// one pointer per expert (tensors from several mapped shards). The array of pointers is not copied: keep it
// alive, and as it is. Null pointers are looked for when it is set, not in each pass.
template <class T>
struct ExpertMatrices {
  T* base = nullptr;
  T* const* pointers = nullptr;  // used instead of base where not null; num_experts entries
  index_t expert_stride = 0;
  index_t rows = 0;
  index_t cols = 0;
  index_t row_stride = 0;

  static ExpertMatrices stacked(T* data, index_t rows, index_t cols) {
    return {data, nullptr, rows * cols, rows, cols, cols};
  }
  static ExpertMatrices per_expert(T* const* pointers, index_t rows, index_t cols) {
    return {nullptr, pointers, 0, rows, cols, cols};
  }
  MatrixView<T> operator[](index_t expert) const {
    T* data = pointers != nullptr ? pointers[expert] : base + expert * expert_stride;
    return {data, rows, cols, row_stride};
  }
};

// A matrix of any supported element type and strides, typed at construction and visited with its type.
// `Const` views are inputs; the others are outputs.
template <bool Const>
class BasicAnyMatrix {
 public:
  template <class T>
  using Pointer = std::conditional_t<Const, const T, T>*;

  BasicAnyMatrix() = default;
  BasicAnyMatrix(Pointer<bf16> data, index_t rows, index_t cols, index_t row_stride, index_t col_stride = 1)
      : data_(data),
        dtype_(DType::kBf16),
        rows_(rows),
        cols_(cols),
        row_stride_(row_stride),
        col_stride_(col_stride) {}
  BasicAnyMatrix(Pointer<float> data, index_t rows, index_t cols, index_t row_stride, index_t col_stride = 1)
      : data_(data),
        dtype_(DType::kFp32),
        rows_(rows),
        cols_(cols),
        row_stride_(row_stride),
        col_stride_(col_stride) {}
  template <class T>
  BasicAnyMatrix(MatrixView<T> view)  // NOLINT(google-explicit-constructor): a view of the same thing
      : BasicAnyMatrix(view.data, view.rows, view.cols, view.row_stride) {}

  bool empty() const { return data_ == nullptr; }
  DType dtype() const { return dtype_; }
  index_t rows() const { return rows_; }
  index_t cols() const { return cols_; }
  index_t row_stride() const { return row_stride_; }
  index_t col_stride() const { return col_stride_; }
  // The same elements, rows and columns exchanged.
  BasicAnyMatrix transposed() const {
    BasicAnyMatrix other = *this;
    std::swap(other.rows_, other.cols_);
    std::swap(other.row_stride_, other.col_stride_);
    return other;
  }

  // Calls f(typed pointer). The pointer is to element [0, 0].
  template <class F>
  decltype(auto) visit(F&& f) const {
    if (dtype_ == DType::kBf16) return std::forward<F>(f)(static_cast<Pointer<bf16>>(data_));
    return std::forward<F>(f)(static_cast<Pointer<float>>(data_));
  }

 private:
  Pointer<void> data_ = nullptr;
  DType dtype_ = DType::kFp32;
  index_t rows_ = 0, cols_ = 0, row_stride_ = 0, col_stride_ = 1;
};
using AnyMatrix = BasicAnyMatrix<false>;
using AnyConstMatrix = BasicAnyMatrix<true>;

// [experts, rows, cols] with any strides: LoRA factors and their gradients.
template <bool Const>
class BasicAnyExpertTensor {
 public:
  template <class T>
  using Pointer = std::conditional_t<Const, const T, T>*;

  BasicAnyExpertTensor() = default;
  // Contiguous [experts, rows, cols].
  template <class T>
  BasicAnyExpertTensor(T* data, index_t experts, index_t rows, index_t cols)
      : BasicAnyExpertTensor(data, experts, rows, cols, rows * cols, cols, 1) {}
  template <class T>
  BasicAnyExpertTensor(T* data, index_t experts, index_t rows, index_t cols, index_t expert_stride,
                       index_t row_stride, index_t col_stride)
      : data_(data),
        dtype_(kDTypeOf<T>),
        experts_(experts),
        rows_(rows),
        cols_(cols),
        expert_stride_(expert_stride),
        row_stride_(row_stride),
        col_stride_(col_stride) {
    static_assert(std::is_same_v<std::remove_const_t<T>, bf16> ||
                  std::is_same_v<std::remove_const_t<T>, float>);
  }

  bool empty() const { return data_ == nullptr; }
  DType dtype() const { return dtype_; }
  index_t experts() const { return experts_; }
  index_t rows() const { return rows_; }
  index_t cols() const { return cols_; }
  index_t expert_stride() const { return expert_stride_; }
  index_t row_stride() const { return row_stride_; }
  index_t col_stride() const { return col_stride_; }
  bool same_as(const BasicAnyExpertTensor& o) const {
    return data_ == o.data_ && dtype_ == o.dtype_ && experts_ == o.experts_ && rows_ == o.rows_ &&
           cols_ == o.cols_ && expert_stride_ == o.expert_stride_ && row_stride_ == o.row_stride_ &&
           col_stride_ == o.col_stride_;
  }

  BasicAnyMatrix<Const> operator[](index_t expert) const {
    if (dtype_ == DType::kBf16) return matrix(static_cast<Pointer<bf16>>(data_) + expert * expert_stride_);
    return matrix(static_cast<Pointer<float>>(data_) + expert * expert_stride_);
  }

 private:
  template <class P>
  BasicAnyMatrix<Const> matrix(P data) const {
    return {data, rows_, cols_, row_stride_, col_stride_};
  }

  Pointer<void> data_ = nullptr;
  DType dtype_ = DType::kFp32;
  index_t experts_ = 0, rows_ = 0, cols_ = 0;
  index_t expert_stride_ = 0, row_stride_ = 0, col_stride_ = 1;
};
using AnyExpertTensor = BasicAnyExpertTensor<false>;
using AnyConstExpertTensor = BasicAnyExpertTensor<true>;

// expert_ids [T, top_k], int64 or int32.
class ExpertIds {
 public:
  ExpertIds() = default;
  ExpertIds(const std::int64_t* data, index_t row_stride) : wide_(data), row_stride_(row_stride) {}
  ExpertIds(const std::int32_t* data, index_t row_stride) : narrow_(data), row_stride_(row_stride) {}
  bool empty() const { return wide_ == nullptr && narrow_ == nullptr; }
  index_t row_stride() const { return row_stride_; }
  index_t element_size() const { return wide_ != nullptr ? 8 : 4; }
  std::int64_t at(index_t token, index_t slot) const {
    const index_t i = token * row_stride_ + slot;
    return wide_ != nullptr ? wide_[i] : narrow_[i];
  }

 private:
  const std::int64_t* wide_ = nullptr;
  const std::int32_t* narrow_ = nullptr;
  index_t row_stride_ = 0;
};

AMX_SFT_MOE_NAMESPACE_END
