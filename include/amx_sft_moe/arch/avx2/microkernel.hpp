// The fp32 microkernels of AVX2. The register tile: broadcast an element of A's row, fused multiply-add with a
// step of packed B. For few rows of A, the same with B as it lies and C in L1.
#pragma once

#include "amx_sft_moe/arch/avx2/vector.hpp"
#include "amx_sft_moe/arch/register_tiles.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

// 6 rows x 16 columns: 12 accumulators, 2 registers of B, 1 broadcast of the 16 ymm. Latency times rate is 10
// on Haswell, 8 since. 12 FMA ask for 8 loads, of which every CPU does two a cycle: 4 of the 6 cycles. 4 x 24
// would ask for 7, but panels are 16 wide. 48 rows are eight tiles and whole 8 x 8 transpositions of the
// result; C stays in L1.
// 8 x 8 for at most 8 columns (tokens of gemm_nt): half the arithmetic. 12 x 8 was no faster: twelve row
// pointers do not fit the general registers. Blocks of 8 rows: what is staged of them is 64 KiB at K = 2048.
struct Avx2Microkernel : RegisterTiles<Avx2Microkernel, float, 6, kPanelCols, 48, 8, 8> {
  template <int Rows, int Cols>
  AMX_SFT_MOE_TARGET_AVX2 static void tile(const Segments<float>& segments, index_t i, index_t j, float* c,
                                           index_t c_stride) {
    constexpr int kVectors = Cols / 8;
    constexpr index_t kChunk = 32;  // steps between two prefetches of a row: a line of bf16
    __m256 sum[std::size_t{Rows}][std::size_t{kVectors}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_setzero_ps();
    }
    for (int s = 0; s < segments.count; ++s) {
      const Segment<float>& segment = segments.at[s];
      const float* a = segment.a + i * segment.a_stride;
      const float* b = segment.b + j / kPanelCols * segment.panel_stride + j % kPanelCols;
      for (index_t k = 0; k < segment.k;) {
        const index_t stop = k + kChunk < segment.k ? k + kChunk : segment.k;
        if (s == 0) segments.ahead.prefetch(i, Rows, k, stop);
        for (; k < stop; ++k, b += kPanelCols) {
          __m256 line[std::size_t{kVectors}];
          AMX_SFT_MOE_UNROLL
          for (int v = 0; v < kVectors; ++v) line[v] = _mm256_loadu_ps(b + 8 * v);
          AMX_SFT_MOE_UNROLL
          for (int r = 0; r < Rows; ++r) {
            const __m256 value = _mm256_set1_ps(a[r * segment.a_stride + k]);
            AMX_SFT_MOE_UNROLL
            for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_fmadd_ps(value, line[v], sum[r][v]);
          }
        }
      }
    }
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(c + r * c_stride + 8 * v, sum[r][v]);
    }
  }

  // C [rows, cols] += A [rows, k] x B [k, cols], B as it lies with its columns adjacent; C, in L1, has room for
  // whole panels.
  // Four of B's rows meet in C's registers, 16 columns wide: 8 registers of B, 2 of C, 1 broadcast.
  static constexpr int kInPlaceRows = 8;
  template <class S>
  static void multiply_in_place(const float* a, index_t a_stride, index_t rows, const RowSource<S>& b,
                                index_t k, index_t cols, float* c, index_t c_stride) {
    in_place_of<S>(rows)(a, a_stride, b, k, cols, c, c_stride);
  }

 private:
  template <class S>
  using InPlace = void (*)(const float*, index_t, const RowSource<S>&, index_t, index_t, float*, index_t);
  template <class S>
  static InPlace<S> in_place_of(index_t rows) {
    return []<int... Less>(index_t n, std::integer_sequence<int, Less...>) {
      constexpr InPlace<S> kOf[] = {&in_place<Less + 1, S>...};
      return kOf[n - 1];
    }(rows, std::make_integer_sequence<int, kInPlaceRows>{});
  }

  template <int Rows, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void in_place(const float* a, index_t a_stride, const RowSource<S>& b,
                                               index_t k, index_t cols, float* c, index_t c_stride) {
    constexpr int kDepth = 4;
    constexpr index_t kAhead = 16;  // rows of B; 8 was 0.70 instead of 0.74 of the bandwidth for 8 rows of A
    index_t kk = 0;
    for (; kk + kDepth <= k; kk += kDepth) {
      const S* row[std::size_t{kDepth}];
      const S* ahead[std::size_t{kDepth}];
      float value[std::size_t{Rows}][std::size_t{kDepth}];
      AMX_SFT_MOE_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        row[d] = b.row(kk + d);
        ahead[d] = kk + kAhead + d < k ? b.row(kk + kAhead + d) : row[d];
      }
      AMX_SFT_MOE_UNROLL
      for (int r = 0; r < Rows; ++r) _mm_storeu_ps(value[r], _mm_loadu_ps(a + r * a_stride + kk));
      steps(value, row, ahead, cols, c, c_stride);
    }
    for (; kk < k; ++kk) {
      const S* row[1] = {b.row(kk)};
      float value[std::size_t{Rows}][1];
      for (int r = 0; r < Rows; ++r) value[r][0] = a[r * a_stride + kk];
      steps(value, row, row, cols, c, c_stride);
    }
  }

  // Depth steps along K.
  template <std::size_t Rows, std::size_t Depth, class S>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 static void steps(const float (&a)[Rows][Depth],
                                                               const S* const (&b)[Depth],
                                                               const S* const (&ahead)[Depth], index_t cols,
                                                               float* c, index_t c_stride) {
    index_t j = 0;
    for (; j + 16 <= cols; j += 16) {
      __m256 line[Depth][2];
      AMX_SFT_MOE_UNROLL
      for (std::size_t d = 0; d < Depth; ++d) {
        line[d][0] = avx2::load8(b[d] + j);
        line[d][1] = avx2::load8(b[d] + j + 8);
        // Here, not row by row before the loop: a burst fills the line fill buffers and all loads wait.
        _mm_prefetch(reinterpret_cast<const char*>(ahead[d] + j), _MM_HINT_T0);
      }
      float* to = c + j;
      AMX_SFT_MOE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r, to += c_stride) {
        __m256 low = _mm256_loadu_ps(to);
        __m256 high = _mm256_loadu_ps(to + 8);
        AMX_SFT_MOE_UNROLL
        for (std::size_t d = 0; d < Depth; ++d) {
          const __m256 value = _mm256_set1_ps(a[r][d]);
          low = _mm256_fmadd_ps(value, line[d][0], low);
          high = _mm256_fmadd_ps(value, line[d][1], high);
        }
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
      }
    }
    for (; j < cols; j += 8) {  // C's rows have room for whole panels
      for (std::size_t d = 0; d < Depth; ++d) {
        const __m256 line = avx2::load8(b[d] + j, cols - j);
        for (std::size_t r = 0; r < Rows; ++r) {
          float* to = c + static_cast<index_t>(r) * c_stride + j;
          const __m256 value = _mm256_set1_ps(a[r][d]);
          _mm256_storeu_ps(to, _mm256_fmadd_ps(value, line, _mm256_loadu_ps(to)));
        }
      }
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
