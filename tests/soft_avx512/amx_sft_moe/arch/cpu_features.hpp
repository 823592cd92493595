// In place of the library's header where AVX512 is software (intrinsics.hpp beside this one): every CPU has it.
#pragma once

#define cpu_features reported_cpu_features
#include_next <amx_sft_moe/arch/cpu_features.hpp>
#undef cpu_features

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch {

inline CpuFeatures cpu_features() {
  CpuFeatures found = reported_cpu_features();
  found.avx512 = found.avx512_bf16 = found.avx2;
  return found;
}

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
