// Executable specification of the Intel AMX instructions this project compiles (AMX-TILE, AMX-BF16, AMX-INT8).
//
// One plain function per instruction, on a plain TileState. Each function first makes the architecture's checks
// and returns the fault it would raise, leaving the state as it was; otherwise it does its work and returns
// Fault::kNone. Nothing here allocates, locks or keeps state of its own, so a signal handler may call it.
//
// Follows the Intel 64 and IA-32 Software Developer's Manual, volume 2 (instruction pages and exception classes
// AMX-E1 to AMX-E6). What the manual leaves open is said where it matters.
#pragma once

#include <cstddef>
#include <cstdint>

namespace amx_spec {

inline constexpr int kTiles = 8;      // palette 1: eight tiles
inline constexpr int kRows = 16;      // of at most 16 rows
inline constexpr int kRowBytes = 64;  // of at most 64 bytes
inline constexpr std::size_t kConfigBytes = 64;

enum class Fault {
  kNone,
  kUndefinedOpcode,    // #UD
  kGeneralProtection,  // #GP(0)
};

// TILECFG and TILEDATA of one thread; all zero is the architecture's INIT state.
struct TileState {
  std::uint8_t palette;    // 0: tiles are not configured, 1: they are
  std::uint8_t start_row;  // row at which an interrupted load or store goes on
  std::uint8_t rows[kTiles];
  std::uint16_t colsb[kTiles];  // bytes per row
  alignas(64) std::uint8_t data[kTiles][kRows][kRowBytes];
};

// Configuration. `config` is 64 bytes in the LDTILECFG layout, of any alignment.
[[nodiscard]] Fault ldtilecfg(TileState& state, const void* config);
[[nodiscard]] Fault sttilecfg(const TileState& state, void* config);
[[nodiscard]] Fault tilerelease(TileState& state);

// Movement. Row i of the tile is colsb bytes at base + i * stride; no other byte is touched.
// While row i is being moved start_row is i: a caller that recovers from a memory fault may simply run the
// instruction again, as the architecture allows.
[[nodiscard]] Fault tilezero(TileState& state, int tile);
[[nodiscard]] Fault tileloadd(TileState& state, int tile, const void* base, std::ptrdiff_t stride);
[[nodiscard]] Fault tileloaddt1(TileState& state, int tile, const void* base, std::ptrdiff_t stride);
[[nodiscard]] Fault tilestored(TileState& state, int tile, void* base, std::ptrdiff_t stride);

// What a load or store of `tile` would raise before it touches memory.
[[nodiscard]] Fault check_tile_move(const TileState& state, int tile);

// Address of row `row`; integer arithmetic, because base and stride are whatever the registers hold.
[[nodiscard]] inline std::uintptr_t row_address(std::uintptr_t base, std::ptrdiff_t stride, int row) {
  return base + static_cast<std::uintptr_t>(row) * static_cast<std::uintptr_t>(stride);
}

// Products, C += A B with C = dest, A = src1, B = src2; B holds groups of 4 bytes along k (VNNI).
//
// TDPBF16PS: per element of C the even and the odd members of the pairs are summed in two fused multiply-add
// chains over ascending k, both starting at +0; the two sums are added; that is added to C. Every step rounds
// to nearest even, takes denormals as zero and flushes denormal results to zero (tininess after rounding).
// MXCSR is neither consulted nor changed. The payload of a NaN result is not specified here.
[[nodiscard]] Fault tdpbf16ps(TileState& state, int dest, int src1, int src2);

// Four-byte dot products, accumulated modulo 2^32. The first letter is the sign of A's bytes, the second of
// B's.
[[nodiscard]] Fault tdpbssd(TileState& state, int dest, int src1, int src2);
[[nodiscard]] Fault tdpbsud(TileState& state, int dest, int src1, int src2);
[[nodiscard]] Fault tdpbusd(TileState& state, int dest, int src1, int src2);
[[nodiscard]] Fault tdpbuud(TileState& state, int dest, int src1, int src2);

}  // namespace amx_spec
