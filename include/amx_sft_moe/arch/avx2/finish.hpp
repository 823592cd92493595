// The sums of a register tile, scaled, rounded and written to rows of a caller's: what Avx2Rows::store makes of them in a
// cache, with the same bits, without that way.
#pragma once

#include "amx_sft_moe/arch/avx2/vector.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx2 {

// 16 elements: a line of floats, or half a line of bf16, which goes through the caches: two halves past them
// take longer (benchmarks/LOG.md, "Gradients from registers").
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void write16(float* to, __m256 low, __m256 high, bool past_caches) {
  if (!past_caches) return store16(to, low, high);
  _mm256_stream_ps(to, low);
  _mm256_stream_ps(to + kLanes, high);
}
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void write16(bf16* to, __m256 low, __m256 high, bool) {
  store16(to, low, high);
}

template <std::size_t Rows, class T>
AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX2 void finish_sums(const __m256 (&sum)[Rows][2],
                                                            const FinishedRows<T>& to) {
  const __m256 scale = _mm256_set1_ps(to.scale);
  AMX_SFT_MOE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    T* row = to.data + static_cast<index_t>(r) * to.row_stride;
    if (to.accumulate) {
      write16(row, _mm256_fmadd_ps(sum[r][0], scale, load8(row)),
              _mm256_fmadd_ps(sum[r][1], scale, load8(row + kLanes)), to.past_caches);
    } else {
      write16(row, _mm256_mul_ps(sum[r][0], scale), _mm256_mul_ps(sum[r][1], scale), to.past_caches);
    }
  }
}

}  // namespace arch::avx2
AMX_SFT_MOE_NAMESPACE_END
