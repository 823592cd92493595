// oneDNN's matmul as a microkernel: its blocks are large, and each segment of K is one call, the first of which
// overwrites C and the others add to it.
#pragma once

#include <cstring>

#include "amx_sft_moe/arch/onednn/matmul_cache.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

template <class E, onednn::Layout kLayout>
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

  // As many rows as gemm_nt has in a task, or more; with 256 columns C is 128 KiB of L2. Calls take 1 us of some
  // 100 and more.
  static constexpr index_t kMaxRows = 128;
  static constexpr index_t kMaxCols = 256;
  static constexpr BlockPlan plan(index_t rows, index_t cols) {
    return uniform_plan(rows, cols, kMaxRows, kMaxCols);
  }
  static constexpr index_t fitted_k_tile(index_t) { return kKUnit; }

  // See PortableMicrokernel::block. Rows are cut into few sizes: each would be compiled otherwise, and how many
  // rows an expert gets changes with every batch.
  static void block(Session& session, int /*pattern*/, const Segments<E>& segments, index_t rows, index_t cols,
                    float* c, index_t c_stride) {
    if (segments.count == 0) return clear(c, rows, c_stride);
    for (int s = 0; s < segments.count; ++s) {
      const Segment<E>& segment = segments.at[s];
      const void* b = segment.b;
      if constexpr (kLayout == onednn::Layout::kRows) b = unpack(session, segment, c_stride);
      for (index_t row = 0; row < rows;) {
        const index_t here = piece(rows - row);
        const onednn::Shape shape{here, c_stride, segment.k, kDTypeOf<E>, kLayout, s > 0};
        session.cache.run(shape, segment.a + row * segment.a_stride, b, c + row * c_stride);
        row += here;
      }
    }
    (void)cols;  // whole panels: c_stride is cols rounded up to them
  }

 private:
  static constexpr index_t piece(index_t rows) {
    for (const index_t size : {128, 96, 64, 32, 16, 8, 4, 2}) {
      if (rows >= size) return size;
    }
    return 1;
  }

  static void clear(float* c, index_t rows, index_t c_stride) {
    for (index_t i = 0; i < rows * c_stride; ++i) c[i] = 0.0F;
  }

  // Panels as rows [k, cols].
  static const float* unpack(Session& session, const Segment<float>& segment, index_t cols) {
    float* rows = session.cache.unpacked(segment.k * cols);
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
