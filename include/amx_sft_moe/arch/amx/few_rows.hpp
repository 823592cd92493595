// gemm_nn with tiles for up to 32 rows of A: B is multiplied as it lies, and nothing of it is packed.
//
// TDPBF16PS wants B in pairs along K. A row of B as it lies holds pairs along N instead, (B[k, 2j], B[k, 2j + 1]); with a
// zero behind each element of A a product has the sums of even columns, with one before it those of odd ones:
//
//     (A[i, k], 0) . (B[k, 2j], B[k, 2j + 1])  to C[i, 2j]        (0, A[i, k]) . (B[k, 2j], B[k, 2j + 1])  to C[i, 2j + 1]
//
// That is twice the products, of which few rows have more than memory delivers weights for; what they wait for is that each
// line of B passes once, by itself (benchmarks/LOG.md, "Few rows of tiles"). A zero times an infinity is no number: beside an
// element of B that is not finite the other one of its pair has no sum either.
//
// Tiles of B are rows of it in streams (arch/blocking.hpp): with K = 16 P + rest, P odd, the rows t, t + P, ..., t + 15 P for
// t = 0 to P - 1, then the rest as they follow one another. C passes through the accumulators once for each tile, which is
// what limits more than 16 rows; these take two tiles at a time, 32 streams, the most that hardware follows.
#pragma once

#include "amx_sft_moe/arch/amx/session.hpp"
#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/blocking.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

class AmxFewRows {
 public:
  static constexpr index_t kRows = 2 * amx::kTileRows;  // of A, at most

 private:
  static constexpr index_t kSteps = amx::kTileRows;         // along K of a tile of B
  static constexpr index_t kCols = 2 * kPanelCols;          // of a tile of B: 16 pairs
  static constexpr index_t kTileElements = kSteps * kCols;  // elements of a tile
  static constexpr index_t kPair = 2 * kTileElements;       // A with zeros behind its elements, and before
  static constexpr index_t kTogether = 16;                  // turns whose elements of A are gathered together
  static constexpr index_t kTiles = 2 * 2 * kPair;          // A's of one turn
  static constexpr index_t kElements = kTogether * 2 * kRows * kSteps;

 public:
  static constexpr index_t kRoom = kTiles + kElements + kTileElements;

  // C [rows, cols] += A [rows, k] B [k, cols], or = it where C is fresh, its columns in halves (in_order()). K of A and columns
  // of B are adjacent; `room` has kRoom elements, aligned to a line.
  static void multiply(amx::Session& session, const RowSource<bf16>& a, index_t rows, const RowSource<bf16>& b,
                       index_t k, index_t cols, const SumRows& c, bf16* room) {
    if (rows <= kSteps) {
      Product<1>{session, a, rows, b, cols, room}.add(k, c);
    } else {
      Product<2>{session, a, rows, b, cols, room}.add(k, c);
    }
  }

  // Columns of C [rows, cols], 32 by 32, from 16 even ones and 16 odd ones to their order.
  AMX_SFT_MOE_TARGET_AVX512 static void in_order(const SumRows& c, index_t rows, index_t cols) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    for (index_t i = 0; i < rows; ++i) {
      float* row = c.from(i, 0).data;
      for (index_t j = 0; j < cols; j += kCols) {
        const __m512 even = _mm512_loadu_ps(row + j), odd = _mm512_loadu_ps(row + j + kPanelCols);
        _mm512_storeu_ps(row + j, _mm512_permutex2var_ps(even, low, odd));
        _mm512_storeu_ps(row + j + kPanelCols, _mm512_permutex2var_ps(even, high, odd));
      }
    }
  }

 private:
  // Rows of B that are multiplied in one turn: the first, how far apart, tiles of how many.
  struct Turn {
    index_t row, apart;
    int tiles;
    index_t steps;
  };

  // For one or two tiles of A's rows, which take as many tiles of B a turn.
  template <int RowTiles>
  struct Product {
    amx::Session& session;
    const RowSource<bf16>& a;
    index_t rows;
    const RowSource<bf16>& b;
    index_t cols;
    bf16* room;

    void add(index_t k, SumRows c) const {
      constexpr index_t kTurn = RowTiles * kSteps;
      const index_t apart = rows_of_stream(k, kTurn);
      for (index_t first = 0; first < apart; first += kTogether) {
        const index_t count = apart - first < kTogether ? apart - first : kTogether;
        gather(first, apart, count);
        for (index_t t = 0; t < count; ++t, c.fresh = false) {
          turn({first + t, apart, RowTiles, kSteps}, elements() + t * RowTiles * rows * kSteps, c);
        }
      }
      for (index_t row = apart * kTurn; row < k; c.fresh = false) {
        const index_t steps = k - row < kSteps ? k - row : kSteps;
        int tiles = 1;
        if (k - row >= kTurn) tiles = RowTiles;
        copy(row, tiles, steps);
        turn({row, 1, tiles, steps}, elements(), c);
        row += tiles * steps;
      }
    }

   private:
    bf16* elements() const { return room + kTiles; }  // of A: [turn][tile of B][rows][16]
    bf16* tail() const { return room + kTiles + kElements; }

    // Element p of row i for tile d of turn t: a.row(i)[first + t + (16 d + p) apart].
    AMX_SFT_MOE_TARGET_AVX512 void gather(index_t first, index_t apart, index_t count) const {
      const __mmask16 lanes = avx512::mask16(count);
      for (index_t i = 0; i < rows; ++i) {
        for (index_t d = 0; d < RowTiles; ++d) {
          const bf16* from = a.row(i) + first + d * kSteps * apart;
          __m512i r[16];
          AMX_SFT_MOE_UNROLL
          for (int p = 0; p < 16; ++p) {
            r[p] = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from + p * apart));
          }
          avx512::transpose_16x16(r);
          bf16* to = elements() + (d * rows + i) * kSteps;
          AMX_SFT_MOE_UNROLL
          for (int t = 0; t < 16; ++t) {
            if (t < count) store16(to + t * RowTiles * rows * kSteps, _mm512_cvtepi32_epi16(r[t]));
          }
        }
      }
    }
    // The same for a turn over rows of B that follow one another, of the last tile perhaps fewer than 16.
    AMX_SFT_MOE_TARGET_AVX512 void copy(index_t first, index_t tiles, index_t steps) const {
      const __mmask16 lanes = avx512::mask16(steps);
      for (index_t d = 0; d < tiles; ++d) {
        for (index_t i = 0; i < rows; ++i) {
          store16(elements() + (d * rows + i) * kSteps,
                  _mm256_maskz_loadu_epi16(lanes, a.row(i) + first + d * kSteps));
        }
      }
    }

    void turn(const Turn& of, const bf16* from, const SumRows& c) const {
      spread(from, of.tiles);
      session.use({amx::BlockShape::kFewRows, static_cast<std::int16_t>(rows), kCols,
                   static_cast<std::int16_t>(of.steps)},
                  config_for);
      if constexpr (RowTiles == 1) {  // A's tiles stay while all columns pass
        amx::load<4>(room, amx::kTileBytes);
        amx::load<5>(room + kTileElements, amx::kTileBytes);
      }
      if (of.tiles == 1) return columns<1>(of, c);
      columns<RowTiles>(of, c);
    }

    // A's tiles of a turn: [tile of B][tile of rows][zeros behind, zeros before][16][32].
    AMX_SFT_MOE_TARGET_AVX512 void spread(const bf16* from, index_t tiles) const {
      for (index_t d = 0; d < tiles; ++d) {
        for (index_t i = 0; i < rows; ++i, from += kSteps) {
          const __m512i row = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
          bf16* to = room + (d * RowTiles + i / kSteps) * kPair + i % kSteps * kCols;
          _mm512_storeu_si512(to, row);
          _mm512_storeu_si512(to + kTileElements, _mm512_slli_epi32(row, 16));
        }
      }
    }

    template <int Tiles>
    void columns(const Turn& of, const SumRows& c) const {
      const index_t stride = of.apart * b.row_stride, next = kSteps * stride;
      const bf16* from = b.data + of.row * b.row_stride;
      index_t col = 0;
      for (; col + kCols <= cols; col += kCols) block<Tiles>(from + col, stride, next, room, c.from(0, col));
      if (col == cols) return;
      SumRows rest = c.from(0, col);
      for (index_t d = 0; d < Tiles; ++d, rest.fresh = false) {
        copy_tail(from + d * next + col, stride, of.steps, cols - col);
        block<1>(tail(), kCols, 0, room + d * RowTiles * kPair, rest);
      }
    }

    // Columns of a tile that is not whole, zeros behind.
    AMX_SFT_MOE_TARGET_AVX512 void copy_tail(const bf16* from, index_t stride, index_t steps,
                                             index_t wide) const {
      for (index_t s = 0; s < steps; ++s) {
        const __m512i row = _mm512_maskz_loadu_epi16(avx512::mask32(wide), from + s * stride);
        _mm512_storeu_si512(tail() + s * kCols, row);
      }
    }

    // 32 columns of C: tiles 0 and 1, of A's second rows 2 and 3, have the sums of even ones and of odd ones; 4, 5 and 7 are
    // A's, 6 is B's.
    template <int Tiles>
    AMX_SFT_MOE_INLINE static void block(const bf16* from, index_t stride, index_t next, const bf16* tiles,
                                         const SumRows& c) {
      amx::begin_sums<0>(c, 0, 0);
      amx::begin_sums<1>(c, 0, kPanelCols);
      if constexpr (RowTiles == 2) {
        amx::begin_sums<2>(c, kSteps, 0);
        amx::begin_sums<3>(c, kSteps, kPanelCols);
      }
      AMX_SFT_MOE_UNROLL
      for (int d = 0; d < Tiles; ++d, from += next, tiles += RowTiles * kPair) {
        amx::load<6>(from, stride * 2);
        if constexpr (RowTiles == 2) amx::load<4>(tiles, amx::kTileBytes);
        amx::dpbf16<0, 4, 6>();
        if constexpr (RowTiles == 2) amx::load<5>(tiles + kTileElements, amx::kTileBytes);
        amx::dpbf16<1, 5, 6>();
        if constexpr (RowTiles == 2) {
          amx::load<7>(tiles + kPair, amx::kTileBytes);
          amx::dpbf16<2, 7, 6>();
          amx::load<7>(tiles + kPair + kTileElements, amx::kTileBytes);
          amx::dpbf16<3, 7, 6>();
        }
      }
      amx::end_sums<0>(c, 0, 0);
      amx::end_sums<1>(c, 0, kPanelCols);
      if constexpr (RowTiles == 2) {
        amx::end_sums<2>(c, kSteps, 0);
        amx::end_sums<3>(c, kSteps, kPanelCols);
      }
    }
  };

  static amx::TileConfig config_for(const amx::BlockShape& of) {
    const index_t rows = of.rows, steps = of.k_tile;
    amx::TileConfig config;
    const auto shape = [&config](int tile, index_t tile_rows, index_t bytes) {
      if (tile_rows <= 0) return;  // an unused tile: its rows and bytes are zero
      config.rows[tile] = static_cast<std::uint8_t>(tile_rows);
      config.row_bytes[tile] = static_cast<std::uint16_t>(bytes);
    };
    const index_t first = rows < kSteps ? rows : kSteps, second = rows - first;
    for (const int tile : {0, 1}) shape(tile, first, amx::kTileBytes);
    for (const int tile : {2, 3}) shape(tile, second, amx::kTileBytes);
    for (const int tile : {4, 5}) shape(tile, first, 4 * steps);
    shape(6, steps, amx::kTileBytes);
    shape(7, second, 4 * steps);
    return config;
  }

  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void store16(bf16* to, __m256i elements) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), elements);
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
