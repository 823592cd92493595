// kernels::Portable<W>: plain C++, any x86-64, bf16 or fp32 weights, fp32 arithmetic.
#pragma once

#include <string>
#include <string_view>

#include "amx_sft_moe/arch/portable/activation.hpp"
#include "amx_sft_moe/arch/portable/microkernel.hpp"
#include "amx_sft_moe/arch/portable/rows.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace kernels {

// A kernel is a policy: which microkernel, which row operations, which types.
//   Weight   element of the base weights
//   Stored   element of saved and intermediate activations
//   Compute  element of the microkernel's operands; anything else is converted on its way: panels, strips, in products
template <class W>
struct Portable {
  static constexpr std::string_view kName = "portable";
  using Weight = W;
  using Stored = W;
  using Microkernel = arch::PortableMicrokernel;
  using Compute = Microkernel::Element;
  using Session = Microkernel::Session;
  using Rows = arch::PortableRows;
  using Activation = arch::PortableActivation;

  static std::string refusal() { return {}; }  // why this CPU cannot run it; empty: it can
  static bool available() { return refusal().empty(); }
};

}  // namespace kernels
AMX_SFT_MOE_NAMESPACE_END
