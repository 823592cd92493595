// kernels::Avx512Bf16: VDPBF16PS, bf16 weights used where they lie.
#pragma once

#include <string>
#include <string_view>

#include "amx_sft_moe/arch/avx512/activation.hpp"
#include "amx_sft_moe/arch/avx512/microkernel_bf16.hpp"
#include "amx_sft_moe/arch/avx512/rows.hpp"
#include "amx_sft_moe/arch/cpu_features.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace kernels {

struct Avx512Bf16 {
  static constexpr std::string_view kName = "avx512_bf16";
  using Weight = bf16;
  using Stored = bf16;
  using Microkernel = arch::Avx512Bf16Microkernel;
  using Compute = Microkernel::Element;
  using Session = Microkernel::Session;
  using Rows = arch::Avx512Rows;
  using Activation = arch::Avx512Activation;

  static std::string refusal() {
    return arch::cpu_features().avx512_bf16 ? "" : "the CPU or the operating system reports no AVX512-BF16";
  }
  static bool available() { return refusal().empty(); }
};

}  // namespace kernels
AMX_SFT_MOE_NAMESPACE_END
