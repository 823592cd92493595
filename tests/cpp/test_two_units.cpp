// Two translation units that include everything, use the same operator, and link. Each function of the library
// is then either inline or a template, or the linker complains; and no helper macro has leaked.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "two_units.hpp"

#if defined(AMX_SFT_MOE_NAMESPACE_BEGIN) || defined(AMX_SFT_MOE_NAMESPACE_END) ||             \
    defined(AMX_SFT_MOE_INLINE) || defined(AMX_SFT_MOE_UNROLL) || defined(AMX_SFT_MOE_ABI) || \
    defined(AMX_SFT_MOE_TARGET_AVX512) || defined(AMX_SFT_MOE_TARGET_AVX512_BF16) ||          \
    defined(BACKWARD_TIMER_START) || defined(BACKWARD_TIMER_CHECKPOINT) || defined(BACKWARD_TIMER_END)
#error "a helper macro has leaked out of the umbrella header"
#endif

namespace sft_test {
namespace {

TEST(TwoUnits, HaveOneOperator) {
  const std::vector<float> here = run_tiny_layer_here();
  EXPECT_EQ(here, run_tiny_layer_there());
  EXPECT_EQ(here, (std::vector<float>{0.0F}));  // silu(0) = 0
}

TEST(TwoUnits, ShareTheirTypes) {
  EXPECT_THROW(throw_argument_error_there(), amx_sft_moe::ArgumentError);
  EXPECT_EQ(&amx_sft_moe::kPhases, phases_there());
}

}  // namespace
}  // namespace sft_test
