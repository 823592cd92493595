// The AMX instructions, wrapped. GCC 12's own intrinsics under-declare the memory they touch (_tile_loadconfig
// claims 8 of 64 bytes, _tile_loadd none), so that -O2 drops the stores before them: here every operand is
// declared and memory is clobbered. No target attribute is needed: to the compiler these are opaque. Tile
// numbers are literals in the instruction, hence template parameters and one string per number.
#pragma once

#include <cstdint>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::amx {

inline constexpr int kTiles = 8;
inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 64;  // of a row

// The 64 bytes of LDTILECFG, palette 1.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

inline void load_config(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
inline void release() {
  __asm__ volatile("tilerelease" : : : "memory");
}

template <int Tile>
AMX_SFT_MOE_INLINE void zero() {
  static_assert(Tile >= 0 && Tile < kTiles);
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

template <int Tile>
AMX_SFT_MOE_INLINE void load(const void* rows, index_t stride_bytes) {
  static_assert(Tile >= 0 && Tile < kTiles);
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride_bytes), "i"(Tile) : "memory");
}

template <int Tile>
AMX_SFT_MOE_INLINE void store(void* rows, index_t stride_bytes) {
  static_assert(Tile >= 0 && Tile < kTiles);
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride_bytes), "i"(Tile) : "memory");
}

// C += A x B; A holds rows of bf16 pairs, B pairs interleaved by columns.
template <int C, int A, int B>
AMX_SFT_MOE_INLINE void dpbf16() {
  static_assert(C != A && C != B && A != B);
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace arch::amx
AMX_SFT_MOE_NAMESPACE_END
