// Register tiles of bf16 products for few rows of A, see arch/in_place.hpp: VDPBF16PS with pairs of a row of W as they
// lie, 32 elements an instruction, or with pairs of two rows of B.
#pragma once

#include "amx_sft_moe/arch/avx512/in_place.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// Pairs of 32 elements: all of them, or the first n and zeros.
template <bool Whole, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 __m512i load_pairs(const S* p, index_t n) {
  if constexpr (Whole && std::is_same_v<S, bf16>) return _mm512_loadu_si512(p);
  return load_dwords<bf16>(p, n);
}

// sum [Rows][Tokens] += 32 elements of each row, of which n are there, times x, 32 elements of each token after the other.
template <bool Whole, std::size_t Rows, std::size_t Tokens, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void dot_pairs(__m512 (&sum)[Rows][Tokens],
                                                                 const S* const* row, index_t kk, index_t n,
                                                                 const bf16* x) {
  __m512bh line[Rows];
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r)
    line[r] = reinterpret_cast<__m512bh>(load_pairs<Whole>(row[r] + kk, n));
  AMX_SFT_MOE_UNROLL
  for (std::size_t t = 0; t < Tokens; ++t) {
    __m512i value = _mm512_loadu_si512(x + static_cast<index_t>(t) * kLine);
    // GCC would load it once for each row.
    AMX_SFT_MOE_HIDE_ORIGIN(value);
    const auto pairs = reinterpret_cast<__m512bh>(value);
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], line[r], pairs);
  }
}

// 32 columns, of which n are there, of two rows of B as pairs; the second may be null where `maybe_odd`: zeros.
template <bool Whole, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void pair_rows(__m512bh (&line)[2], const S* even,
                                                                 const S* odd, bool maybe_odd, index_t j,
                                                                 index_t n) {
  const __m512i a = load_pairs<Whole>(even + j, n);
  const __m512i b = maybe_odd && odd == nullptr ? _mm512_setzero_si512() : load_pairs<Whole>(odd + j, n);
  line[0] = reinterpret_cast<__m512bh>(pairs_of_rows<0>(a, b));
  line[1] = reinterpret_cast<__m512bh>(pairs_of_rows<1>(a, b));
}

// 32 columns, of which n are there, of C += a x rows of B.
template <bool Whole, std::size_t Rows, std::size_t Depth, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void add_pairs(
    const InPlaceSteps<bf16, Rows, Depth, S>& steps, index_t j, index_t n, __mmask16 there, float* to,
    index_t stride) {
  __m512bh line[Depth][2];
  AMX_SFT_MOE_UNROLL
  for (std::size_t d = 0; d < Depth; ++d) {
    pair_rows<Whole>(line[d], steps.b[2 * d], steps.b[2 * d + 1], d + 1 == Depth, j, n);
    AMX_SFT_MOE_UNROLL
    for (std::size_t i = 2 * d; i < 2 * d + 2; ++i) {
      if (Rows <= kWaitingRows || steps.asks_near) {
        _mm_prefetch(reinterpret_cast<const char*>(steps.near[i] + j), _MM_HINT_T0);
      }
    }
  }
  // Broadcast from memory for each use: GCC would keep all of them, more than there are registers, and lines of B on the
  // stack instead.
  const std::int32_t* pairs = &steps.a[0][0];
  AMX_SFT_MOE_HIDE_ADDRESS(pairs);
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r, to += stride) {
    AMX_SFT_MOE_HIDE_ADDRESS(to);
    __m512 low = _mm512_maskz_loadu_ps(there, to);
    __m512 high = _mm512_maskz_loadu_ps(there, to + 16);
    AMX_SFT_MOE_UNROLL
    for (std::size_t d = 0; d < Depth; ++d) {
      const __m512bh pair = broadcast_pair(pairs[r * Depth + d]);
      low = _mm512_dpbf16_ps(low, pair, line[d][0]);
      high = _mm512_dpbf16_ps(high, pair, line[d][1]);
    }
    _mm512_storeu_ps(to, low);
    _mm512_storeu_ps(to + 16, high);
  }
}

// 32 columns, of which n are there, of 2 Depth rows of B as pairs; the last row null where it is not there. Rows are so few
// that each of them is asked for along its length.
template <bool Whole, std::size_t Depth, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void load_steps(__m512bh (&line)[Depth][2], const S* const* b,
                                                                  index_t j, index_t n) {
  AMX_SFT_MOE_UNROLL
  for (std::size_t d = 0; d < Depth; ++d) {
    const S* even = b[2 * d];
    const S* odd = b[2 * d + 1];
    pair_rows<Whole>(line[d], even, odd, d + 1 == Depth, j, n);
    constexpr index_t kTurnBytes = 32 * index_t{sizeof(S)};
    AMX_SFT_MOE_UNROLL
    for (index_t at = kAlongBytes; at < kAlongBytes + kTurnBytes; at += kLineBytes) {
      _mm_prefetch(bytes_behind(even + j, at), _MM_HINT_T0);
      if (d + 1 < Depth || odd != nullptr) _mm_prefetch(bytes_behind(odd + j, at), _MM_HINT_T0);
    }
  }
}

// C [Rows, 32] += a [Rows, 2 Depth] x those rows of B.
template <std::size_t Rows, std::size_t Depth>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void add_steps_of_rows(const bf16* a, index_t a_stride,
                                                                         const __m512bh (&line)[Depth][2],
                                                                         __mmask16 there, float* to,
                                                                         index_t stride) {
  __m512 sum[Rows][2];
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    sum[r][0] = _mm512_maskz_loadu_ps(there, to + static_cast<index_t>(r) * stride);
    sum[r][1] = _mm512_maskz_loadu_ps(there, to + static_cast<index_t>(r) * stride + 16);
  }
  AMX_SFT_MOE_UNROLL
  for (std::size_t d = 0; d < Depth; ++d) {
    AMX_SFT_MOE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      std::int32_t bits;
      std::memcpy(&bits, a + static_cast<index_t>(r) * a_stride + static_cast<index_t>(2 * d), sizeof(bits));
      __m512i value = _mm512_set1_epi32(bits);
      AMX_SFT_MOE_HIDE_ORIGIN(value);  // GCC would load it once for each product
      const auto pair = reinterpret_cast<__m512bh>(value);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], pair, line[d][0]);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], pair, line[d][1]);
    }
  }
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    _mm512_storeu_ps(to + static_cast<index_t>(r) * stride, sum[r][0]);
    _mm512_storeu_ps(to + static_cast<index_t>(r) * stride + 16, sum[r][1]);
  }
}

// 32 columns from j on, of which n are there, of C [rows, cols] += a [rows, 2 Depth] x those rows of B.
template <bool Whole, std::size_t Depth, class S>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512_BF16 void add_few_steps_of_columns(const bf16* a, index_t a_stride,
                                                                                index_t rows, const S* const* b,
                                                                                index_t j, index_t n,
                                                                                const SumRows& c) {
  const __mmask16 there = lanes_there(c);
  __m512bh line[Depth][2];
  load_steps<Whole>(line, b, j, n);
  float* to = c.data + j;
  index_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    add_steps_of_rows<2>(a + r * a_stride, a_stride, line, there, to + r * c.stride, c.stride);
  }
  if (r < rows) add_steps_of_rows<1>(a + r * a_stride, a_stride, line, there, to + r * c.stride, c.stride);
}

struct InPlacePairTiles {
  using Element = bf16;
  static constexpr index_t kLine = avx512::kLine, kTurnColumns = 32;
  // Pairs of rows of B that are in registers together: 16 of the 32, and two rows of C are four.
  static constexpr std::size_t kDeepest = 8;

  template <std::size_t Depth, class S>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void add_few_steps(const bf16* a, index_t a_stride, index_t rows,
                                                           const S* const* b, index_t cols, const SumRows& c) {
    index_t j = 0;
    for (; cols - j >= kTurnColumns; j += kTurnColumns) {
      add_few_steps_of_columns<true, Depth>(a, a_stride, rows, b, j, kTurnColumns, c);
    }
    if (j < cols) add_few_steps_of_columns<false, Depth>(a, a_stride, rows, b, j, cols - j, c);
  }

  template <std::size_t Rows, std::size_t Depth, class S>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void add_steps(InPlaceSteps<bf16, Rows, Depth, S> steps, index_t cols,
                                                       SumRows c, LeadingPrefetch* ahead) {
    const __mmask16 there = lanes_there(c);
    index_t j = 0;
    for (; j + kTurnColumns <= cols; j += kTurnColumns) {
      if (ahead != nullptr) ahead->turn();
      add_pairs<true>(steps, j, kTurnColumns, there, c.data + j, c.stride);
    }
    if (j < cols) add_pairs<false>(steps, j, cols - j, there, c.data + j, c.stride);
  }

  // X [tokens, k] -> [k / kLine][tokens][kLine], zeros behind k.
  template <class S>
  AMX_SFT_MOE_TARGET_AVX512 static void order(const bf16* x, index_t x_stride, index_t tokens, index_t k,
                                              bf16* to) {
    for (index_t kk = 0; kk < k; kk += kLine) {
      const __mmask32 lanes = mask32(k - kk);
      for (index_t t = 0; t < tokens; ++t, to += kLine) {
        _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(lanes, x + t * x_stride + kk));
      }
    }
  }

  // C [Tokens, Rows] += X [Tokens, k] x rows^T, X in that order.
  template <int Rows, int Tokens, class S, class Ahead>
  AMX_SFT_MOE_TARGET_AVX512_BF16 static void dot(const S* const* row, const bf16* x, index_t k,
                                                 const SumRows& c, Ahead& ahead) {
    __m512 sum[std::size_t{Rows}][std::size_t{Tokens}];
    AMX_SFT_MOE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      AMX_SFT_MOE_UNROLL
      for (int t = 0; t < Tokens; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    index_t kk = 0;
    for (; kk + kLine <= k; kk += kLine, x += kLine * Tokens) {
      ask_ahead<std::size_t{Rows}>(row, ahead, kk);
      dot_pairs<true>(sum, row, kk, kLine, x);
    }
    if (kk < k) dot_pairs<false>(sum, row, kk, k - kk, x);
    store_dots(sum, c);
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
