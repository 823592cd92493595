// kernels::Avx2<W>: fp32 FMA on AVX2, bf16 or fp32 weights. For what came since Haswell and Zen without AVX512.
#pragma once

#include <string>
#include <string_view>

#include "amx_sft_moe/arch/avx2/activation.hpp"
#include "amx_sft_moe/arch/avx2/microkernel.hpp"
#include "amx_sft_moe/arch/avx2/rows.hpp"
#include "amx_sft_moe/arch/cpu_features.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace kernels {

template <class W>
struct Avx2 {
  static constexpr std::string_view kName = "avx2";
  using Weight = W;
  using Stored = W;
  using Microkernel = arch::Avx2Microkernel;
  using Compute = Microkernel::Element;
  using Session = Microkernel::Session;
  using Rows = arch::Avx2Rows;
  using Activation = arch::Avx2Activation;

  static std::string refusal() {
    return arch::cpu_features().avx2 ? "" : "the CPU or the operating system reports no AVX2 with FMA";
  }
  static bool available() { return refusal().empty(); }
};

}  // namespace kernels
AMX_SFT_MOE_NAMESPACE_END
