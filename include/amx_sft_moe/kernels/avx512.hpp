// kernels::Avx512<W>: fp32 FMA on AVX512 (F, BW, DQ, VL), bf16 or fp32 weights. On CPUs whose VDPBF16PS is
// slower than FMA (Intel without AMX at hand) it is the fastest for bf16 weights too.
#pragma once

#include <string>
#include <string_view>

#include "amx_sft_moe/arch/avx512/activation.hpp"
#include "amx_sft_moe/arch/avx512/microkernel_fp32.hpp"
#include "amx_sft_moe/arch/avx512/rows.hpp"
#include "amx_sft_moe/arch/cpu_features.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace kernels {

template <class W>
struct Avx512 {
  static constexpr std::string_view kName = "avx512";
  using Weight = W;
  using Stored = W;
  using Microkernel = arch::Avx512Microkernel;
  using Compute = Microkernel::Element;
  using Session = Microkernel::Session;
  using Rows = arch::Avx512Rows;
  using Activation = arch::Avx512Activation;

  static std::string refusal() {
    return arch::cpu_features().avx512 ? ""
                                       : "the CPU or the operating system reports no AVX512 (F, BW, DQ, VL)";
  }
  static bool available() { return refusal().empty(); }
};

}  // namespace kernels
AMX_SFT_MOE_NAMESPACE_END
