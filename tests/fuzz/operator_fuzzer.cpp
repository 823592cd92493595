// libFuzzer target of the public C++ API: random configurations, views and sizes, calls in any order, legal
// ones and refused ones, of one operator or of two that share a workspace. Results are compared with the float64
// reference, refusals with the contract (an exception, nothing changed).
//
//     operator_fuzzer [libFuzzer's options] [corpus folder]
//
// With AMX_SFT_MOE_FUZZ_CALLS=n the process ends well after n calls of the operator. `make fuzz
// FUZZ_CALLS=1000000` runs a million.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>

#include "bytes.hpp"
#include "checked_operator.hpp"

namespace {

using sft_fuzz::Bytes;
using sft_fuzz::CheckedOperator;

// Layers of different sizes, types and kernels may share a workspace; what one leaves there is the other's garbage.
void run_session(Bytes& in) {
  const int count = in.in(1, 2);
  const auto workspace = in.in(0, 3) > 0 ? std::make_shared<amx_sft_moe::Workspace>() : nullptr;
  std::deque<CheckedOperator> operators;
  for (int n = 0; n < count; ++n) operators.emplace_back(in, workspace);
  for (int n = 0; n < 150 && !in.empty(); ++n) {
    operators[static_cast<std::size_t>(in.in(0, count - 1))].step();
  }
  for (CheckedOperator& checked : operators) checked.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const char* const limit = std::getenv("AMX_SFT_MOE_FUZZ_CALLS");
  static const long long most = limit == nullptr ? -1 : std::atoll(limit);
  Bytes in(data, size);
  run_session(in);
  if (most >= 0 && sft_fuzz::g_calls >= most) {
    std::printf("operator_fuzzer: %lld calls without a finding\n", sft_fuzz::g_calls);
    std::fflush(stdout);
    std::_Exit(0);
  }
  return 0;
}
