// The second unit of test_two_units. Its own macros of the names that the library's timer uses outlive the headers.
#define BACKWARD_TIMER_START(number) ((number) + 1)
#define BACKWARD_TIMER_END 40

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "two_units.hpp"

static_assert(BACKWARD_TIMER_START(BACKWARD_TIMER_END) == 41);
#ifdef BACKWARD_TIMER_CHECKPOINT
#error "a helper macro has leaked out of the umbrella header"
#endif
#include "amx_sft_moe/kernels/machine_probe.hpp"  // undefines helper macros once more
static_assert(BACKWARD_TIMER_START(BACKWARD_TIMER_END) == 41);

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
