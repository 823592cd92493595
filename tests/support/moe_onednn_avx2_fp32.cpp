#include "moe_definition.hpp"

template class sft_test::Moe<sft_test::OneDnnAvx2Fp32>;
