// Specification of the configuration and movement instructions (AMX-TILE).
#include "amx_spec.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace amx_spec {
namespace {

// Layout of the 64 bytes of LDTILECFG and STTILECFG; everything not named here is reserved.
constexpr std::size_t kPaletteByte = 0;
constexpr std::size_t kStartRowByte = 1;
constexpr std::size_t kColsbBytes = 16;
constexpr std::size_t kRowsBytes = 48;
constexpr std::size_t kColsbEnd = kColsbBytes + kTiles * sizeof(std::uint16_t);
constexpr std::size_t kRowsEnd = kRowsBytes + kTiles;

bool all_zero(const std::uint8_t* config, std::size_t begin, std::size_t end) {
  return std::all_of(config + begin, config + end, [](std::uint8_t byte) { return byte == 0; });
}

bool reserved_bytes_are_zero(const std::uint8_t* config) {
  return all_zero(config, kStartRowByte + 1, kColsbBytes) && all_zero(config, kColsbEnd, kRowsBytes) &&
         all_zero(config, kRowsEnd, kConfigBytes);
}

// A tile is either in use, with rows and bytes, or not at all.
bool shape_is_legal(int rows, int colsb) {
  return rows <= kRows && colsb <= kRowBytes && (rows == 0) == (colsb == 0);
}

void zero_upper_rows(TileState& state, int tile, int first) {
  for (int row = first; row < kRows; ++row) std::memset(state.data[tile][row], 0, kRowBytes);
}

// The instruction's access to memory: all of these bytes, even those that nothing looks at afterwards, since
// each may fault. Without the barrier a compiler that sees an unused byte does not load it. Null is an address
// like any other here, hence no check of memcpy's arguments.
__attribute__((noinline, no_sanitize("undefined"))) void access_memory(void* to, const void* from,
                                                                       std::size_t bytes) {
  std::memcpy(to, from, bytes);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// A memory fault may leave the function between any two rows, so start_row has to be in memory by then.
void begin_row(TileState& state, int row) {
  state.start_row = static_cast<std::uint8_t>(row);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

bool is_valid_tile(const TileState& state, int tile) {
  return state.palette != 0 && tile >= 0 && tile < kTiles && state.rows[tile] != 0;
}

}  // namespace

Fault ldtilecfg(TileState& state, const void* config) {
  std::uint8_t bytes[kConfigBytes];
  access_memory(bytes, config, kConfigBytes);
  if (bytes[kPaletteByte] == 0) return tilerelease(state);  // the other bytes are not looked at
  if (bytes[kPaletteByte] != 1 || !reserved_bytes_are_zero(bytes)) return Fault::kGeneralProtection;

  std::uint16_t colsb[kTiles];
  std::uint8_t rows[kTiles];
  std::memcpy(colsb, bytes + kColsbBytes, sizeof colsb);
  std::memcpy(rows, bytes + kRowsBytes, sizeof rows);
  for (int tile = 0; tile < kTiles; ++tile) {
    if (!shape_is_legal(rows[tile], colsb[tile])) return Fault::kGeneralProtection;
  }
  state.palette = bytes[kPaletteByte];
  state.start_row = bytes[kStartRowByte];
  std::memcpy(state.colsb, colsb, sizeof colsb);
  std::memcpy(state.rows, rows, sizeof rows);
  std::memset(state.data, 0, sizeof state.data);
  return Fault::kNone;
}

Fault sttilecfg(const TileState& state, void* config) {
  std::uint8_t bytes[kConfigBytes] = {};  // unconfigured tiles store zeros throughout
  if (state.palette != 0) {
    bytes[kPaletteByte] = state.palette;
    bytes[kStartRowByte] = state.start_row;
    std::memcpy(bytes + kColsbBytes, state.colsb, sizeof state.colsb);
    std::memcpy(bytes + kRowsBytes, state.rows, sizeof state.rows);
  }
  access_memory(config, bytes, kConfigBytes);
  return Fault::kNone;
}

Fault tilerelease(TileState& state) {
  std::memset(&state, 0, sizeof state);
  return Fault::kNone;
}

Fault tilezero(TileState& state, int tile) {
  if (!is_valid_tile(state, tile)) return Fault::kUndefinedOpcode;
  zero_upper_rows(state, tile, 0);
  state.start_row = 0;
  return Fault::kNone;
}

Fault check_tile_move(const TileState& state, int tile) {
  const bool legal =
      is_valid_tile(state, tile) && state.colsb[tile] % 4 == 0 && state.start_row < state.rows[tile];
  return legal ? Fault::kNone : Fault::kUndefinedOpcode;
}

Fault tileloadd(TileState& state, int tile, const void* base, std::ptrdiff_t stride) {
  if (const Fault fault = check_tile_move(state, tile); fault != Fault::kNone) return fault;
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  zero_upper_rows(state, tile, state.start_row);
  for (int row = state.start_row; row < state.rows[tile]; ++row) {
    begin_row(state, row);
    std::uint8_t bytes[kRowBytes] = {};  // bytes from colsb on become zero
    access_memory(bytes, reinterpret_cast<const void*>(row_address(address, stride, row)), state.colsb[tile]);
    std::memcpy(state.data[tile][row], bytes, kRowBytes);
  }
  state.start_row = 0;
  return Fault::kNone;
}

// The T1 form differs in a caching hint only.
Fault tileloaddt1(TileState& state, int tile, const void* base, std::ptrdiff_t stride) {
  return tileloadd(state, tile, base, stride);
}

Fault tilestored(TileState& state, int tile, void* base, std::ptrdiff_t stride) {
  if (const Fault fault = check_tile_move(state, tile); fault != Fault::kNone) return fault;
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  for (int row = state.start_row; row < state.rows[tile]; ++row) {
    begin_row(state, row);
    access_memory(reinterpret_cast<void*>(row_address(address, stride, row)), state.data[tile][row],
                  state.colsb[tile]);
  }
  state.start_row = 0;
  return Fault::kNone;
}

}  // namespace amx_spec
