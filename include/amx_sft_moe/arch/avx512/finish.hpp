// The sums of a register tile, scaled, rounded and written to rows of a caller's: what Avx512Rows::store makes of them in a
// cache, with the same bits, without that way.
#pragma once

#include "amx_sft_moe/arch/avx512/vector.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

// 32 elements, two lines of floats or one of bf16.
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void write32(float* to, __m512 low, __m512 high, bool past_caches) {
  if (past_caches) {
    _mm512_stream_ps(to, low);
    _mm512_stream_ps(to + 16, high);
  } else {
    _mm512_storeu_ps(to, low);
    _mm512_storeu_ps(to + 16, high);
  }
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void write32(bf16* to, __m512 low, __m512 high, bool past_caches) {
  const __m512i both = round_bf16_pair(low, high);
  if (past_caches) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
  } else {
    _mm512_storeu_si512(to, both);
  }
}

template <std::size_t Rows, std::size_t Panels, class T>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void finish_sums(const __m512 (&sum)[Rows][Panels],
                                                              const FinishedRows<T>& to) {
  static_assert(Panels % 2 == 0);
  const __m512 scale = _mm512_set1_ps(to.scale);
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    T* row = to.data + static_cast<index_t>(r) * to.row_stride;
    AMX_SFT_MOE_UNROLL
    for (std::size_t p = 0; p < Panels; p += 2, row += kLine) {
      if (to.accumulate) {
        write32(row, _mm512_fmadd_ps(sum[r][p], scale, load16(row)),
                _mm512_fmadd_ps(sum[r][p + 1], scale, load16(row + 16)), false);
      } else {
        write32(row, _mm512_mul_ps(sum[r][p], scale), _mm512_mul_ps(sum[r][p + 1], scale), to.past_caches);
      }
    }
  }
}

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
