#include "allocation_counter.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> g_allocations{0};
std::atomic<std::int64_t> g_frees{0};
std::atomic<std::int64_t> g_live_aligned{0};
std::atomic<std::int64_t> g_fails{-1};  // the count at which an allocation fails

void* allocate(std::size_t bytes, std::size_t alignment) {
  const std::int64_t number = g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (number == g_fails.load(std::memory_order_relaxed)) {
    g_frees.fetch_add(1, std::memory_order_relaxed);  // nothing to free: nothing lives
    throw std::bad_alloc();
  }
  // aligned_alloc wants a multiple of the alignment.
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void release(void* memory) {
  if (memory != nullptr) g_frees.fetch_add(1, std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

std::int64_t sft_test::allocation_count() {
  return g_allocations.load(std::memory_order_relaxed);
}

std::int64_t sft_test::live_allocations() {
  return g_allocations.load(std::memory_order_relaxed) - g_frees.load(std::memory_order_relaxed);
}

std::int64_t sft_test::live_aligned_allocations() {
  return g_live_aligned.load(std::memory_order_relaxed);
}

sft_test::FailingAllocation::FailingAllocation(std::int64_t at) {
  g_fails = g_allocations + at;
}
bool sft_test::FailingAllocation::failed() const {
  return g_allocations > g_fails;
}
sft_test::FailingAllocation::~FailingAllocation() {
  g_fails = -1;
}

// All other forms of new and delete end in these.
void* operator new(std::size_t bytes) {
  return allocate(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  void* memory = allocate(bytes, static_cast<std::size_t>(alignment));
  g_live_aligned.fetch_add(1, std::memory_order_relaxed);
  return memory;
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  if (memory != nullptr) g_live_aligned.fetch_sub(1, std::memory_order_relaxed);
  release(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  release(memory);
}
