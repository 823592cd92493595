// kernels::AmxBf16 that counts its AMX instructions instead of executing them: the operator with this kernel has the
// task lists, the packing and the row operations of the real one, at any size, on any CPU with AVX512. `bench_tasks
// check` compares its counts with those of the emulator.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace bench {

// Instructions executed, and what bounds their time: steps[n - 1] of the steps along K have n accumulators, which are n
// independent chains of products; a block begins and ends with nothing to overlap.
struct TileCounts {
  std::int64_t tdpbf16ps = 0, tileloadd = 0, tilestored = 0, tilezero = 0, ldtilecfg = 0, tilerelease = 0;
  std::int64_t blocks = 0;
  std::array<std::int64_t, 6> steps{};

  TileCounts& operator+=(const TileCounts& o) { return *this = combine(*this, o, 1); }
  friend TileCounts operator-(const TileCounts& a, const TileCounts& b) { return combine(a, b, -1); }

  // In what an emulator can count.
  bool same_instructions(const TileCounts& o) const {
    return std::tie(tdpbf16ps, tileloadd, tilestored, tilezero, ldtilecfg, tilerelease) ==
           std::tie(o.tdpbf16ps, o.tileloadd, o.tilestored, o.tilezero, o.ldtilecfg, o.tilerelease);
  }

 private:
  static TileCounts combine(TileCounts a, const TileCounts& b, std::int64_t sign) {
    a.tdpbf16ps += sign * b.tdpbf16ps;
    a.tileloadd += sign * b.tileloadd;
    a.tilestored += sign * b.tilestored;
    a.tilezero += sign * b.tilezero;
    a.ldtilecfg += sign * b.ldtilecfg;
    a.tilerelease += sign * b.tilerelease;
    a.blocks += sign * b.blocks;
    for (std::size_t n = 0; n < a.steps.size(); ++n) a.steps[n] += sign * b.steps[n];
    return a;
  }
};

class CountingMicrokernel : public amx_sft_moe::arch::AmxMicrokernel {
  using Base = amx_sft_moe::arch::AmxMicrokernel;
  using bf16 = amx_sft_moe::bf16;
  using index_t = amx_sft_moe::index_t;

 public:
  // Of the calling thread so far: all of a step where the operator has one thread.
  static TileCounts& counts() {
    thread_local TileCounts all;
    return all;
  }

  // The shapes of tiles 0 to 7 that a thread has loaded, [rows, bytes].
  using TileShapes = std::array<std::pair<index_t, index_t>, 8>;
  class Session {
   public:
    Session() = default;
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session() {
      if (active_) ++counts().tilerelease;
    }
    void use(const TileShapes& shapes) {
      if (active_ && shapes == loaded_) return;
      ++counts().ldtilecfg;
      loaded_ = shapes;
      active_ = true;
    }

   private:
    TileShapes loaded_{};
    bool active_ = false;
  };

  // gemm_nn of few rows: a turn of one or two tiles of B at a time, for each 32 columns. The elements of A, a hundredth of the
  // time, are not gathered.
  struct FewRows : Base::FewRows {
    static void multiply(Session& session, const amx_sft_moe::arch::RowSource<bf16>& /*a*/, index_t rows,
                         const amx_sft_moe::arch::RowSource<bf16>& /*b*/, index_t k, index_t cols,
                         const amx_sft_moe::arch::SumRows& c, bf16* /*room*/) {
      const index_t row_tiles = amx_sft_moe::ceil_div(rows, kTile), turn = row_tiles * kTile;
      const index_t streamed = turn * amx_sft_moe::arch::rows_of_stream(k, turn);
      bool fresh = c.fresh;
      for (index_t row = 0; row < k; fresh = false) {
        const index_t steps = std::min(kTile, k - row);
        const index_t tiles = row < streamed || k - row >= turn ? row_tiles : 1;
        count_turn(session, rows, cols, tiles, steps, fresh);
        row += tiles * steps;
      }
      for (index_t i = 0; i < rows; ++i)
        std::fill_n(c.from(i, 0).data, amx_sft_moe::round_up(cols, 2 * kTile), 0.5F);
    }

   private:
    static void count_turn(Session& session, index_t rows, index_t cols, index_t tiles, index_t steps,
                           bool fresh) {
      const index_t row_tiles = amx_sft_moe::ceil_div(rows, kTile);
      const index_t first = std::min(rows, kTile), second = rows - first;
      TileShapes shapes{};
      for (const std::size_t tile : {0U, 1U}) shapes[tile] = {first, 64};
      for (const std::size_t tile : {4U, 5U}) shapes[tile] = {first, 4 * steps};
      shapes[6] = {steps, 64};
      if (second > 0) {
        shapes[2] = shapes[3] = {second, 64};
        shapes[7] = {second, 4 * steps};
      }
      session.use(shapes);
      // The last columns, where they are no whole tile, take one tile of B at a time.
      const index_t whole = cols / (2 * kTile), rest = cols % (2 * kTile) == 0 ? 0 : tiles;
      const index_t blocks = whole + rest, fresh_blocks = fresh ? whole + (rest > 0 ? 1 : 0) : 0;
      const index_t products = 2 * row_tiles * tiles * (whole + (rest > 0 ? 1 : 0));
      TileCounts& all = counts();
      all.tdpbf16ps += products;
      all.tilezero += fresh_blocks * 2 * row_tiles;
      all.tilestored += blocks * 2 * row_tiles;
      all.tileloadd += (blocks - fresh_blocks) * 2 * row_tiles + products / (2 * row_tiles) +
                       (row_tiles == 1 ? 2 : products);
      all.blocks += blocks;
      all.steps[static_cast<std::size_t>(2 * row_tiles - 1)] += products / (2 * row_tiles);
    }
  };

  static void block(Session& session, int pattern, const amx_sft_moe::arch::Segments<bf16>& segments,
                    index_t rows, index_t cols, const amx_sft_moe::arch::SumRows& c) {
    if (pattern != Base::kRow) return count(session, pattern, segments, rows, cols, c);
    for (index_t row = 0; row < rows; row += kTile) {  // strips one below the other
      count(session, pattern, segments, std::min(kTile, rows - row), cols, c.from(row, 0));
    }
  }

 private:
  static constexpr index_t kTile = 16;

  static void count(Session& session, int pattern, const amx_sft_moe::arch::Segments<bf16>& segments,
                    index_t rows, index_t cols, const amx_sft_moe::arch::SumRows& c) {
    using amx_sft_moe::ceil_div;
    const index_t row_tiles = ceil_div(rows, kTile), col_tiles = ceil_div(cols, kTile);
    session.use(shapes_of(pattern, rows, cols, segments.k_tile));
    index_t k_steps = 0;
    for (int s = 0; s < segments.count; ++s) k_steps += ceil_div(segments.at[s].k, segments.k_tile);
    TileCounts& all = counts();
    (c.fresh ? all.tilezero : all.tileloadd) += row_tiles * col_tiles;
    all.tilestored += row_tiles * col_tiles;
    all.tdpbf16ps += row_tiles * col_tiles * k_steps;
    all.tileloadd += (row_tiles + col_tiles) * k_steps;
    all.blocks += 1;
    all.steps[static_cast<std::size_t>(row_tiles * col_tiles - 1)] += k_steps;
    for (index_t i = 0; i < rows; ++i) std::fill_n(c.from(i, 0).data, cols, 0.5F);
  }

  static TileShapes shapes_of(int pattern, index_t rows, index_t cols, index_t k_tile) {
    TileShapes shapes{};
    auto set = [&shapes](std::size_t tile, index_t tile_rows, index_t bytes) {
      if (tile_rows > 0 && bytes > 0) shapes[tile] = {tile_rows, bytes};
    };
    auto part = [](index_t n, index_t i) { return std::clamp(n - i * kTile, index_t{0}, kTile); };
    if (pattern == Base::kColumn || pattern == Base::kRow) {
      for (std::size_t c = 0; c < 6; ++c) set(c, part(rows, 0), part(cols, 0) * 4);
      set(6, part(rows, 0), k_tile * 2);
      set(7, k_tile / 2, part(cols, 0) * 4);
      return shapes;
    }
    for (index_t i = 0; i < 2; ++i) {
      for (index_t j = 0; j < 2; ++j)
        set(static_cast<std::size_t>(2 * i + j), part(rows, i), part(cols, j) * 4);
      set(static_cast<std::size_t>(4 + i), part(rows, i), k_tile * 2);
      set(static_cast<std::size_t>(6 + i), k_tile / 2, part(cols, i) * 4);
    }
    return shapes;
  }
};

struct CountingAmx : amx_sft_moe::kernels::AmxBf16 {
  static constexpr std::string_view kName = "amx_bf16_counted";
  using Microkernel = CountingMicrokernel;
  using Session = Microkernel::Session;

  static std::string refusal() {
    return amx_sft_moe::arch::cpu_features().avx512 ? "" : "packing and row operations need AVX512";
  }
  static bool available() { return refusal().empty(); }
};

}  // namespace bench
