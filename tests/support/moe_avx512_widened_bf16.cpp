#include "moe_definition.hpp"

template class amx_sft_moe::AMX_SFT_MOE<sft_test::Avx512WidenedBf16>;
template class sft_test::Moe<sft_test::Avx512WidenedBf16>;
