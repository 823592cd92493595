// Decoder for the AMX instructions the emulator executes: bytes at RIP and register values in, operands out.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace amx_emulator {

// In the order of Counts and of amx_emulator_counts(): append only.
enum class Operation : std::uint8_t {
  kLdtilecfg,
  kSttilecfg,
  kTilezero,
  kTileloadd,
  kTileloaddt1,
  kTilestored,
  kTilerelease,
  kTdpbf16ps,
  kTdpbssd,
  kTdpbsud,
  kTdpbusd,
  kTdpbuud,
};

inline constexpr std::size_t kOperations = 12;

struct Instruction {
  Operation operation;
  std::size_t length;      // bytes, to advance RIP by
  int dest;                // tile: the one loaded, stored, zeroed, or accumulated into
  int src1;                // tile: A of a product
  int src2;                // tile: B of a product
  std::uintptr_t address;  // memory operand; the stride is not part of it for tile loads and stores
  std::ptrdiff_t stride;   // bytes from row to row of a tile load or store
};

// Nothing where the bytes are another instruction, or one of these in a form that the architecture makes #UD
// (VEX.W or VEX.L set, VEX.vvvv in use where there is no third operand, tiles beyond 7, no SIB byte where one
// is required). Either way the answer is SIGILL to whoever handled it before. Not decoded although legal:
// prefixes before VEX, that is fs and gs segments and 32-bit addresses.
//
// Reads no byte beyond the instruction's own. `registers` is gregs of a signal frame.
[[nodiscard]] std::optional<Instruction> decode(const std::uint8_t* code, const greg_t* registers);

}  // namespace amx_emulator
