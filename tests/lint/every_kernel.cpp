// The whole library, every kernel instantiated: what clang-tidy reads (`make tidy`). Not part of any program.
#include "amx_sft_moe/amx_sft_moe.hpp"
#if __has_include(<dnnl.hpp>)
#include "amx_sft_moe/kernels/onednn.hpp"
#endif

namespace {

#if __has_include(<dnnl.hpp>)
using EveryKernel =
    amx_sft_moe::kernels::Joined<amx_sft_moe::DefaultKernels, amx_sft_moe::kernels::OneDnnKernels>;
#else
using EveryKernel = amx_sft_moe::DefaultKernels;
#endif

}  // namespace

std::unique_ptr<amx_sft_moe::AnySftMoe> every_kernel(const amx_sft_moe::Config& config,
                                                     const amx_sft_moe::AnyBaseWeights& weights) {
  return amx_sft_moe::make_sft_moe<EveryKernel>("auto", config, weights);
}
