// The kernels that benchmarks know: the library's own and, where oneDNN was found, its: those for AVX512 and bf16
// weights in Kernels, every one in AllKernels.
#pragma once

#include "amx_sft_moe/amx_sft_moe.hpp"
#ifdef BENCH_HAS_ONEDNN
#include "amx_sft_moe/kernels/onednn.hpp"
#endif

namespace bench {

#ifdef BENCH_HAS_ONEDNN
namespace kernels = amx_sft_moe::kernels;
using Kernels = kernels::Joined<
    amx_sft_moe::DefaultKernels,
    kernels::KernelList<kernels::OneDnnBf16, kernels::OneDnn<amx_sft_moe::bf16, kernels::OneDnnWithAvx512>>>;
using AllKernels = kernels::Joined<amx_sft_moe::DefaultKernels, kernels::OneDnnKernels>;
#else
using Kernels = amx_sft_moe::DefaultKernels;
using AllKernels = Kernels;
#endif

}  // namespace bench
