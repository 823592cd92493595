#include "amx_sft_moe/amx_sft_moe.hpp"

template class amx_sft_moe::registry::TypedSftMoe<amx_sft_moe::kernels::Avx2<amx_sft_moe::bf16>>;
template class amx_sft_moe::registry::TypedSftMoe<amx_sft_moe::kernels::Avx2<float>>;
