// Row operations with AVX512 (F, BW, DQ, VL): the same interface and the same meaning as PortableRows, whose
// functions serve whatever has no adjacent columns; and pack_columns, for tokens in panels.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx_sft_moe/arch/avx512/pack.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

struct Avx512Rows {
  template <class E, class S>
  static void pack_rows(const RowSource<S>& src, index_t k, index_t k_padded, index_t cols, float scale,
                        E* panels, index_t panel_stride) {
    avx512::pack_rows(src, k, k_padded, cols, scale, panels, panel_stride);
  }
  template <class E, class S>
  static void pack_columns(const RowSource<S>& src, index_t cols, index_t k, index_t k_padded, E* panels,
                           index_t panel_stride) {
    avx512::pack_columns(src, cols, k, k_padded, panels, panel_stride);
  }

  template <class E, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void stage(const RowSource<S>& src, index_t rows, index_t k,
                                              index_t k_padded, E* dst, index_t dst_stride) {
    if (src.col_stride != 1) return PortableRows::stage(src, rows, k, k_padded, dst, dst_stride);
    for (index_t i = 0; i < rows; ++i) {
      const S* row = src.row(i);
      E* out = dst + i * dst_stride;
      if constexpr (std::is_same_v<E, S>) {
        std::fill(std::copy_n(row, k, out), out + k_padded, E{});
        continue;
      }
      index_t kk = 0;
      for (; kk + 16 <= k; kk += 16) avx512::store16(out + kk, avx512::load16(row + kk));
      for (; kk < k_padded; kk += 16) {
        const __m512 value = kk < k ? avx512::load16(row + kk, avx512::mask16(k - kk)) : _mm512_setzero_ps();
        avx512::store16(out + kk, avx512::mask16(k_padded - kk), value);
      }
    }
  }

  template <class E, class S>
  AMX_SFT_MOE_TARGET_AVX512 static void stage_transposed(const RowSource<S>& src, index_t rows, index_t k,
                                                         index_t k_padded, const float* weights, E* dst,
                                                         index_t dst_stride) {
    if constexpr (std::is_same_v<E, bf16> && std::is_same_v<S, bf16>) {
      if (weights == nullptr) return transpose_pairs(src, rows, k, k_padded, dst, dst_stride);
    }
    for (index_t kk = 0; kk < k_padded; kk += 16) {
      for (index_t i = 0; i < rows; i += 16) {
        __m512i r[16];
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < 16; ++t) {
          if (kk + t < k) {
            const __m512 value = avx512::load16(src.row(kk + t) + i, avx512::mask16(rows - i));
            const __m512 weight = _mm512_set1_ps(weights == nullptr ? 1.0F : weights[kk + t]);
            r[t] = _mm512_castps_si512(_mm512_mul_ps(value, weight));
          } else {
            r[t] = _mm512_setzero_si512();
          }
        }
        avx512::transpose_16x16(r);
        const __mmask16 lanes = avx512::mask16(k_padded - kk);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < 16; ++t) {
          if (i + t < rows) avx512::store16(dst + (i + t) * dst_stride + kk, lanes, _mm512_castsi512_ps(r[t]));
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

  // Before others may read what passed the caches: such stores are not in order with those that tell that a task is done.
  static void settle() { _mm_sfence(); }

  template <class T>
  AMX_SFT_MOE_TARGET_AVX512 static void sum_rows(const float* rows, index_t row_stride,
                                                 const std::int32_t* index, index_t slots, index_t cols,
                                                 T* out) {
    for (index_t c = 0; c < cols; c += 64) {  // a row's four cache lines at a time
      __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
      const index_t left = cols - c;
      const __mmask16 lanes[4] = {avx512::mask16(left), left > 16 ? avx512::mask16(left - 16) : __mmask16{0},
                                  left > 32 ? avx512::mask16(left - 32) : __mmask16{0},
                                  left > 48 ? avx512::mask16(left - 48) : __mmask16{0}};
      for (index_t slot = 0; slot < slots; ++slot) {
        if (index[slot] < 0) continue;
        const float* row = rows + index[slot] * row_stride + c;
        AMX_SFT_MOE_UNROLL
        for (int i = 0; i < 4; ++i) sum[i] = _mm512_add_ps(sum[i], avx512::load16(row + 16 * i, lanes[i]));
      }
      AMX_SFT_MOE_UNROLL
      for (int i = 0; i < 4; ++i) avx512::store16(out + c + 16 * i, lanes[i], sum[i]);
    }
  }

 private:
  static constexpr index_t kTogether = 64;

  // Transposes bf16 as they are, two along K in a lane (k_padded is even, as all units of K of bf16 are): 32 steps of K by
  // 32 rows of the result at a time, less than a quarter of the operations that they take in fp32.
  AMX_SFT_MOE_TARGET_AVX512 static void transpose_pairs(const RowSource<bf16>& src, index_t rows, index_t k,
                                                        index_t k_padded, bf16* dst, index_t dst_stride) {
    for (index_t kk = 0; kk < k_padded; kk += 32) {
      const __mmask16 lanes = avx512::mask16(ceil_div(k_padded - kk, 2));
      for (index_t i = 0; i < rows; i += 32) {
        transpose_pairs_of_half<0>(src, rows, k, kk, i, lanes, dst, dst_stride);
        if (i + 16 < rows) transpose_pairs_of_half<1>(src, rows, k, kk, i, lanes, dst, dst_stride);
      }
    }
  }
  // Rows [i + 16 Half, i + 16 Half + 16) of them.
  template <int Half>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void transpose_pairs_of_half(const RowSource<bf16>& src,
                                                                                   index_t rows, index_t k,
                                                                                   index_t kk, index_t i,
                                                                                   __mmask16 lanes, bf16* dst,
                                                                                   index_t dst_stride) {
    const __mmask32 there = avx512::mask32(rows - i);
    __m512i r[16];
    AMX_SFT_MOE_UNROLL
    for (int t = 0; t < 16; ++t) {
      const index_t step = kk + 2 * t;
      const __m512i even =
          step < k ? _mm512_maskz_loadu_epi16(there, src.row(step) + i) : _mm512_setzero_si512();
      const __m512i odd =
          step + 1 < k ? _mm512_maskz_loadu_epi16(there, src.row(step + 1) + i) : _mm512_setzero_si512();
      r[t] = avx512::pairs_of_rows<Half>(even, odd);
    }
    avx512::transpose_16x16(r);
    const index_t first = i + 16 * Half;
    AMX_SFT_MOE_UNROLL
    for (int t = 0; t < 16; ++t) {
      if (first + t >= rows) break;
      _mm512_mask_storeu_ps(dst + (first + t) * dst_stride + kk, lanes, _mm512_castsi512_ps(r[t]));
    }
  }

  // Four lines without masks: gemm_tn of few tokens, which mostly stores, takes a tenth less (benchmarks/LOG.md).
  template <class T>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void store_together(const float* from, __m512 scale,
                                                                          bool accumulate, T* out) {
    __m512 value[4];
    AMX_SFT_MOE_UNROLL
    for (int p = 0; p < 4; ++p) {
      const __m512 product = _mm512_loadu_ps(from + 16 * p);
      value[p] = accumulate ? _mm512_fmadd_ps(product, scale, avx512::load16(out + 16 * p))
                            : _mm512_mul_ps(product, scale);
    }
    AMX_SFT_MOE_UNROLL
    for (int p = 0; p < 4; ++p) avx512::store16(out + 16 * p, value[p]);
  }

  // As many columns as are whole lines of the target; returns how many.
  template <class T>
  AMX_SFT_MOE_TARGET_AVX512 static index_t stream_row(const float* from, index_t cols, __m512 scale, T* out) {
    index_t j = 0;
    for (; j + kLine<T> <= cols; j += kLine<T>) {
      const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(from + j), scale);
      if constexpr (kLine<T> == 16) {
        stream(out + j, value);
      } else {
        stream(out + j, value, _mm512_mul_ps(_mm512_loadu_ps(from + j + 16), scale));
      }
    }
    return j;
  }

  // Columns adjacent in the target.
  template <class T>
  AMX_SFT_MOE_TARGET_AVX512 static void store_rows(const float* c, index_t c_stride, index_t rows, index_t cols,
                                                   const BlockTarget<T>& to) {
    const __m512 scale = _mm512_set1_ps(to.scale);
    const bool past_caches = to.col_scale == nullptr && streams(to, to.row_stride);
    for (index_t i = 0; i < rows; ++i) {  // row by row: at one column rows may all be in one set of L1
      const float* from = c + i * c_stride;
      T* out = to.data + i * to.row_stride;
      index_t j = past_caches ? stream_row(from, cols, scale, out) : 0;
      if (to.col_scale == nullptr) {
        for (; j + kTogether <= cols; j += kTogether) store_together(from + j, scale, to.accumulate, out + j);
      }
      for (; j < cols; j += 16) {
        const __mmask16 lanes = avx512::mask16(cols - j);
        const __m512 factor =
            to.col_scale == nullptr ? scale : _mm512_mul_ps(scale, avx512::load16(to.col_scale + j, lanes));
        const __m512 product = _mm512_maskz_loadu_ps(lanes, from + j);
        avx512::store16(out + j, lanes,
                        to.accumulate ? _mm512_fmadd_ps(product, factor, avx512::load16(out + j, lanes))
                                      : _mm512_mul_ps(product, factor));
      }
    }
  }

  // 16 columns of 16 rows, as far as there are such, with zeros behind.
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void load_columns(const float* c, index_t c_stride,
                                                                        index_t rows, index_t cols,
                                                                        __m512i (&r)[16]) {
    const __mmask16 lanes = avx512::mask16(cols);
    AMX_SFT_MOE_UNROLL
    for (int t = 0; t < 16; ++t) {
      r[t] = t < rows ? _mm512_maskz_loadu_epi32(lanes, c + t * c_stride) : _mm512_setzero_si512();
    }
    avx512::transpose_16x16(r);
  }
  template <class T>
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static __m512 factor_of_column(const BlockTarget<T>& to,
                                                                              index_t j) {
    return _mm512_set1_ps(to.col_scale == nullptr ? to.scale : to.scale * to.col_scale[j]);
  }

  template <class T>
  static constexpr index_t kLine = 64 / index_t{sizeof(T)};

  // Whether lines of a block, `stride` elements apart, pass the caches.
  template <class T>
  static bool streams(const BlockTarget<T>& to, index_t stride) {
    const bool whole_lines = stride % kLine<T> == 0 && reinterpret_cast<std::uintptr_t>(to.data) % 64 == 0;
    return to.past_caches && !to.accumulate && whole_lines;
  }
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void stream(float* line, __m512 value) {
    _mm512_stream_ps(line, value);
  }
  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 static void stream(bf16* line, __m512 value, __m512 behind) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(line), avx512::round_bf16_pair(value, behind));
  }

  // store_columns() of as many rows as are whole lines of the target; returns how many.
  template <class T>
  AMX_SFT_MOE_TARGET_AVX512 static index_t stream_columns(const float* c, index_t c_stride, index_t rows,
                                                          index_t cols, const BlockTarget<T>& to) {
    index_t i = 0;
    for (; i + kLine<T> <= rows; i += kLine<T>) {
      for (index_t j = 0; j < cols; j += 16) {
        __m512i r[16], behind[16];
        load_columns(c + i * c_stride + j, c_stride, 16, cols - j, r);
        if constexpr (kLine<T> == 32) load_columns(c + (i + 16) * c_stride + j, c_stride, 16, cols - j, behind);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < 16; ++t) {
          if (j + t >= cols) break;
          T* out = to.data + (j + t) * to.col_stride + i;
          const __m512 factor = factor_of_column(to, j + t);
          const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(r[t]), factor);
          if constexpr (kLine<T> == 16) {
            stream(out, value);
          } else {
            stream(out, value, _mm512_mul_ps(_mm512_castsi512_ps(behind[t]), factor));
          }
        }
      }
    }
    return i;
  }

  // Rows adjacent in the target: 16 x 16 at a time through registers.
  template <class T>
  AMX_SFT_MOE_TARGET_AVX512 static void store_columns(const float* c, index_t c_stride, index_t rows,
                                                      index_t cols, const BlockTarget<T>& to) {
    index_t i = 0;
    if (streams(to, to.col_stride)) i = stream_columns(c, c_stride, rows, cols, to);
    for (; i < rows; i += 16) {
      const __mmask16 lanes = avx512::mask16(rows - i);
      for (index_t j = 0; j < cols; j += 16) {
        __m512i r[16];
        load_columns(c + i * c_stride + j, c_stride, rows - i, cols - j, r);
        AMX_SFT_MOE_UNROLL
        for (int t = 0; t < 16; ++t) {
          if (j + t >= cols) break;
          T* out = to.data + (j + t) * to.col_stride + i;
          const __m512 factor = factor_of_column(to, j + t);
          const __m512 value = _mm512_castsi512_ps(r[t]);
          avx512::store16(out, lanes,
                          to.accumulate ? _mm512_fmadd_ps(value, factor, avx512::load16(out, lanes))
                                        : _mm512_mul_ps(value, factor));
        }
      }
    }
  }
};

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
