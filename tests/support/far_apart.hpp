// Blocks of memory so far apart that offsets between them do not fit in 31 bits, in address space of which
// nothing else is open, and which takes no memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "tensor.hpp"

namespace sft_test {

// A tensor [blocks, block] whose blocks begin kFar elements after one another.
template <class T>
class FarApart {
 public:
  static constexpr index_t kFar = (index_t{1} << 31) + 64;

  // Nothing where the system does not give so much address space.
  static std::optional<FarApart> make(index_t blocks, index_t block) {
    FarApart made(blocks, block);
    if (made.map_ == nullptr) return std::nullopt;
    return made;
  }
  FarApart(FarApart&& other) noexcept
      : map_(std::exchange(other.map_, nullptr)), blocks_(other.blocks_), block_(other.block_) {}
  FarApart(const FarApart&) = delete;
  FarApart& operator=(const FarApart&) = delete;
  ~FarApart() {
    if (map_ != nullptr) ::munmap(map_, bytes());
  }

  T* data() const { return reinterpret_cast<T*>(map_); }

  // Copies the elements from or to adjacent blocks, `pitch` elements after one another.
  void load(const T* from, index_t pitch) {
    for (index_t b = 0; b < blocks_; ++b) std::memcpy(data() + b * kFar, from + b * pitch, block_bytes());
  }
  void store(T* to, index_t pitch) const {
    for (index_t b = 0; b < blocks_; ++b) std::memcpy(to + b * pitch, data() + b * kFar, block_bytes());
  }

 private:
  FarApart(index_t blocks, index_t block) : blocks_(blocks), block_(block) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* map = ::mmap(nullptr, bytes(), PROT_NONE, kFlags, -1, 0);
    if (map == MAP_FAILED) return;
    map_ = static_cast<std::byte*>(map);
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    for (index_t b = 0; b < blocks; ++b) {
      const std::size_t begin = static_cast<std::size_t>(b * kFar) * sizeof(T), first = begin / page * page;
      if (::mprotect(map_ + first, begin - first + block_bytes(), PROT_READ | PROT_WRITE) == 0) continue;
      ::munmap(std::exchange(map_, nullptr), bytes());
      return;
    }
  }
  std::size_t block_bytes() const { return static_cast<std::size_t>(block_) * sizeof(T); }
  std::size_t bytes() const {
    return static_cast<std::size_t>((blocks_ - 1) * kFar) * sizeof(T) + block_bytes();
  }

  std::byte* map_ = nullptr;
  index_t blocks_ = 0, block_ = 0;
};

}  // namespace sft_test
