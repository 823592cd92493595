// The strip that is next, with AVX512. 24 of the 32 zmm are a tile's accumulators: a unit needs no more than four.
#pragma once

#include "amx_sft_moe/arch/avx512/pack_strip.hpp"
#include "amx_sft_moe/arch/strip_ahead.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

struct RowsAhead : arch::RowsAhead {
  using arch::RowsAhead::RowsAhead;

  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void turn() {
    for (index_t units = due(); units > 0; --units, next_unit()) {
      const bf16* even = row(0);
      const bf16* odd = row(1);
      AMX_SFT_MOE_UNROLL
      for (int p = 0; p < 4; p += 2) {
        const __m512i a = _mm512_loadu_si512(even + p * kPanelCols);
        const __m512i b = _mm512_loadu_si512(odd + p * kPanelCols);
        _mm512_storeu_si512(out() + 2 * p * kPanelCols, pairs_of_rows<0>(a, b));
        _mm512_storeu_si512(out() + (2 * p + 2) * kPanelCols, pairs_of_rows<1>(a, b));
      }
    }
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
