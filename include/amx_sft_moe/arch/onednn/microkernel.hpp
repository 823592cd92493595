// oneDNN's matmul as a microkernel: its blocks are large, and each segment of K is one call, the first of which
// overwrites C and the others add to it.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/onednn/matmul_cache.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// kPaired: B comes in pairs of panels (PairedAvx512Rows). Else in single panels, which become rows here.
template <class E, bool kPaired>
struct OneDnnMicrokernel {
  using Element = E;
  // K of oneDNN's blocked formats comes in cache lines.
  static constexpr index_t kKUnit = 64 / static_cast<index_t>(sizeof(E));
  // oneDNN 2 has fast code for dense rows only; others are copied first.
  static constexpr bool kDenseRows = true;

  class Session {
   public:
    explicit Session(KernelStateSlot& slot) : cache(slot.as<onednn::MatmulCache>()) {}
    onednn::MatmulCache& cache;
  };

  // As many rows as gemm_nt has in a task, or more; with 256 columns C is 128 KiB of L2. Calls take 1 us of
  // some 100 and more.
  static constexpr index_t kMaxRows = 128;
  static constexpr index_t kMaxCols = 256;
  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    return uniform_plan(rows, cols, kMaxRows, kMaxCols);
  }
  static constexpr index_t fitted_k_tile(index_t) { return kKUnit; }

  // C [rows, cols] = sum of the segments, see gemm/blocks.hpp.
  static void block(Session& session, int /*pattern*/, const Segments<E>& segments, index_t rows,
                    index_t /*cols*/, const SumRows& to) {
    float* c = to.data;
    const index_t c_stride = to.stride;
    if (segments.count == 0) return clear(c, rows * c_stride);
    if constexpr (!kPaired) {
      product(session, segments, 0, rows, c_stride, onednn::Layout::kRows, c);
    } else {
      const index_t single = c_stride % kPairCols;  // the columns of a panel without a neighbour
      const index_t paired = c_stride - single;
      if (single == 0) return product(session, segments, 0, rows, paired, onednn::Layout::kPairs, c);
      if (paired == 0) return product(session, segments, 0, rows, single, onednn::Layout::kPanel, c);
      // Two products, whose results have to be dense.
      float* left = session.cache.extra(rows * c_stride);
      float* right = left + rows * paired;
      product(session, segments, 0, rows, paired, onednn::Layout::kPairs, left);
      product(session, segments, paired / kPanelCols, rows, single, onednn::Layout::kPanel, right);
      for (index_t i = 0; i < rows; ++i) {
        std::memcpy(c + i * c_stride, left + i * paired, bytes_of(paired));
        std::memcpy(c + i * c_stride + paired, right + i * single, bytes_of(single));
      }
    }
  }

 private:
  static constexpr index_t kPairCols = 2 * kPanelCols;

  // C [rows, cols], dense, from the panels that start with number `panel`. Rows are cut into few sizes: each
  // would be compiled otherwise, and how many rows an expert gets changes with every batch.
  static void product(Session& session, const Segments<E>& segments, index_t panel, index_t rows, index_t cols,
                      onednn::Layout layout, float* c) {
    for (int s = 0; s < segments.count; ++s) {
      const Segment<E>& segment = segments.at[s];
      const E* b = segment.b + panel * segment.panel_stride;
      if constexpr (!kPaired) b = unpack(session, segment, cols);
      for (index_t row = 0; row < rows;) {
        const index_t here = piece(rows - row);
        session.cache.run({here, cols, segment.k, kDTypeOf<E>, layout, s > 0},
                          segment.a + row * segment.a_stride, b, c + row * cols);
        row += here;
      }
    }
  }

  static constexpr index_t piece(index_t rows) {
    for (const index_t size : {128, 96, 64, 32, 16, 8, 4, 2}) {
      if (rows >= size) return size;
    }
    return 1;
  }

  static void clear(float* c, index_t count) {
    for (index_t i = 0; i < count; ++i) c[i] = 0.0F;
  }
  static constexpr std::size_t bytes_of(index_t floats) {
    return static_cast<std::size_t>(floats) * sizeof(float);
  }

  // Panels as rows [k, cols].
  static const float* unpack(Session& session, const Segment<float>& segment, index_t cols) {
    float* rows = session.cache.extra(segment.k * cols);
    for (index_t k = 0; k < segment.k; ++k) {
      for (index_t col = 0; col < cols; col += kPanelCols) {
        std::memcpy(rows + k * cols + col, segment.b + col / kPanelCols * segment.panel_stride + k * kPanelCols,
                    kPanelCols * sizeof(float));
      }
    }
    return rows;
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
