// Element types: bf16 storage with round-to-nearest-even conversion, and the run-time name of an element type.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

using index_t = std::int64_t;

// The upper half of an IEEE binary32. Trivial, so that tensors of other frameworks can be viewed as bf16*.
struct bf16 {
  std::uint16_t bits;
};
static_assert(sizeof(bf16) == 2 && std::is_trivially_copyable_v<bf16> &&
              std::is_trivially_default_constructible_v<bf16>);

constexpr float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}
constexpr float to_float(float value) {
  return value;
}

// By its bits: with -ffast-math compilers take for granted that every number is finite, std::isfinite() too. And by
// reference: clang takes it for granted of arguments passed by value, whose bits then tell nothing.
constexpr bool is_finite(const float& value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7f800000U) != 0x7f800000U;
}
constexpr bool is_nan(const float& value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7fffffffU) > 0x7f800000U;
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
constexpr bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (is_nan(value)) return bf16{static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  return bf16{static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

template <class T>
constexpr T from_float(float value) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(value);
  } else {
    static_assert(std::is_same_v<T, float>);
    return value;
  }
}

enum class DType : std::uint8_t { kBf16, kFp32 };

template <class T>
inline constexpr DType kDTypeOf = std::is_same_v<std::remove_const_t<T>, bf16> ? DType::kBf16 : DType::kFp32;

constexpr std::string_view name_of(DType dtype) {
  return dtype == DType::kBf16 ? "bf16" : "fp32";
}
constexpr index_t size_of(DType dtype) {
  return dtype == DType::kBf16 ? 2 : 4;
}

constexpr index_t ceil_div(index_t a, index_t b) {
  return (a + b - 1) / b;
}
constexpr index_t round_up(index_t a, index_t b) {
  return ceil_div(a, b) * b;
}

// Cuts [0, all) into as few parts of at most `most` as will do, as long as one another, give or take one: f(first, count).
template <class F>
constexpr void for_each_part(index_t all, index_t most, F&& f) {
  index_t first = 0;
  for (index_t left = ceil_div(all, most); left > 0; --left) {
    const index_t count = ceil_div(all - first, left);
    f(first, count);
    first += count;
  }
}

// Elements from row to row of the library's own matrices: whole cache lines, and no multiple of 1 KiB, which would have
// neighbouring rows compete for a quarter of L1's sets, or at 4 KiB for one.
template <class T>
constexpr index_t spread_row_stride(index_t cols) {
  constexpr index_t kLine = 64 / static_cast<index_t>(sizeof(T));
  const index_t stride = round_up(cols, kLine);
  return stride > 0 && stride % (16 * kLine) == 0 ? stride + kLine : stride;
}

AMX_SFT_MOE_NAMESPACE_END
