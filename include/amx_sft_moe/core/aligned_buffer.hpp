// A growing array of trivial elements, aligned to a cache line and never initialised. Growing loses the
// contents; a buffer never shrinks by itself, so a steady-state step allocates nothing.
//
// One of 2 MiB and more begins on a huge page and asks the system for such pages: a step passes over its workspace row
// by row, and finding the addresses of pages of 4 KiB is a hundredth of it (benchmarks/LOG.md, "Huge pages of the
// workspace").
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Advice for memory that nobody has written to yet: its whole huge pages, if any, may be such. A system without them
// refuses, and nothing is lost.
inline void ask_for_huge_pages(void* memory, std::size_t bytes) {
  std::size_t left = bytes;
  void* first = memory;
  if (std::align(kHugePage, kHugePage, first, left) == nullptr) return;
  (void)madvise(first, left / kHugePage * kHugePage, MADV_HUGEPAGE);
}

template <class T>
class AlignedBuffer {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(index_t size) { reserve(size); }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::move(other.data_)), capacity_(std::exchange(other.capacity_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    data_ = std::move(other.data_);
    capacity_ = std::exchange(other.capacity_, 0);
    return *this;
  }
  ~AlignedBuffer() = default;

  // Makes room for `size` elements; returns whether memory was allocated. Strong guarantee: on std::bad_alloc, which sizes
  // below zero get too, products that have overflowed, the buffer is as it was.
  bool reserve(index_t size) {
    if (size < 0 || size > std::numeric_limits<index_t>::max() / static_cast<index_t>(sizeof(T)))
      throw std::bad_alloc();
    if (size <= capacity_) return false;
    const auto bytes = static_cast<std::size_t>(size) * sizeof(T);
    const Free free{std::align_val_t{bytes < kHugePage ? kCacheLine : kHugePage}};
    data_ = {static_cast<T*>(::operator new(bytes, free.alignment)), free};
    capacity_ = size;
    ask_for_huge_pages(data_.get(), bytes);
    return true;
  }

  T* data() const { return data_.get(); }
  T& operator[](index_t i) const { return data_.get()[i]; }
  index_t capacity() const { return capacity_; }
  index_t bytes() const { return capacity_ * static_cast<index_t>(sizeof(T)); }

 private:
  struct Free {
    std::align_val_t alignment{kCacheLine};
    void operator()(T* p) const { ::operator delete(p, alignment); }
  };
  std::unique_ptr<T, Free> data_;
  index_t capacity_ = 0;
};

AMX_SFT_MOE_NAMESPACE_END
