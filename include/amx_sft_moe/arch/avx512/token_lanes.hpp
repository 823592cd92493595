// Products of gemm_nt with tokens along the lanes, with VDPBF16PS: C^T [out, tokens] = W [out, k] x panels of tokens
// (arch/operands.hpp). A pair of a row of W is broadcast from where it lies, so that W is neither transposed nor copied, and
// each of its lines comes into L1 once for up to 64 tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "amx_sft_moe/arch/avx512/vector.hpp"
#include "amx_sft_moe/arch/blocking.hpp"
#include "amx_sft_moe/arch/paced_prefetch.hpp"
#include "amx_sft_moe/arch/pages_ahead.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Accumulators of C [Rows, 16 Panels], of whose last panel Last columns: all 16, or 8 or 4, of which two or four rows share a
// vector. A product takes as long whatever its lanes are for.
template <int Rows, int Panels, int Last>
class LaneSums {
  static constexpr int kShared = kPanelCols / Last;  // rows of a vector of the last panel
  static constexpr int kWhole = kShared == 1 ? Panels : Panels - 1;
  static constexpr int kParts = kShared == 1 ? 0 : Rows / kShared;
  static_assert(kWhole > 0 && (kParts == 0 || Rows % kShared == 0));

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
      for (int r = 0; r < kShared; ++r) {
        const auto here = static_cast<__mmask16>(there & lanes_of(r));
        const __m512 row = _mm512_maskz_loadu_ps(here, shared_row(c, i, r));
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
      for (int r = 0; r < kShared; ++r) _mm512_mask_storeu_ps(shared_row(c, i, r), lanes_of(r), part_[i]);
    }
  }

  // += a pair of each row x a step of the panels.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void add(const bf16* a, index_t a_stride, const bf16* b,
                                                             index_t panel_stride) {
    __m512bh line[std::size_t{Panels}];
    AMX_SFT_MOE_UNROLL
    for (int p = 0; p < Panels; ++p) {
      line[p] = reinterpret_cast<__m512bh>(p < kWhole ? _mm512_loadu_si512(b + p * panel_stride)
                                                      : repeated(b + p * panel_stride));
    }
    AMX_SFT_MOE_UNROLL
    for (int first = 0; first < Rows; first += kShared) {
      __m512i pair[std::size_t{kShared}];
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < kShared; ++r) {
        std::int32_t bits;
        std::memcpy(&bits, a + (first + r) * a_stride, sizeof(bits));
        pair[r] = _mm512_set1_epi32(bits);
        AMX_SFT_MOE_HIDE_ORIGIN(pair[r]);  // GCC would load it once for each product
        AMX_SFT_MOE_UNROLL
        for (int p = 0; p < kWhole; ++p) {
          whole_[first + r][p] =
              _mm512_dpbf16_ps(whole_[first + r][p], line[p], reinterpret_cast<__m512bh>(pair[r]));
        }
      }
      if constexpr (kParts > 0) {
        const auto pairs = reinterpret_cast<__m512bh>(of_rows(pair));
        part_[first / kShared] = _mm512_dpbf16_ps(part_[first / kShared], line[kWhole], pairs);
      }
    }
  }

 private:
  // In a vector that rows share those of row r.
  static constexpr __mmask16 lanes_of(int r) {
    return static_cast<__mmask16>(((1U << Last) - 1U) << (r * Last));
  }
  // The row of C of lanes r of part i, so far back that it begins in those lanes.
  static float* shared_row(const SumRows& c, int i, int r) {
    return c.data + (i * kShared + r) * c.stride + kWhole * kPanelCols - r * Last;
  }
  // The first Last pairs of a step in each row's lanes.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static __m512i repeated(const bf16* b) {
    if constexpr (kShared == 2) {
      return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    } else {
      return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
    }
  }
  // Each row's pair in its lanes.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 static __m512i of_rows(const __m512i* pair) {
    const __m512i low = _mm512_mask_mov_epi32(pair[0], lanes_of(1), pair[1]);
    if constexpr (kShared == 2) {
      return low;
    } else {
      const __m512i high = _mm512_mask_mov_epi32(pair[2], lanes_of(3), pair[3]);
      return _mm512_mask_mov_epi32(low, static_cast<__mmask16>(lanes_of(2) | lanes_of(3)), high);
    }
  }

  __m512 whole_[std::size_t{Rows}][std::size_t{kWhole}];
  __m512 part_[std::size_t{kParts > 0 ? kParts : 1}];
};

// Tiles of 8 rows x up to 48 tokens, or 4 rows x 64: 24 accumulators at most. Of few tokens not more rows: those of a weight
// are 4 KiB apart or more, in one set of L1, which has 8 to 12 places (benchmarks/LOG.md, "Tokens along the lanes").
struct TokenLanes {
  static constexpr index_t kKUnit = kPairing<bf16>;
  // Of a block of C. 32 outputs of a token are a line of bf16; a task mostly has no more tokens (gemm/blocking.hpp:
  // kStripTokens, half as many again).
  static constexpr index_t kMaxRows = 32, kMaxCols = 192;

  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    return uniform_plan(rows, cols, kMaxRows, round_up(ceil_div(cols, ceil_div(cols, kMaxCols)), kPanelCols));
  }

  // C [rows, cols] += the sum of the segments, or = it where C is fresh; zeros where there are none.
  template <class Session>
  static void block(Session& /*session*/, int /*pattern*/, const Segments<bf16>& segments, index_t rows,
                    index_t cols, const SumRows& to) {
    SumRows c = to;
    for (int s = 0; s < segments.count; ++s) {
      const Segment<bf16>& segment = segments.at[s];
      // As much of x as meets a few rows of W stays in L2, whatever K is.
      const index_t most = kLanesBytes / (round_up(cols, kPanelCols) * index_t{sizeof(bf16)});
      const index_t depth = round_up(ceil_div(segment.k, ceil_div(segment.k, most)), kLine);
      for (index_t k = 0; k < segment.k; k += depth, c.fresh = false) {
        Segment<bf16> part = segment;
        part.a += k;
        part.b += k * kPanelCols;
        part.k = std::min(depth, segment.k - k);
        LeadingPrefetch ahead = ahead_of(segment, k, part.k, rows);
        multiply(part, rows, cols, c, ahead, pages_of(segment, k, part.k, rows));
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
    if (segment.rows_left == 0 || depth < kAheadDepth) return {BytesAhead{}, 0};
    const auto place = [&](index_t row, index_t step) {
      return reinterpret_cast<std::uintptr_t>(segment.a) +
             static_cast<std::uintptr_t>((row * segment.a_stride + step) * kSize);
    };
    std::uintptr_t later = segment.rows_left > rows ? place(rows, 0) : 0;
    if (k + depth < segment.k) later = place(0, k + depth);
    return {{place(0, k), later, segment.a_stride * kSize, rows, depth * kSize}, lead_of(depth)};
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

  // f(row, rows, panel, panels) for each tile of C: a few rows, which stay in L1 or L2, meet all panels. Tiles are as wide as one
  // another, the last ones by one panel wider, so that few columns of the last panel go along with others.
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

  static void multiply(const Segment<bf16>& part, index_t rows, index_t cols, const SumRows& c,
                       LeadingPrefetch ahead, PagesAhead pages) {
    const index_t panels = ceil_div(cols, kPanelCols);
    index_t tiles = 0;
    for_each_tile(rows, panels, [&](index_t, index_t, index_t, index_t) { ++tiles; });
    ahead.spread(tiles * ceil_div(part.k, kStepsATurn * kKUnit));
    const index_t lead = lead_of(part.k);
    for_each_tile(rows, panels, [&](index_t i, index_t height, index_t p, index_t wide) {
      if (p == 0) pages.before(i + lead);
      Segment<bf16> here = part;
      here.a += i * part.a_stride;
      here.b += p * part.panel_stride;
      const index_t last = std::min(cols - (p + wide - 1) * kPanelCols, kPanelCols);
      tile_of(height, wide, last)(here, c.from(i, p * kPanelCols), ahead);
    });
  }

  static constexpr index_t kStepsATurn = 4;

  // C [Rows, 16 Panels] += a segment's rows x its panels, of the last of which Last columns.
  template <int Rows, int Panels, int Last>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void tile(const Segment<bf16>& segment, const SumRows& c,
                                                  LeadingPrefetch& ahead) {
    LaneSums<Rows, Panels, Last> sums;
    sums.load(c);
    const bf16* const a = segment.a;
    const bf16* b = segment.b;
    const index_t a_stride = segment.a_stride, panel_stride = segment.panel_stride;
    for (index_t begin = 0; begin < segment.k; begin += kStepsATurn * kKUnit) {
      ahead.turn();
      const index_t end = std::min(begin + kStepsATurn * kKUnit, segment.k);
      for (index_t k = begin; k < end; k += kKUnit, b += kKUnit * kPanelCols) {
        sums.add(a + k, a_stride, b, panel_stride);
      }
    }
    sums.store(c);
  }

  using Tile = void (*)(const Segment<bf16>&, const SumRows&, LeadingPrefetch&);
  // Few columns of the last panel have tiles of their own where rows are as many as they mostly are.
  static Tile tile_of(index_t rows, index_t panels, index_t last) {
    if (panels > 1 && last <= 8 && rows == rows_of(panels)) {
      constexpr Tile kOf8[] = {&tile<kRows, 2, 8>, &tile<kRows, 3, 8>, &tile<kRowsOfFour, 4, 8>};
      constexpr Tile kOf4[] = {&tile<kRows, 2, 4>, &tile<kRows, 3, 4>, &tile<kRowsOfFour, 4, 4>};
      return (last <= 4 ? kOf4 : kOf8)[panels - 2];
    }
    return []<int... N>(index_t n, std::integer_sequence<int, N...>) {
      constexpr Tile kTiles[] = {&tile<N % kRows + 1, N / kRows + 1, 16>...};
      return kTiles[n];
    }((panels - 1) * kRows + rows - 1, std::make_integer_sequence<int, kMostPanels * kRows + kRowsOfFour>{});
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
