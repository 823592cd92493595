// Row operations with AVX2: what a kernel of strips needs of PortableRows, with the same meaning; its functions serve
// whatever has no adjacent columns.
#pragma once

#include "amx_sft_moe/arch/avx2/vector.hpp"
#include "amx_sft_moe/arch/portable/rows.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct Avx2Rows {
  template <class E, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void stage(const RowSource<S>& src, index_t rows, index_t k, index_t k_padded,
                                            E* dst, index_t dst_stride) {
    if (src.col_stride != 1) return PortableRows::stage(src, rows, k, k_padded, dst, dst_stride);
    for (index_t i = 0; i < rows; ++i) {
      const S* row = src.row(i);
      E* out = dst + i * dst_stride;
      index_t kk = 0;
      for (; kk + 16 <= k; kk += 16) {
        avx2::store8(out + kk, avx2::load8(row + kk));
        avx2::store8(out + kk + 8, avx2::load8(row + kk + 8));
      }
      for (; kk < k_padded; kk += 8) avx2::store8(out + kk, k_padded - kk, avx2::load8(row + kk, k - kk));
    }
  }

  template <class E, class S>
  AMX_SFT_MOE_TARGET_AVX2 static void stage_transposed(const RowSource<S>& src, index_t rows, index_t k,
                                                       index_t k_padded, const float* weights, E* dst,
                                                       index_t dst_stride) {
    // Two blocks of 8 x 8 make whole cache lines of dst: its rows may be any number of KiB apart, all in one set of L1.
    for (index_t line = 0; line < k_padded; line += 16) {
      const index_t end = line + 16 < k_padded ? line + 16 : k_padded;
      for (index_t i = 0; i < rows; i += 8) {
        for (index_t kk = line; kk < end; kk += 8) {
          __m256 r[8];
          AMX_SFT_MOE_UNROLL
          for (int t = 0; t < 8; ++t) {
            r[t] = _mm256_setzero_ps();
            if (kk + t >= k) continue;
            const __m256 weight = _mm256_set1_ps(weights == nullptr ? 1.0F : weights[kk + t]);
            r[t] = _mm256_mul_ps(avx2::load8(src.row(kk + t) + i, rows - i), weight);
          }
          avx2::transpose_8x8(r);
          AMX_SFT_MOE_UNROLL
          for (int t = 0; t < 8; ++t) {
            if (i + t < rows) avx2::store8(dst + (i + t) * dst_stride + kk, k_padded - kk, r[t]);
          }
        }
      }
    }
  }

  template <class T>
  static void store(const float* c, index_t c_stride, index_t rows, index_t cols, const BlockTarget<T>& to) {
    if (to.col_stride == 1) return store_rows(c, c_stride, rows, cols, to);
    if (to.row_stride == 1) return store_columns(c, c_stride, rows, cols, to);
    PortableRows::store(c, c_stride, rows, cols, to);
  }

  template <class T>
  AMX_SFT_MOE_TARGET_AVX2 static void sum_rows(const float* rows, index_t row_stride, const std::int32_t* index,
                                               index_t slots, index_t cols, T* out) {
    for (index_t c = 0; c < cols; c += 32) {  // a row's two cache lines at a time
      __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
      const index_t left = cols - c;
      for (index_t slot = 0; slot < slots; ++slot) {
        if (index[slot] < 0) continue;
        const float* row = rows + index[slot] * row_stride + c;
        AMX_SFT_MOE_UNROLL
        for (int i = 0; i < 4; ++i) sum[i] = _mm256_add_ps(sum[i], avx2::load8(row + 8 * i, left - 8 * i));
      }
      AMX_SFT_MOE_UNROLL
      for (int i = 0; i < 4; ++i) avx2::store8(out + c + 8 * i, left - 8 * i, sum[i]);
    }
  }

 private:
  // Columns adjacent in the target.
  template <class T>
  AMX_SFT_MOE_TARGET_AVX2 static void store_rows(const float* c, index_t c_stride, index_t rows, index_t cols,
                                                 const BlockTarget<T>& to) {
    const __m256 scale = _mm256_set1_ps(to.scale);
    // Sixteen bf16 are one store: what waits for memory in the store buffer is twice as much of it.
    const index_t together = to.col_scale == nullptr ? cols / 16 * 16 : 0;
    for (index_t i = 0; i < rows; ++i) {  // row by row: at one column rows may all be in one set of L1
      const float* from = c + i * c_stride;
      T* out = to.data + i * to.row_stride;
      index_t j = 0;
      for (; j < together; j += 16) {
        const __m256 low = avx2::load8(from + j), high = avx2::load8(from + j + 8);
        if (to.accumulate) {
          avx2::store16(out + j, _mm256_fmadd_ps(low, scale, avx2::load8(out + j)),
                        _mm256_fmadd_ps(high, scale, avx2::load8(out + j + 8)));
        } else {
          avx2::store16(out + j, _mm256_mul_ps(low, scale), _mm256_mul_ps(high, scale));
        }
      }
      for (; j < cols; j += 8) {
        const index_t lanes = cols - j;
        const __m256 factor =
            to.col_scale == nullptr ? scale : _mm256_mul_ps(scale, avx2::load8(to.col_scale + j, lanes));
        const __m256 value = avx2::load8(from + j, lanes);
        avx2::store8(out + j, lanes,
                     to.accumulate ? _mm256_fmadd_ps(value, factor, avx2::load8(out + j, lanes))
                                   : _mm256_mul_ps(value, factor));
      }
    }
  }

  // Rows adjacent in the target: 8 x 8 at a time through registers.
  template <class T>
  AMX_SFT_MOE_TARGET_AVX2 static void store_columns(const float* c, index_t c_stride, index_t rows,
                                                    index_t cols, const BlockTarget<T>& to) {
    for (index_t i = 0; i < rows; i += 8) {
      const index_t lanes = rows - i;
      for (index_t j = 0; j < cols; j += 8) {
        __m256 r[8];
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < 8; ++t) {
          r[t] = t < lanes ? avx2::load8(c + (i + t) * c_stride + j, cols - j) : _mm256_setzero_ps();
        }
        avx2::transpose_8x8(r);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < 8; ++t) {
          if (j + t >= cols) break;
          T* out = to.data + (j + t) * to.col_stride + i;
          const __m256 factor =
              _mm256_set1_ps(to.col_scale == nullptr ? to.scale : to.scale * to.col_scale[j + t]);
          avx2::store8(out, lanes,
                       to.accumulate ? _mm256_fmadd_ps(r[t], factor, avx2::load8(out, lanes))
                                     : _mm256_mul_ps(r[t], factor));
        }
      }
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
