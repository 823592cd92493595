// Two translation units that include everything, use the same operator, and link. Each function of the library
// is then either inline or a template, or the linker complains; and no helper macro has leaked. A third unit is
// compiled without OpenMP and has a library of its own.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <typeinfo>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "two_units.hpp"
#include "two_units_serial.hpp"

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

TEST(TwoUnits, OneWithoutOpenMpHasBodiesOfItsOwn) {
  EXPECT_EQ(run_tiny_layer_serially(), run_tiny_layer_here());
#ifdef _OPENMP
  const SerialUnit serial = serial_unit();
  int (*const own)() = &amx_sft_moe::parallel::default_num_threads;
  EXPECT_NE(serial.default_num_threads, own);
  const int before = omp_get_max_threads();
  omp_set_num_threads(3);
  EXPECT_EQ(own(), 3);
  EXPECT_EQ(serial.default_num_threads(), 1);
  omp_set_num_threads(before);
  EXPECT_NE(serial.size_of_single_threaded, sizeof(amx_sft_moe::parallel::SingleThreaded));
  EXPECT_NE(serial.provider_type, typeid(amx_sft_moe::KernelProvider).name());
#endif
}

TEST(TwoUnits, OneForOtherCpusHasBodiesOfItsOwn) {
  EXPECT_STRNE(provider_type_with_flags(), typeid(amx_sft_moe::KernelProvider).name());
}

TEST(TwoUnits, OneOfFastMathRefusesNaN) {
  if (!amx_sft_moe::arch::cpu_features().avx2) GTEST_SKIP() << "no AVX2";
  EXPECT_FALSE(takes_nan_with_flags(std::numeric_limits<float>::quiet_NaN()));
  EXPECT_TRUE(stores_nans_with_flags());
}

TEST(TwoUnits, NamespaceSaysTheVersion) {
  const std::string version = AMX_SFT_MOE_VERSION_STRING;
  std::string name = "v" + version.substr(0, version.rfind('.'));
  name[name.find('.')] = '_';
  const std::string type = typeid(amx_sft_moe::KernelProvider).name();
  EXPECT_NE(type.find(name + "_timer"), std::string::npos) << type;
}

}  // namespace
}  // namespace sft_test
