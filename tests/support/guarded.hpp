// Memory between two PROT_NONE pages, so that a read or write outside of an operand faults at the instruction
// that makes it. Unlike AddressSanitizer this also sees tile loads and masked vector loads.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>
#include <utility>

namespace sft_test {

// Which guard the bytes touch: kEnd catches overruns to the byte, kStart catches underruns.
enum class Edge { kEnd, kStart };

class GuardedMemory {
 public:
  GuardedMemory() = default;

  GuardedMemory(std::size_t bytes, Edge edge) : bytes_(bytes) {
    const std::size_t page = page_size();
    inner_ = (bytes + page - 1) / page * page;
    void* map = ::mmap(nullptr, inner_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    map_ = static_cast<std::byte*>(map);
    if (inner_ > 0) protect(PROT_READ | PROT_WRITE);
    data_ = map_ + page + (edge == Edge::kEnd ? inner_ - bytes : 0);
  }

  GuardedMemory(GuardedMemory&& other) noexcept { swap(other); }
  GuardedMemory& operator=(GuardedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  ~GuardedMemory() {
    if (map_ != nullptr) ::munmap(map_, inner_ + 2 * page_size());
  }

  // Not null even for zero bytes, where it points at a guard page.
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // PROT_READ, PROT_READ | PROT_WRITE or PROT_NONE for all pages that hold data.
  void protect(int protection) const {
    if (inner_ > 0 && ::mprotect(map_ + page_size(), inner_, protection) != 0) throw std::bad_alloc();
  }
  // The pages that hold data, for a fault handler that opens them.
  std::byte* pages() const { return map_ + page_size(); }
  std::size_t page_bytes() const { return inner_; }

 private:
  static std::size_t page_size() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

  void swap(GuardedMemory& other) noexcept {
    std::swap(map_, other.map_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(inner_, other.inner_);
  }

  std::byte* map_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t inner_ = 0;
};

}  // namespace sft_test
