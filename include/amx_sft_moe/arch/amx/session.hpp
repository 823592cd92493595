// What products of tiles share: the configuration that a thread has loaded, and an accumulator's way from and to C.
#pragma once

#include <cstdint>

#include "amx_sft_moe/arch/amx/tile.hpp"
#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::amx {

// What the configuration for a block of C follows from: the block's kind, its rows and columns, steps along K of a tile.
struct BlockShape {
  std::int16_t kind, rows, cols, k_tile;

  static constexpr std::int16_t kFewRows = 3;  // a kind beside AmxMicrokernel's patterns
  friend bool operator==(const BlockShape&, const BlockShape&) = default;
};

// The configuration that this thread has loaded; gives the tiles back at the end of a region.
class Session {
 public:
  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    if (active_) release();
  }
  // Loads config_of(shape) unless it is there. Shapes are compared, not configurations: one that has just been written by
  // bytes cannot be read by words before it and all stores ahead of it, C's tiles on their way to L2, have left the core.
  template <class ConfigOf>
  AMX_SFT_MOE_INLINE void use(const BlockShape& shape, ConfigOf&& config_of) {
    if (active_ && shape == loaded_) return;
    load_config(config_of(shape));
    loaded_ = shape;
    active_ = true;
  }

 private:
  BlockShape loaded_{};
  bool active_ = false;
};

// The accumulator of C at (row, col): what is there, or zeros, and back.
template <int Tile>
AMX_SFT_MOE_INLINE void begin_sums(const SumRows& c, index_t row, index_t col) {
  if (c.fresh) {
    zero<Tile>();
  } else {
    load<Tile>(c.from(row, col).data, c.stride * 4);
  }
}
template <int Tile>
AMX_SFT_MOE_INLINE void end_sums(const SumRows& c, index_t row, index_t col) {
  store<Tile>(c.from(row, col).data, c.stride * 4);
}

}  // namespace arch::amx
AMX_SFT_MOE_NAMESPACE_END
