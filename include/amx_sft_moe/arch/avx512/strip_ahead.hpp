// The strip that is next, with AVX512. 24 of the 32 zmm are a tile's accumulators: a unit needs no more than four.
#pragma once

#include "amx_sft_moe/arch/avx512/pack_strip.hpp"
#include "amx_sft_moe/arch/strip_ahead.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::avx512 {

struct RowsAhead : arch::RowsAhead {
  using arch::RowsAhead::RowsAhead;

  AMX_SFT_MOE_INLINE AMX_SFT_MOE_TARGET_AVX512 void turn() {
    for (index_t units = due(); units > 0; --units, next_unit()) step_of_rows(row(0), row(1), out());
  }
};

}  // namespace arch::avx512
AMX_SFT_MOE_NAMESPACE_END
