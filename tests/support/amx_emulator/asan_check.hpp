// Reports a tile access to poisoned memory through AddressSanitizer, where the process has it.
//
// The emulator stands in for an instruction that no sanitizer instruments, and its own copies need not be
// instrumented either, so it asks the shadow itself. All three functions are weak: without AddressSanitizer
// they are null and the checks are no more than that test.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
[[gnu::weak]] void* __asan_region_is_poisoned(void* begin, std::size_t size);  // first poisoned byte or null
[[gnu::weak]] void __asan_report_load_n(void* address, std::size_t size);
[[gnu::weak]] void __asan_report_store_n(void* address, std::size_t size);
}

namespace amx_emulator {

enum class Access { kLoad, kStore };

inline void check_with_asan(Access access, std::uintptr_t address, std::size_t size) {
  if (__asan_region_is_poisoned == nullptr) return;
  void* const poisoned = __asan_region_is_poisoned(reinterpret_cast<void*>(address), size);
  if (poisoned == nullptr) return;
  // From the first bad byte on: the report then names the distance from the object exactly.
  const std::size_t rest = size - (reinterpret_cast<std::uintptr_t>(poisoned) - address);
  (access == Access::kLoad ? __asan_report_load_n : __asan_report_store_n)(poisoned, rest);
}

}  // namespace amx_emulator
