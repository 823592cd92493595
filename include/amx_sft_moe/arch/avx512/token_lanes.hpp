// Products of gemm_nt with tokens along the lanes, with VDPBF16PS: C^T [out, tokens] = W [out, k] x panels of tokens
// (arch/operands.hpp). A pair of a row of W is broadcast from where it lies, so that W is neither transposed nor copied, and
// each of its lines comes into L1 once for up to 64 tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>

#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/of_this_cpu.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"
#include "amx_sft_moe/arch/pages_ahead.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Accumulators of C [Rows, 16 Panels], of whose last panel Last columns: all 16, or 12, 8 or 4, of which four or two rows
// stand one behind the other in three vectors or one. A product takes as long whatever its lanes are for.
template <int Rows, int Panels, int Last>
class LaneSums {
  static constexpr int kLanes = int{kPanelCols};
  static constexpr int kWhole = Last == kLanes ? Panels : Panels - 1;
  static constexpr int kTogether = kLanes / std::gcd(Last, kLanes);  // rows of the last panel
  static constexpr int kVectors = kTogether * Last / kLanes;         // for them
  static constexpr int kParts = kWhole == Panels ? 0 : Rows / kTogether * kVectors;
  static_assert(kWhole > 0 && (kWhole == Panels || Rows % kTogether == 0));

 public:
  // C, or zeros where it is fresh.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void load(const SumRows& c) {
    const __mmask16 there = lanes_there(c);
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < kWhole; ++p)
        whole_[r][p] = _mm512_maskz_loadu_ps(there, c.from(r, 0).data + p * kPanelCols);
    }
    AMX_SFT_MOE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      __m512i lanes = _mm512_setzero_si512();
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < kTogether; ++r) {
        const __mmask16 of_row = lanes_of(r, i % kVectors);
        if (of_row == 0) continue;
        const __m512 row = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there & of_row), shared_row(c, i, r));
        lanes = _mm512_or_si512(lanes, _mm512_castps_si512(row));
      }
      part_[i] = _mm512_castsi512_ps(lanes);
    }
  }
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void store(const SumRows& c) const {
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < kWhole; ++p) _mm512_storeu_ps(c.from(r, 0).data + p * kPanelCols, whole_[r][p]);
    }
    AMX_SFT_MOE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < kTogether; ++r) {
        const __mmask16 of_row = lanes_of(r, i % kVectors);
        if (of_row != 0) _mm512_mask_storeu_ps(shared_row(c, i, r), of_row, part_[i]);
      }
    }
  }

  // += another chain's.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void add(const LaneSums& other) {
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < kWhole; ++p) whole_[r][p] = _mm512_add_ps(whole_[r][p], other.whole_[r][p]);
    }
    AMX_SFT_MOE_UNROLL
    for (int i = 0; i < kParts; ++i) part_[i] = _mm512_add_ps(part_[i], other.part_[i]);
  }

  // += a pair of each row x a step of the panels.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void add(const bf16* a, index_t a_stride, const bf16* b,
                                                             index_t panel_stride) {
    __m512bh line[std::size_t{kWhole}];
    AMX_SFT_MOE_UNROLL
    for (int p = 0; p < kWhole; ++p)
      line[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + p * panel_stride));
    __m512i last[std::size_t{kVectors}];
    if constexpr (kParts > 0) load_last(last, b + kWhole * panel_stride);
    AMX_SFT_MOE_UNROLL
    for (int first = 0; first < Rows; first += kTogether) {
      __m512i shared[std::size_t{kVectors}];  // each row's pair in its lanes
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < kTogether; ++r) {
        std::int32_t bits;
        std::memcpy(&bits, a + (first + r) * a_stride, sizeof(bits));
        __m512i pair = _mm512_set1_epi32(bits);
        AMX_SFT_MOE_HIDE_ORIGIN(pair);  // GCC would load it once for each product
        AMX_SFT_MOE_UNROLL
        for (int p = 0; p < kWhole; ++p) {
          whole_[first + r][p] =
              _mm512_dpbf16_ps(whole_[first + r][p], line[p], reinterpret_cast<__m512bh>(pair));
        }
        if constexpr (kParts > 0) {
          AMX_SFT_MOE_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            const __mmask16 of_row = lanes_of(r, v);
            if (of_row == 0) continue;
            shared[v] = of_row & 1 ? pair : _mm512_mask_mov_epi32(shared[v], of_row, pair);
          }
        }
      }
      if constexpr (kParts > 0) {
        AMX_SFT_MOE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          __m512& sum = part_[first / kTogether * kVectors + v];
          sum =
              _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(last[v]), reinterpret_cast<__m512bh>(shared[v]));
        }
      }
    }
  }

 private:
  // Of vector v those of row r.
  static constexpr __mmask16 lanes_of(int r, int v) {
    const int begin = std::max(r * Last - v * kLanes, 0), end = std::min((r + 1) * Last - v * kLanes, kLanes);
    return begin < end ? static_cast<__mmask16>((1U << end) - (1U << begin)) : __mmask16{0};
  }
  // The row of C of lanes r of part i, so far back that it begins in those lanes.
  static float* shared_row(const SumRows& c, int i, int r) {
    const int row = i / kVectors * kTogether + r, v = i % kVectors;
    return c.data + row * c.stride + kWhole * kPanelCols + v * kLanes - r * Last;
  }
  // The first Last pairs of a step in each row's lanes.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static void load_last(
      __m512i (&last)[std::size_t{kVectors}], const bf16* b) {
    if constexpr (Last == 4) {
      last[0] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
    } else if constexpr (Last == 8) {
      last[0] = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    } else {
      static_assert(Last == 12);
      const __m512i line = _mm512_loadu_si512(b);
      last[0] = _mm512_shuffle_i32x4(line, line, _MM_SHUFFLE(0, 2, 1, 0));
      last[1] = _mm512_shuffle_i32x4(line, line, _MM_SHUFFLE(1, 0, 2, 1));
      last[2] = _mm512_shuffle_i32x4(line, line, _MM_SHUFFLE(2, 1, 0, 2));
#if defined(__clang__) && __clang_major__ < 19  // clang 16 crashes where it sees a shuffle turn into bf16
      for (__m512i& pairs : last) AMX_SFT_MOE_HIDE_ORIGIN(pairs);
#endif
    }
  }

  __m512 whole_[std::size_t{Rows}][std::size_t{kWhole}];
  __m512 part_[std::size_t{kParts > 0 ? kParts : 1}];
};

// Tiles of 8 rows x up to 48 tokens, or 4 rows x 64: 24 accumulators, 28 for few tokens of the last rows of all. Of few tokens not
// more rows: those of a weight are 4 KiB apart or more, in one set of L1, which has 8 to 12 places (benchmarks/LOG.md, "Tokens
// along the lanes").
struct TokenLanes {
  static constexpr index_t kKUnit = kPairing<bf16>;
  // Of a block of C. 32 outputs of a token are a line of bf16; a task mostly has no more tokens (gemm/blocking.hpp:
  // kStripTokens, half as many again).
  static constexpr index_t kMaxRows = 32, kMaxCols = 192;

  // Whether sums of an expert with so many tokens are two chains, of even and of odd steps: tiles of one panel, or of one and half
  // of another, have too few accumulators for one, in which each product waits for the one before (benchmarks/LOG.md, "Two
  // chains"). Not a task's tokens: each of them must choose alike.
  static constexpr bool two_chains(index_t all_tokens) { return all_tokens <= kPanelCols + kPanelCols / 2; }

  // A block's pattern is how many chains its sums are.
  static constexpr BlockPlan plan(index_t rows, index_t cols, int chains) {
    const index_t wide = round_up(ceil_div(cols, ceil_div(cols, kMaxCols)), kPanelCols);
    BlockPlan plan;
    plan.add({0, rows, kMaxRows, 0, cols, wide, chains});
    return plan;
  }

  // C [rows, cols] += the sum of the segments, or = it where C is fresh; zeros where there are none. Few steps along K, such as
  // LoRA's, go with the segment before them: C would pass through registers for them alone.
  template <class Session>
  static void block(Session& /*session*/, int chains, const Segments<bf16>& segments, index_t rows,
                    index_t cols, const SumRows& to) {
    SumRows c = to;
    for (int s = 0, next = 0; s < segments.count; s = next) {
      for (next = s + 1; next < segments.count && segments.at[next].k < kAheadDepth;) ++next;
      const Segment<bf16>& segment = segments.at[s];
      // As much of x as meets a few rows of W stays in L2, whatever K is.
      const index_t most = kLanesBytes / (round_up(cols, kPanelCols) * index_t{sizeof(bf16)});
      const index_t depth = round_up(ceil_div(segment.k, ceil_div(segment.k, most)), kLine);
      for (index_t k = 0; k < segment.k; k += depth, c.fresh = false) {
        Segments<bf16> together;
        together.add(segment.steps(k, std::min(depth, segment.k - k)));
        if (k + depth >= segment.k) {
          for (int few = s + 1; few < next; ++few) together.add(segments.at[few]);
        }
        const index_t here = together.at[0].k;
        multiply(together, rows, cols, c, chains, ahead_of(segment, k, here, rows),
                 pages_of(segment, k, here, rows));
      }
    }
    if (!c.fresh) return;
    for (index_t r = 0; r < rows; ++r) std::fill_n(c.data + r * c.stride, round_up(cols, kPanelCols), 0.0F);
  }

 private:
  // Asks memory for the rows of steps [k, k + depth), in order, those that are read next and a bit ahead; behind the last
  // for the steps that follow, or else for the rows that do.
  static LeadingPrefetch ahead_of(const Segment<bf16>& segment, index_t k, index_t depth, index_t rows) {
    constexpr index_t kSize = sizeof(bf16);
    if (segment.rows_left == 0 || depth < kAheadDepth) return {BytesAhead{}, 0, AskedInto::kL2};
    const auto place = [&](index_t row, index_t step) {
      return reinterpret_cast<std::uintptr_t>(segment.a) +
             static_cast<std::uintptr_t>((row * segment.a_stride + step) * kSize);
    };
    std::uintptr_t later = segment.rows_left > rows ? place(rows, 0) : 0;
    if (k + depth < segment.k) later = place(0, k + depth);
    return {
        {place(0, k), later, segment.a_stride * kSize, rows, depth * kSize}, lead_of(depth), rows_asked_into()};
  }
  static constexpr index_t lead_of(index_t depth) {
    return kRows + ceil_div(kFarBytes, depth * index_t{sizeof(bf16)});
  }
  // Their pages, up to the row that is asked for last: the next block's begin there.
  static PagesAhead pages_of(const Segment<bf16>& segment, index_t k, index_t depth, index_t rows) {
    constexpr index_t kSize = sizeof(bf16);
    const bool last = k + depth >= segment.k;
    const index_t most = last ? rows + lead_of(depth) : rows;
    const index_t there = depth < kAheadDepth ? 0 : std::min(segment.rows_left, most);
    const auto first = reinterpret_cast<std::uintptr_t>(segment.a) + static_cast<std::uintptr_t>(k * kSize);
    return {{first, segment.a_stride * kSize, there, depth * kSize}, kRows};
  }

  static constexpr int kRows = 8, kMostPanels = 3;
  // Four panels would be two tiles of two, which leave half of the accumulators idle.
  static constexpr int kRowsOfFour = 4;
  static constexpr index_t rows_of(index_t panels) { return panels <= kMostPanels ? kRows : kRowsOfFour; }

  // f(row, rows, panel, panels) for each tile of C: a few rows, which stay in L1 or L2, meet all panels. Tiles are as wide as
  // one another, the last ones by one panel wider, so that few columns of the last panel go along with others.
  template <class F>
  static void for_each_tile(index_t rows, index_t panels, F&& f) {
    for_each_part(rows, kRows, [&](index_t first, index_t group) {
      index_t p = 0;
      for (index_t left = panels == 4 ? 1 : ceil_div(panels, index_t{kMostPanels}); left > 0; --left) {
        const index_t wide = (panels - p) / left;
        for_each_part(group, rows_of(wide), [&](index_t i, index_t height) { f(first + i, height, p, wide); });
        p += wide;
      }
    });
  }

  static void multiply(const Segments<bf16>& together, index_t rows, index_t cols, const SumRows& c, int chains,
                       LeadingPrefetch ahead, PagesAhead pages) {
    const index_t panels = ceil_div(cols, kPanelCols);
    index_t tiles = 0, turns = 0;
    for_each_tile(rows, panels, [&](index_t, index_t, index_t, index_t) { ++tiles; });
    for (int s = 0; s < together.count; ++s) turns += ceil_div(together.at[s].k, kStepsATurn * kKUnit);
    ahead.spread(tiles * turns);
    const index_t lead = lead_of(together.at[0].k);
    for_each_tile(rows, panels, [&](index_t i, index_t height, index_t p, index_t wide) {
      if (p == 0) pages.before(i + lead);
      const index_t last = std::min(cols - (p + wide - 1) * kPanelCols, kPanelCols);
      tile_of(height, wide, last, chains)(together, i, p, c.from(i, p * kPanelCols), ahead);
    });
  }

  // An even number, for chains to take turns. With 4 a product of two chains had 0.9 of the rate.
  static constexpr index_t kStepsATurn = 8;

  // C [Rows, 16 Panels] += rows from i on x panels from p on, of the last of which Last columns, of all segments.
  template <int Rows, int Panels, int Last, int Chains = 1>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void tile(const Segments<bf16>& together, index_t i, index_t p,
                                                  const SumRows& c, LeadingPrefetch& ahead) {
    LaneSums<Rows, Panels, Last> sums, odd{};
    sums.load(c);
    for (int s = 0; s < together.count; ++s) {
      const Segment<bf16>& segment = together.at[s];
      const index_t a_stride = segment.a_stride, panel_stride = segment.panel_stride;
      const bf16* a = segment.a + i * a_stride;
      const bf16* const a_end = a + segment.k;
      const bf16* b = segment.b + p * panel_stride;
      const auto step = [&](LaneSums<Rows, Panels, Last> & to) AMX_SFT_MOE_TARGET_AVX512_BF16
          __attribute__((always_inline)) {
        AMX_SFT_MOE_HIDE_ADDRESS(a);
        to.add(a, a_stride, b, panel_stride);
        a += kKUnit;
        b += kKUnit * kPanelCols;
      };
      while (a < a_end) {
        ahead.turn();
        const bf16* const end = std::min(a + kStepsATurn * kKUnit, a_end);
        if constexpr (Chains == 2) {
          while (a + kKUnit < end) {
            step(sums);
            step(odd);
          }
        }
        while (a < end) step(sums);
      }
    }
    if constexpr (Chains == 2) sums.add(odd);
    sums.store(c);
  }

  using Tile = void (*)(const Segments<bf16>&, index_t, index_t, const SumRows&, LeadingPrefetch&);
  static Tile tile_of(index_t rows, index_t panels, index_t last, int chains) {
    return chains == 2 ? tile_of_two_chains(rows, panels, last) : tile_of_one_chain(rows, panels, last);
  }
  // Few columns of the last panel have tiles of their own where rows are as many as they mostly are.
  static Tile tile_of_one_chain(index_t rows, index_t panels, index_t last) {
    if (panels > 1 && last <= 12 && rows == rows_of(panels)) {
      constexpr Tile kFew[][3] = {{&tile<kRows, 2, 4>, &tile<kRows, 3, 4>, &tile<kRowsOfFour, 4, 4>},
                                  {&tile<kRows, 2, 8>, &tile<kRows, 3, 8>, &tile<kRowsOfFour, 4, 8>},
                                  {&tile<kRows, 2, 12>, &tile<kRows, 3, 12>, &tile<kRowsOfFour, 4, 12>}};
      return kFew[(last - 1) / 4][panels - 2];
    }
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Tile kTiles[] = {&tile<N % kRows + 1, N / kRows + 1, 16>...};
      return kTiles[n];
    }((panels - 1) * kRows + rows - 1, std::make_integer_sequence<int, kMostPanels * kRows + kRowsOfFour>{});
  }
  // Of the tokens of two_chains(), so that a second panel has no more than half of its columns.
  static Tile tile_of_two_chains(index_t rows, index_t panels, index_t last) {
    if (panels == 2 && rows == kRows) return last <= 4 ? &tile<kRows, 2, 4, 2> : &tile<kRows, 2, 8, 2>;
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Tile kTiles[] = {&tile<N % kRows + 1, N / kRows + 1, 16, 2>...};
      return kTiles[n];
    }((panels - 1) * kRows + rows - 1, std::make_integer_sequence<int, 2 * kRows - 1>{});
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
