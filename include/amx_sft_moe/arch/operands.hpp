// The operand formats of microkernels. C[M, N] += A[M, K] x B[K, N]: A is read row by row, its K adjacent. For kernels
// of strips B is cut as arch/strips.hpp says; for kernels of tiles, and tokens along the lanes, it comes packed in panels of 16
// columns:
//
//     panel p, bf16:  [K / 2][16 columns][2]     pairs along K, as VDPBF16PS and TDPBF16PS want them (VNNI)
//     panel p, float: [K][16 columns]
//
// A step along K is one cache line for every type, so a panel suits a tile load, a zmm or four xmm alike.
#pragma once

#include <cstdint>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

inline constexpr index_t kPanelCols = 16;

// Elements along K that stand together in a panel: 4 bytes' worth.
template <class E>
inline constexpr index_t kPairing = 4 / static_cast<index_t>(sizeof(E));

// Rows of a matrix in memory. Row i is at data + (row_index ? row_index[i] : i) * row_stride.
template <class S>
struct RowSource {
  const S* data = nullptr;
  index_t row_stride = 0;
  index_t col_stride = 1;
  const std::int32_t* row_index = nullptr;

  const S* row(index_t i) const { return data + (row_index != nullptr ? row_index[i] : i) * row_stride; }
  RowSource from_column(index_t c) const { return {data + c * col_stride, row_stride, col_stride, row_index}; }
  RowSource from_row(index_t r) const {
    if (row_index != nullptr) return {data, row_stride, col_stride, row_index + r};
    return {data + r * row_stride, row_stride, col_stride, nullptr};
  }
};

// Rows of C in a cache to which products are added, fp32, `stride` floats apart, each with room for whole strips.
struct SumRows {
  float* data = nullptr;
  index_t stride = 0;
  bool fresh = false;  // nothing is there yet: products are stored instead, and the rows need no clearing

  SumRows from(index_t row, index_t col) const { return {data + row * stride + col, stride, fresh}; }
  SumRows after(index_t products) const { return {data, stride, fresh && products == 0}; }
};

// Where a block of C goes: element [i, j] to data[i * row_stride + j * col_stride].
template <class T>
struct BlockTarget {
  T* data = nullptr;
  index_t row_stride = 0;
  index_t col_stride = 1;
  bool accumulate = false;           // add to what is there
  float scale = 1.0F;                // times C
  const float* col_scale = nullptr;  // times C's column j, where not null
  bool past_caches = false;          // of whole lines: these are neither read first nor kept
};

// Rows of a caller's to which register tiles of C go at once, whole: element [i, j] to data[i * row_stride + j].
template <class T>
struct FinishedRows {
  T* data = nullptr;
  index_t row_stride = 0;
  bool accumulate = false;   // add to what is there
  float scale = 1.0F;        // times C
  bool past_caches = false;  // of whole lines: these are neither read first nor kept

  FinishedRows from(index_t row, index_t col) const {
    return {data + row * row_stride + col, row_stride, accumulate, scale, past_caches};
  }
};

// One contraction of several that end in the same accumulators: C += A[M, k] x B[k, N].
template <class E>
struct Segment {
  const E* a = nullptr;  // row m at a + m * a_stride
  index_t a_stride = 0;
  const E* b = nullptr;  // panel p at b + p * panel_stride
  index_t panel_stride = 0;
  index_t k = 0;  // a multiple of the kernel's K unit; A and B hold zeros where data ended earlier
  // Of A where it lies, from this block's first to the last that will be read; 0: a copy.
  index_t rows_left = 0;

  // Steps [first, first + count) of K alone.
  Segment steps(index_t first, index_t count) const {
    return {a + first, a_stride, b + first * kPanelCols, panel_stride, count, rows_left};
  }
};

// Rows of A that a later block has, whose memory is asked for while this one is multiplied.
template <class E>
struct NextRows {
  const E* from = nullptr;
  index_t stride = 0, rows = 0;
};

// Base product and LoRA, for gate and up, each perhaps with a staged tail of K.
inline constexpr int kMaxSegments = 8;

template <class E>
struct Segments {
  Segment<E> at[kMaxSegments];
  int count = 0;
  index_t k_tile = 0;  // AMX: the step along K, of which every segment's k is a multiple
  NextRows<E> ahead;   // AMX, strips of rows: at each step of the first segment a line of each is asked for

  void add(const Segment<E>& segment) {
    if (segment.k > 0) at[count++] = segment;
  }
  // B without its first columns, whole panels. In place: copies of all this cost a seventh of a block of tiles.
  void skip_columns(index_t cols) {
    for (int s = 0; s < count; ++s) at[s].b += cols / kPanelCols * at[s].panel_stride;
  }
};

// How a kernel wants C [M, N] cut: at most four rectangles, each in blocks of one shape, rows outermost.
struct BlockClass {
  index_t row_begin = 0, row_end = 0, row_step = 1;
  index_t col_begin = 0, col_end = 0, col_step = 1;
  int pattern = 0;  // the kernel's own
};
struct BlockPlan {
  BlockClass classes[4];
  int count = 0;

  constexpr void add(const BlockClass& c) {
    if (c.row_begin < c.row_end && c.col_begin < c.col_end) classes[count++] = c;
  }
};

// A plan of one class, for kernels whose microkernels handle any remainder.
constexpr BlockPlan uniform_plan(index_t rows, index_t cols, index_t row_step, index_t col_step) {
  BlockPlan plan;
  plan.add({0, rows, row_step, 0, cols, col_step, 0});
  return plan;
}

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
