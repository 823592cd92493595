// Whether AMX instructions are emulated in this process (main.cpp decides). They take microseconds each then,
// so that tests leave their larger cases out.
#pragma once

namespace sft_test {

bool amx_is_emulated();

}  // namespace sft_test
