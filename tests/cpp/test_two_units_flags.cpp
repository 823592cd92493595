// The fourth unit of test_two_units, compiled with -mavx2 -mfma -ffast-math: other roundings, other CPUs, and comparisons
// that see no NaN. Another library as far as the linker knows. <complex.h> of C has a macro I in this mode.
#include <complex.h>

#include <cmath>
#include <cstdint>
#include <cstring>
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

namespace {

// Every NaN whose low bits, rounded away as a number's, would make another number of it.
template <class Kernel>
bool keeps_nans() {
  if (!Kernel::available()) return true;
  for (const std::uint32_t bits : {0x7fffffffU, 0xffffffffU, 0x7f800001U}) {
    float values[16];
    for (float& value : values) std::memcpy(&value, &bits, sizeof(value));
    amx_sft_moe::bf16 stored[16];
    const amx_sft_moe::arch::BlockTarget<amx_sft_moe::bf16> target{stored, 16, 1, false, 1.0F, nullptr};
    Kernel::Rows::store(values, 16, 1, 16, target);
    for (const amx_sft_moe::bf16 value : stored) {
      if ((value.bits & 0x7fffU) <= 0x7f80U) return false;
    }
  }
  return true;
}

}  // namespace

bool stores_nans_with_flags() {
  using amx_sft_moe::bf16;
  namespace kernels = amx_sft_moe::kernels;
  return keeps_nans<kernels::Portable<bf16>>() && keeps_nans<kernels::Avx2<bf16>>() &&
         keeps_nans<kernels::Avx512<bf16>>() && keeps_nans<kernels::Avx512Bf16>();
}

}  // namespace sft_test
