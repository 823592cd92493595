// Small integers, where rounding has no say: results equal the reference bit by bit, on every kernel.
#include <gtest/gtest.h>

#include <string>

#include "emulation.hpp"
#include "integers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

template <class Kernel>
class OperatorExact : public KernelTest<Kernel> {
 protected:
  static void expect_exact(const Case& c, const Storage& storage) {
    SCOPED_TRACE(std::string(c.name) + "/" + storage.name);
    const Problem problem = integer_problem(c, storage, kWeightDType<Kernel>);
    const reference::Results want = reference::step(problem.layer(), problem.batch());
    const Outputs got = step_alone<Kernel>(problem);
    for (std::size_t t = 0; t < reference::kTensors; ++t) {
      const Tensor& tensor = got[static_cast<reference::Tensor>(t)];
      const std::vector<double> values = tensor.values();
      ASSERT_EQ(values.size(), want[t].size());
      for (std::size_t n = 0; n < values.size(); ++n) {
        // One line per tensor says enough.
        ASSERT_EQ(values[n], rounded(tensor.dtype(), want[t][n]))
            << reference::kTensorNames[t] << "[" << n << "]";
      }
    }
  }

  static void expect_all_exact(const Storage& storage) {
    for (const Case& c : kCases) {
      const bool too_long = std::is_same_v<Kernel, AmxBf16> && amx_is_emulated() && !c.emulate;
      // Only SiLU has a range of exact values.
      if (c.form != Form::kSilu || too_long) continue;
      expect_exact(c, storage);
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
