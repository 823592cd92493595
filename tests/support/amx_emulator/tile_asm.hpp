// The AMX instructions as inline assembly, for tests: mnemonics only, tile numbers as template arguments.
//
// Each statement claims memory as a whole, so that nothing around it is moved or dropped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tile_asm {

inline void ldtilecfg(const void* config) {
  asm volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
}
inline void sttilecfg(void* config) {
  asm volatile("sttilecfg (%0)" : : "r"(config) : "memory");
}
inline void tilerelease() {
  asm volatile("tilerelease" : : : "memory");
}

template <int kTile>
void tilezero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile) : "memory");
}

template <int kTile>
void tileloadd(const void* base, std::ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
void tileloaddt1(const void* base, std::ptrdiff_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
void tilestored(void* base, std::ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(base), "r"(stride), "i"(kTile) : "memory");
}

// C += A B with C = kDest, A = kSrc1, B = kSrc2; the assembler's order is the reverse.
#define TILE_ASM_PRODUCT(name)                                                                             \
  template <int kDest, int kSrc1, int kSrc2>                                                               \
  void name() {                                                                                            \
    asm volatile(#name " %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kDest), "i"(kSrc1), "i"(kSrc2) : "memory"); \
  }
TILE_ASM_PRODUCT(tdpbf16ps)
TILE_ASM_PRODUCT(tdpbssd)
TILE_ASM_PRODUCT(tdpbsud)
TILE_ASM_PRODUCT(tdpbusd)
TILE_ASM_PRODUCT(tdpbuud)
#undef TILE_ASM_PRODUCT

}  // namespace tile_asm
