// Specification of the tile products: TDPBF16PS (AMX-BF16) and TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD (AMX-INT8).
#include <xmmintrin.h>

#include <bit>
#include <cstring>

#include "amx_spec.hpp"

namespace amx_spec {
namespace {

constexpr int kLanes = kRowBytes / 4;  // elements of C in a full row

bool is_operand(const TileState& state, int tile) {
  return tile >= 0 && tile < kTiles && state.rows[tile] != 0 && state.colsb[tile] % 4 == 0;
}

// start_row is not among the checks of the products: it is ignored and becomes zero.
Fault check_product(const TileState& state, int dest, int src1, int src2) {
  if (state.palette == 0 || dest == src1 || dest == src2 || src1 == src2) return Fault::kUndefinedOpcode;
  if (!is_operand(state, dest) || !is_operand(state, src1) || !is_operand(state, src2)) {
    return Fault::kUndefinedOpcode;
  }
  const bool fits = state.rows[dest] == state.rows[src1] && state.colsb[dest] == state.colsb[src2] &&
                    state.colsb[src1] / 4 == state.rows[src2];
  return fits ? Fault::kNone : Fault::kUndefinedOpcode;
}

// Writes the first colsb bytes of a computed row and zeroes the rest. The rest may hold anything: the lanes
// beyond colsb are computed too (0 * infinity for one), which lets every loop below run over a fixed number of
// lanes.
void write_row_and_zero(TileState& state, int tile, int row, const void* computed) {
  std::memset(state.data[tile][row], 0, kRowBytes);
  std::memcpy(state.data[tile][row], computed, state.colsb[tile]);
}

void finish_product(TileState& state, int dest) {
  for (int row = state.rows[dest]; row < kRows; ++row) std::memset(state.data[dest][row], 0, kRowBytes);
  state.start_row = 0;
}

// Puts SSE arithmetic into the mode of TDPBF16PS and the caller's mode, sticky flags included, back at the end.
// The memory clobbers keep the arithmetic, whose operands are all in memory, between the two.
class TileFloatMode {
 public:
  TileFloatMode() : saved_(_mm_getcsr()) {
    _mm_setcsr(kFlushToZero | kDenormalsAreZero | kAllMasked);  // rounding control 0: to nearest even
    asm volatile("" ::: "memory");
  }
  ~TileFloatMode() {
    asm volatile("" ::: "memory");
    _mm_setcsr(saved_);
  }
  TileFloatMode(const TileFloatMode&) = delete;
  TileFloatMode& operator=(const TileFloatMode&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  static constexpr unsigned kAllMasked = 0x1F80;
  unsigned saved_;
};

struct Bf16Pair {
  float even;
  float odd;
};

[[gnu::always_inline]] inline Bf16Pair load_pair(const std::uint8_t* bytes) {
  std::uint32_t pair;
  std::memcpy(&pair, bytes, sizeof pair);
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xFFFF0000u)};
}

// Inlined into both functions below, so that the fused multiply-add is an instruction in one and libm's in the
// other.
[[gnu::always_inline]] inline void bf16_product_body(TileState& state, int dest, int src1, int src2) {
  const int pairs = state.colsb[src1] / 4;
  for (int row = 0; row < state.rows[dest]; ++row) {
    float even[kLanes] = {};
    float odd[kLanes] = {};
    for (int k = 0; k < pairs; ++k) {
      const Bf16Pair a = load_pair(state.data[src1][row] + 4 * k);
      for (int lane = 0; lane < kLanes; ++lane) {
        const Bf16Pair b = load_pair(state.data[src2][k] + 4 * lane);
        even[lane] = __builtin_fmaf(a.even, b.even, even[lane]);
        odd[lane] = __builtin_fmaf(a.odd, b.odd, odd[lane]);
      }
    }
    float sum[kLanes];
    std::memcpy(sum, state.data[dest][row], sizeof sum);
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += even[lane] + odd[lane];
    write_row_and_zero(state, dest, row, sum);
  }
}

// Not inlined: what the compiler may move across a change of MXCSR is then a call, and that it may not.
[[gnu::noinline, gnu::target("avx2,fma")]] void bf16_product_fma(TileState& state, int dest, int src1,
                                                                 int src2) {
  bf16_product_body(state, dest, src1, src2);
}

[[gnu::noinline]] void bf16_product_plain(TileState& state, int dest, int src1, int src2) {
  bf16_product_body(state, dest, src1, src2);
}

// A and B are the types of the bytes of src1 and src2.
template <class A, class B>
Fault byte_product(TileState& state, int dest, int src1, int src2) {
  if (const Fault fault = check_product(state, dest, src1, src2); fault != Fault::kNone) return fault;
  for (int row = 0; row < state.rows[dest]; ++row) {
    std::uint32_t sum[kLanes];  // unsigned: wraps as the instruction does
    std::memcpy(sum, state.data[dest][row], sizeof sum);
    for (int k = 0; k < state.colsb[src1]; ++k) {  // one byte of A against one byte of each group of four
      const int a = static_cast<A>(state.data[src1][row][k]);
      const std::uint8_t* b_row = state.data[src2][k / 4] + k % 4;
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane] += static_cast<std::uint32_t>(a * static_cast<B>(b_row[4 * lane]));
      }
    }
    write_row_and_zero(state, dest, row, sum);
  }
  finish_product(state, dest);
  return Fault::kNone;
}

}  // namespace

Fault tdpbf16ps(TileState& state, int dest, int src1, int src2) {
  if (const Fault fault = check_product(state, dest, src1, src2); fault != Fault::kNone) return fault;
  {
    const TileFloatMode mode;
    if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2")) {
      bf16_product_fma(state, dest, src1, src2);
    } else {
      bf16_product_plain(state, dest, src1, src2);
    }
  }
  finish_product(state, dest);
  return Fault::kNone;
}

Fault tdpbssd(TileState& state, int dest, int src1, int src2) {
  return byte_product<std::int8_t, std::int8_t>(state, dest, src1, src2);
}

Fault tdpbsud(TileState& state, int dest, int src1, int src2) {
  return byte_product<std::int8_t, std::uint8_t>(state, dest, src1, src2);
}

Fault tdpbusd(TileState& state, int dest, int src1, int src2) {
  return byte_product<std::uint8_t, std::int8_t>(state, dest, src1, src2);
}

Fault tdpbuud(TileState& state, int dest, int src1, int src2) {
  return byte_product<std::uint8_t, std::uint8_t>(state, dest, src1, src2);
}

}  // namespace amx_spec
