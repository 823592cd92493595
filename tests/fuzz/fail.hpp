// A finding ends the process, and libFuzzer keeps the input.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace sft_fuzz {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "operator_fuzzer: %s\n", what.c_str());
  std::abort();
}

}  // namespace sft_fuzz
