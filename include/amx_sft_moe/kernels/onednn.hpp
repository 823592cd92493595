// Kernel `onednn`: the products by oneDNN's matmul, everything else as in the other kernels. For CPUs that have
// no kernel of their own here, and as a second opinion in tests and benchmarks.
//
// Not part of amx_sft_moe.hpp: it needs <dnnl.hpp>, of oneDNN 2.6 or later with the CPU runtime OMP or SEQ, and its
// library (CMake: link amx_sft_moe::onednn). Include it before or behind amx_sft_moe.hpp:
//
//     AMX_SFT_MOE<kernels::OneDnnBf16> moe(...);
//     make_sft_moe<kernels::Joined<DefaultKernels, kernels::OneDnnKernels>>("onednn", ...);
#pragma once

#include "amx_sft_moe/core/config_macros.hpp"
// Behind the macros, what uses them.
#include <string>
#include <string_view>

#include "amx_sft_moe/arch/avx2/activation.hpp"
#include "amx_sft_moe/arch/avx2/pack.hpp"
#include "amx_sft_moe/arch/avx512/activation.hpp"
#include "amx_sft_moe/arch/cpu_features.hpp"
#include "amx_sft_moe/arch/onednn/microkernel.hpp"
#include "amx_sft_moe/arch/onednn/rows.hpp"
#include "amx_sft_moe/arch/portable/activation.hpp"
#include "amx_sft_moe/arch/portable/rows.hpp"
#include "amx_sft_moe/kernels/kernel_list.hpp"
#include "amx_sft_moe/parallel/tasks.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace kernels {

// oneDNN plans and runs products for one thread as long as it lives.
template <class Microkernel>
struct OneDnnSession : Microkernel::Session {
  using Microkernel::Session::Session;
  parallel::SingleThreaded single_threaded;
};

// AVX512 for row operations; products in AVX512 or AMX code of oneDNN, on panels as they are.
struct OneDnnWithAvx512 {
  static constexpr bool kPaired = true;
  static constexpr std::string_view kVariant = "zmm";
  using Rows = arch::PairedAvx512Rows;
  using Activation = arch::Avx512Activation;
  static bool available() {
    return arch::cpu_features().avx512 && arch::onednn::has_isa(dnnl_cpu_isa_avx512_core);
  }
};

// AVX2 for row operations; products in oneDNN's AVX2 code, on panels that are unpacked first.
struct OneDnnWithAvx2 {
  static constexpr bool kPaired = false;
  static constexpr std::string_view kVariant = "ymm";
  using Rows = arch::Avx2PanelRows;
  using Activation = arch::Avx2Activation;
  static bool available() { return arch::cpu_features().avx2; }
};

// The same with whatever oneDNN has for this CPU.
struct OneDnnAnywhere {
  static constexpr bool kPaired = false;
  static constexpr std::string_view kVariant = "plain";
  using Rows = arch::PortablePanelRows;
  using Activation = arch::PortableActivation;
  static bool available() { return true; }
};

// fp32 products; bf16 weights are widened on their way.
template <class W, class Variant>
struct OneDnn {
  static constexpr std::string_view kName = "onednn";
  static constexpr std::string_view kVariant = Variant::kVariant;
  using Weight = W;
  using Stored = W;
  using Microkernel = arch::OneDnnMicrokernel<float, Variant::kPaired>;
  using Compute = typename Microkernel::Element;
  using Session = OneDnnSession<Microkernel>;
  using Rows = typename Variant::Rows;
  using Activation = typename Variant::Activation;

  static std::string refusal() {
    if (!Variant::available()) return "the CPU, or oneDNN (DNNL_MAX_CPU_ISA), lacks the instructions";
    return arch::onednn::version_refusal();
  }
  static bool available() { return refusal().empty(); }
};

// bf16 products with fp32 sums, where the CPU has instructions for them: AMX-BF16 or AVX512-BF16.
struct OneDnnBf16 {
  static constexpr std::string_view kName = "onednn";
  static constexpr std::string_view kVariant = "bf16";
  using Weight = bf16;
  using Stored = bf16;
  using Microkernel = arch::OneDnnMicrokernel<bf16, true>;
  using Compute = Microkernel::Element;
  using Session = OneDnnSession<Microkernel>;
  using Rows = arch::PairedAvx512Rows;
  using Activation = arch::Avx512Activation;

  static std::string refusal() {
    if (!arch::cpu_features().avx512 || !arch::onednn::has_isa(dnnl_cpu_isa_avx512_core_bf16)) {
      return "the CPU, or oneDNN (DNNL_MAX_CPU_ISA), reports no AVX512-BF16";
    }
    return arch::onednn::version_refusal();
  }
  static bool available() { return refusal().empty(); }
};

using OneDnnKernels = KernelList<OneDnnBf16, OneDnn<bf16, OneDnnWithAvx512>, OneDnn<float, OneDnnWithAvx512>,
                                 OneDnn<bf16, OneDnnWithAvx2>, OneDnn<float, OneDnnWithAvx2>,
                                 OneDnn<bf16, OneDnnAnywhere>, OneDnn<float, OneDnnAnywhere>>;

}  // namespace kernels
AMX_SFT_MOE_NAMESPACE_END

#include "amx_sft_moe/core/undef_macros.hpp"
