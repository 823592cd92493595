#include "amx_sft_moe/amx_sft_moe.hpp"

template class amx_sft_moe::registry::TypedSftMoe<amx_sft_moe::kernels::Avx512Bf16>;
