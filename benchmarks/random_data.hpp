// Reproducible operands: values are irrelevant to speed as long as they are normal numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace bench {

// Memory as callers bring it: in the pages that the allocator has, mostly of 4 KiB, where AlignedBuffer asks for huge
// ones.
template <class T>
class CallersMemory {
 public:
  void reserve(amx_sft_moe::index_t count) {
    data_.reset(static_cast<T*>(::operator new(static_cast<std::size_t>(count) * sizeof(T), kAlignment)));
  }
  T* data() const { return data_.get(); }
  T& operator[](amx_sft_moe::index_t i) const { return data_.get()[i]; }

 private:
  static constexpr std::align_val_t kAlignment{amx_sft_moe::kCacheLine};
  struct Free {
    void operator()(T* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<T, Free> data_;
};

// Uniform in [-scale, scale], again and again the same 2^20 values. Also the first touch, which can be slow on virtual
// machines.
template <class T>
void fill(CallersMemory<T>& buffer, amx_sft_moe::index_t count, float scale, std::uint32_t seed) {
  buffer.reserve(count);
  std::uint32_t state = seed * 2654435761U + 1U;
  const amx_sft_moe::index_t fresh = std::min(count, amx_sft_moe::index_t{1} << 20);
  for (amx_sft_moe::index_t i = 0; i < fresh; ++i) {
    state = state * 1664525U + 1013904223U;
    const float unit = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31F;
    buffer[i] = amx_sft_moe::from_float<T>(unit * scale);
  }
  for (amx_sft_moe::index_t i = fresh; i < count; i += fresh) {
    std::copy_n(buffer.data(), std::min(fresh, count - i), buffer.data() + i);
  }
}

}  // namespace bench
