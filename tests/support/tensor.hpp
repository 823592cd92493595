// A tensor [d0, d1, d2] of bf16 or float in guarded memory, with any strides. Written and read as double; the
// conversions are the tests' own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "amx_sft_moe/core/views.hpp"
#include "guarded.hpp"
#include "reference.hpp"

namespace sft_test {

using amx_sft_moe::bf16;
using amx_sft_moe::DType;
using amx_sft_moe::index_t;

struct Extents {
  index_t d0 = 1, d1 = 1, d2 = 1;
  index_t count() const { return d0 * d1 * d2; }
};

struct Strides {
  index_t s0 = 0, s1 = 0, s2 = 1;
  // Rows of d2 adjacent elements, `padding` unused ones after each.
  static Strides rows(const Extents& e, index_t padding = 0) {
    return {e.d1 * (e.d2 + padding), e.d2 + padding, 1};
  }
  // The same memory, run through backwards in the dimensions whose bits are set.
  Strides backwards(unsigned dimensions) const {
    const auto turned = [&](index_t stride, unsigned bit) {
      return (dimensions & bit) != 0 ? -stride : stride;
    };
    return {turned(s0, 1), turned(s1, 2), turned(s2, 4)};
  }
};

inline double rounded(DType dtype, double value) {
  return dtype == DType::kBf16 ? reference::round_to_bf16(value)
                               : static_cast<double>(static_cast<float>(value));
}

class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Extents extents, Strides strides, Edge edge = Edge::kEnd)
      : dtype_(dtype), extents_(extents), strides_(strides) {
    memory_ = GuardedMemory(static_cast<std::size_t>(span()) * element_bytes(), edge);
    poison();
  }
  static Tensor matrix(DType dtype, index_t rows, index_t cols, index_t padding = 0, Edge edge = Edge::kEnd) {
    const Extents extents{1, rows, cols};
    return Tensor(dtype, extents, Strides::rows(extents, padding), edge);
  }

  DType dtype() const { return dtype_; }
  const Extents& extents() const { return extents_; }
  index_t count() const { return extents_.count(); }
  GuardedMemory& memory() { return memory_; }
  // Made by the default constructor: no tensor at all, unlike one without elements.
  bool memory_empty() const { return memory_.data() == nullptr; }

  // Every byte 0xff, a NaN in both types: a result that nobody wrote, or a gap between rows that somebody read,
  // shows.
  void poison() {
    if (memory_.bytes() > 0) std::memset(memory_.data(), 0xff, memory_.bytes());
  }

  double get(index_t i0, index_t i1, index_t i2) const {
    const std::uint32_t bits = raw(offset(i0, i1, i2));
    const std::uint32_t wide = dtype_ == DType::kBf16 ? bits << 16 : bits;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  void set(index_t i0, index_t i1, index_t i2, double value) {
    const auto narrow = static_cast<float>(rounded(dtype_, value));
    std::uint32_t bits = 0;
    std::memcpy(&bits, &narrow, sizeof bits);
    if (dtype_ == DType::kBf16) bits >>= 16;
    std::memcpy(address(offset(i0, i1, i2)), &bits, element_bytes());
  }

  void store(const std::vector<double>& values) {
    std::size_t n = 0;
    for_each([&](index_t i0, index_t i1, index_t i2) { set(i0, i1, i2, values.at(n++)); });
  }
  void fill(double value) {
    for_each([&](index_t i0, index_t i1, index_t i2) { set(i0, i1, i2, value); });
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for_each([&](index_t i0, index_t i1, index_t i2) { out.push_back(get(i0, i1, i2)); });
    return out;
  }
  // The elements' bit patterns in logical order: equal for equal results, however they are laid out.
  std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> out;
    for_each([&](index_t i0, index_t i1, index_t i2) { out.push_back(raw(offset(i0, i1, i2))); });
    return out;
  }

  // Whether the elements between the rows still hold the poison.
  bool gaps_are_poison() const {
    std::vector<bool> used(static_cast<std::size_t>(span()), false);
    for_each(
        [&](index_t i0, index_t i1, index_t i2) { used[static_cast<std::size_t>(offset(i0, i1, i2))] = true; });
    const std::uint32_t poison = dtype_ == DType::kBf16 ? 0xffffU : 0xffffffffU;
    for (index_t n = 0; n < span(); ++n) {
      if (!used[static_cast<std::size_t>(n)] && raw(n) != poison) return false;
    }
    return true;
  }

  // The first element, which is not the first in memory where a stride is negative.
  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(address(first()));
  }

  // Views for the library. An empty Tensor gives an empty view.
  amx_sft_moe::AnyMatrix matrix_view() const { return matrix_view_as<amx_sft_moe::AnyMatrix>(); }
  amx_sft_moe::AnyConstMatrix const_matrix_view() const {
    return matrix_view_as<amx_sft_moe::AnyConstMatrix>();
  }
  amx_sft_moe::AnyExpertTensor expert_view() const { return expert_view_as<amx_sft_moe::AnyExpertTensor>(); }
  amx_sft_moe::AnyConstExpertTensor const_expert_view() const {
    return expert_view_as<amx_sft_moe::AnyConstExpertTensor>();
  }

 private:
  std::size_t element_bytes() const { return dtype_ == DType::kBf16 ? 2 : 4; }
  // From the beginning of the memory.
  index_t offset(index_t i0, index_t i1, index_t i2) const {
    return first() + i0 * strides_.s0 + i1 * strides_.s1 + i2 * strides_.s2;
  }
  index_t first() const {
    if (count() == 0) return 0;
    const auto behind = [](index_t extent, index_t stride) { return stride < 0 ? (1 - extent) * stride : 0; };
    return behind(extents_.d0, strides_.s0) + behind(extents_.d1, strides_.s1) +
           behind(extents_.d2, strides_.s2);
  }
  // Of the last element in memory, plus one: exactly what the view may touch.
  index_t span() const {
    const auto reach = [](index_t extent, index_t stride) { return (extent - 1) * std::abs(stride); };
    if (count() == 0) return 0;
    return 1 + reach(extents_.d0, strides_.s0) + reach(extents_.d1, strides_.s1) +
           reach(extents_.d2, strides_.s2);
  }
  std::byte* address(index_t n) const { return memory_.data() + static_cast<std::size_t>(n) * element_bytes(); }
  std::uint32_t raw(index_t n) const {
    std::uint32_t bits = 0;
    std::memcpy(&bits, address(n), element_bytes());
    return bits;
  }

  template <class F>
  void for_each(F&& f) const {
    for (index_t i0 = 0; i0 < extents_.d0; ++i0) {
      for (index_t i1 = 0; i1 < extents_.d1; ++i1) {
        for (index_t i2 = 0; i2 < extents_.d2; ++i2) f(i0, i1, i2);
      }
    }
  }

  template <class View>
  View matrix_view_as() const {
    if (memory_empty()) return {};
    const index_t rows = extents_.d0 * extents_.d1;
    if (dtype_ == DType::kBf16) return View(data<bf16>(), rows, extents_.d2, strides_.s1, strides_.s2);
    return View(data<float>(), rows, extents_.d2, strides_.s1, strides_.s2);
  }
  template <class View>
  View expert_view_as() const {
    if (memory_empty()) return {};
    const auto make = [&](auto* p) {
      return View(p, extents_.d0, extents_.d1, extents_.d2, strides_.s0, strides_.s1, strides_.s2);
    };
    return dtype_ == DType::kBf16 ? make(data<bf16>()) : make(data<float>());
  }

  DType dtype_ = DType::kFp32;
  Extents extents_{0, 0, 0};
  Strides strides_;
  GuardedMemory memory_;
};

}  // namespace sft_test
