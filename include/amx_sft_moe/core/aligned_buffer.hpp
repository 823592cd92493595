// A growing array of trivial elements, aligned to a cache line and never initialised. Growing loses the
// contents; a buffer never shrinks by itself, so a steady-state step allocates nothing.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

inline constexpr std::size_t kCacheLine = 64;

template <class T>
class AlignedBuffer {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(index_t size) { reserve(size); }

  // Makes room for `size` elements; returns whether memory was allocated. Strong guarantee: on std::bad_alloc
  // the buffer is as it was.
  bool reserve(index_t size) {
    if (size <= capacity_) return false;
    if (size > std::numeric_limits<index_t>::max() / static_cast<index_t>(sizeof(T))) throw std::bad_alloc();
    const auto bytes = static_cast<std::size_t>(size) * sizeof(T);
    data_.reset(static_cast<T*>(::operator new(bytes, std::align_val_t{kCacheLine})));
    capacity_ = size;
    return true;
  }

  T* data() const { return data_.get(); }
  T& operator[](index_t i) const { return data_.get()[i]; }
  index_t capacity() const { return capacity_; }
  index_t bytes() const { return capacity_ * static_cast<index_t>(sizeof(T)); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{kCacheLine}); }
  };
  std::unique_ptr<T, Free> data_;
  index_t capacity_ = 0;
};

AMX_SFT_MOE_NAMESPACE_END
