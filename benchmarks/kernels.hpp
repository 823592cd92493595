// The kernels that benchmarks know: the library's own, and where it was found those of oneDNN for CPUs with AVX512.
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
#else
using Kernels = amx_sft_moe::DefaultKernels;
#endif

}  // namespace bench
