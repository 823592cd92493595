// Operands of a GEMM as they lie in memory: any supported element type, any strides, rows perhaps gathered.
#pragma once

#include <algorithm>
#include <span>
#include <utility>

#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/core/views.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

class AnyRows {
 public:
  AnyRows() = default;
  template <class T>
  AnyRows(const arch::RowSource<T>&
              source)  // NOLINT(google-explicit-constructor): the same, its type kept as a value
      : data_(source.data),
        dtype_(kDTypeOf<T>),
        row_stride_(source.row_stride),
        col_stride_(source.col_stride),
        row_index_(source.row_index) {}
  template <class T>
  AnyRows(const MatrixView<T>& view)  // NOLINT(google-explicit-constructor)
      : data_(view.data), dtype_(kDTypeOf<T>), row_stride_(view.row_stride) {}
  AnyRows(const AnyConstMatrix& m)  // NOLINT(google-explicit-constructor)
      : dtype_(m.dtype()), row_stride_(m.row_stride()), col_stride_(m.col_stride()) {
    m.visit([this](const auto* p) { data_ = p; });
  }

  // The rows index[0], index[1], ... of these.
  AnyRows gathered(const std::int32_t* index) const {
    AnyRows rows = *this;
    rows.row_index_ = index;
    return rows;
  }
  AnyRows from(index_t row, index_t col) const {
    AnyRows rows = *this;
    index_t offset = col * col_stride_;
    if (row_index_ != nullptr) {
      rows.row_index_ = row_index_ + row;
    } else {
      offset += row * row_stride_;
    }
    rows.data_ = static_cast<const char*>(data_) + offset * size_of(dtype_);
    return rows;
  }

  // Where rows can serve as A without being staged first: a pointer to them, else null.
  template <class E>
  const E* direct() const {
    const bool fits = dtype_ == kDTypeOf<E> && col_stride_ == 1 && row_index_ == nullptr;
    return fits ? static_cast<const E*>(data_) : nullptr;
  }
  DType dtype() const { return dtype_; }
  index_t row_stride() const { return row_stride_; }
  index_t col_stride() const { return col_stride_; }

  // Calls f(arch::RowSource<T>) with the element type T.
  template <class F>
  decltype(auto) visit(F&& f) const {
    if (dtype_ == DType::kBf16) return std::forward<F>(f)(source<bf16>());
    return std::forward<F>(f)(source<float>());
  }

 private:
  template <class T>
  arch::RowSource<T> source() const {
    return {static_cast<const T*>(data_), row_stride_, col_stride_, row_index_};
  }

  const void* data_ = nullptr;
  DType dtype_ = DType::kFp32;
  index_t row_stride_ = 0;
  index_t col_stride_ = 1;
  const std::int32_t* row_index_ = nullptr;
};

// One product of gemm_nn: A [M, k] x B [k, N], both as they lie.
struct NnTerm {
  AnyRows a;
  AnyRows b;
  index_t k = 0;
  bool cached = false;  // B is what was just written or read, such as tokens: memory is not waited for
};

// Fresh rows of C as the sum of `terms`: add(term, C) each that has products; zeros where none has.
template <class T, class Add>
void sum_terms(std::span<const T> terms, index_t rows, arch::SumRows c, Add&& add) {
  for (const T& term : terms) {
    if (term.k == 0) continue;
    add(term, c);
    c.fresh = false;
  }
  if (c.fresh) std::fill_n(c.data, rows * c.stride, 0.0F);
}

// B, packed (arch/operands.hpp): the panel of column c is at data + c / 16 * panel_stride. Where tokens are in
// rows (gemm/tokens.hpp) the same memory holds a column's K as one.
template <class E>
struct Panels {
  E* data = nullptr;
  index_t panel_stride = 0;

  index_t row_stride() const { return panel_stride / arch::kPanelCols; }
  Panels from_column(index_t c) const { return {data + c / arch::kPanelCols * panel_stride, panel_stride}; }
};

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
