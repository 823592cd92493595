// Small integers, where rounding has no say: results equal the reference bit by bit, on every kernel.
#include <gtest/gtest.h>

#include <string>

#include "compare.hpp"
#include "emulation.hpp"
#include "integers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

template <class Kernel>
class OperatorExact : public KernelTest<Kernel> {
 protected:
  static void expect_all_exact(const Storage& storage) {
    for (const Case& c : kCases) {
      const bool too_long = std::is_same_v<Kernel, AmxBf16> && amx_is_emulated() && !c.emulate;
      // Only SiLU has a range of exact values.
      if (c.form != Form::kSilu || too_long) continue;
      SCOPED_TRACE(std::string(c.name) + "/" + storage.name);
      const Problem problem = integer_problem(c, storage, kWeightDType<Kernel>);
      expect_exact(problem, step_alone<Kernel>(problem));
    }
  }
};
TYPED_TEST_SUITE(OperatorExact, AllKernels, KernelLabels);

TYPED_TEST(OperatorExact, Bf16Everything) {
  this->expect_all_exact(kPlain);
}
TYPED_TEST(OperatorExact, Fp32FusedStrided) {
  this->expect_all_exact(kWide);
}
TYPED_TEST(OperatorExact, PeftPerExpert) {
  this->expect_all_exact(kPeftLike);
}

}  // namespace
}  // namespace sft_test
