// The second unit of test_two_units.
#include "amx_sft_moe/amx_sft_moe.hpp"
#include "two_units.hpp"

namespace sft_test {

std::vector<float> run_tiny_layer_there() {
  return run_tiny_layer_here();
}

void throw_argument_error_there() {
  amx_sft_moe::require_equal("answer", 42, 41);
}

const void* phases_there() {
  return &amx_sft_moe::kPhases;
}

}  // namespace sft_test
