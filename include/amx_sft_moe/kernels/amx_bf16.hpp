// kernels::AmxBf16: TDPBF16PS on tiles, bf16 weights used where they lie. Asks the operating system for its
// permission.
#pragma once

#include <string>
#include <string_view>

#include "amx_sft_moe/arch/amx/microkernel.hpp"
#include "amx_sft_moe/arch/avx512/activation.hpp"
#include "amx_sft_moe/arch/avx512/rows.hpp"
#include "amx_sft_moe/arch/cpu_features.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace kernels {

struct AmxBf16 {
  static constexpr std::string_view kName = "amx_bf16";
  using Weight = bf16;
  using Stored = bf16;
  using Microkernel = arch::AmxMicrokernel;
  using Compute = Microkernel::Element;
  using Session = Microkernel::Session;
  using Rows = arch::Avx512Rows;  // every CPU with AMX has AVX512
  using Activation = arch::Avx512Activation;

  static std::string refusal() { return arch::amx_refusal(arch::cpu_features()); }
  static bool available() { return refusal().empty(); }
};

}  // namespace kernels
AMX_SFT_MOE_NAMESPACE_END
