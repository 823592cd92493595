// The fourth unit of test_two_units, compiled with -mavx2 -mfma -ffast-math: other roundings, other CPUs, and comparisons
// that see no NaN. Another library as far as the linker knows. <complex.h> of C has a macro I in this mode.
#include <complex.h>

#include <cmath>
#include <limits>
#include <typeinfo>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "two_units_serial.hpp"

namespace sft_test {

const char* provider_type_with_flags() {
  return typeid(amx_sft_moe::KernelProvider).name();
}

bool takes_nan_with_flags(const float& nan) {
  amx_sft_moe::Config config;
  config.num_experts = config.top_k = config.hidden_size = config.intermediate_size = 1;
  int taken = 0;
  for (const amx_sft_moe::ClampedGlu& activation :
       {amx_sft_moe::ClampedGlu{.limit = nan}, amx_sft_moe::ClampedGlu{.alpha = nan}}) {
    config.activation = activation;
    try {
      amx_sft_moe::validate::config(config);
      ++taken;
    } catch (const amx_sft_moe::ArgumentError&) {
    }
  }
  return taken > 0;
}

}  // namespace sft_test
