// What products of tiles share: the configuration that a thread has loaded, and an accumulator's way from and to C.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/amx/tile.hpp"
#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::amx {

// The configuration that this thread has loaded; gives the tiles back at the end of a region.
class Session {
 public:
  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    if (active_) release();
  }
  void use(const TileConfig& config) {
    if (active_ && std::memcmp(&config, &loaded_, sizeof(config)) == 0) return;
    load_config(config);
    loaded_ = config;
    active_ = true;
  }

 private:
  TileConfig loaded_;
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
