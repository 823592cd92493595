// Every case of cases.hpp, in four ways of storing things, on every kernel, against the float64 reference. The
// tests are named after kernel, case and storage: OperatorCases_avx512_bf16_bf16.rows_17/fp32_fused_strided.
#include <gtest/gtest.h>

#include <string>

#include "compare.hpp"
#include "emulation.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

template <class Kernel>
class CaseTest : public KernelTest<Kernel> {
 public:
  CaseTest(const Case& c, const Storage& storage) : case_(c), storage_(storage) {}

  void TestBody() override {
    if (std::is_same_v<Kernel, AmxBf16> && amx_is_emulated() && !case_.emulate) {
      GTEST_SKIP() << "too many tile instructions to emulate";
    }
    const Problem problem = random_problem(case_, storage_, kWeightDType<Kernel>);
    expect_close(expected_step(problem), step_alone<Kernel>(problem));
  }

 private:
  Case case_;
  Storage storage_;
};

template <class Kernel>
bool register_cases() {
  static const std::string suite = "OperatorCases_" + kernel_label<Kernel>();
  for (const Case& c : kCases) {
    for (const Storage& storage : {kPlain, kWide, kPeftLike, kMixed}) {
      const std::string name = std::string(c.name) + "/" + storage.name;
      testing::RegisterTest(suite.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                            [c, storage]() -> KernelTest<Kernel>* { return new CaseTest<Kernel>(c, storage); });
    }
  }
  return true;
}

template <class... Kernels>
bool register_all(testing::Types<Kernels...>) {
  return (register_cases<Kernels>() && ...);
}
const bool kRegistered = register_all(AllKernels{});

// Activations of one type and outputs of another: every view says its own type.
template <class Kernel>
class OperatorMixedTypes : public KernelTest<Kernel> {};
TYPED_TEST_SUITE(OperatorMixedTypes, AllKernels, KernelLabels);

TYPED_TEST(OperatorMixedTypes, EachViewHasItsOwnType) {
  const Case c{"mixed", 13, 2, 3, 37, 29, {5, 5, 5}};
  const Storage narrow{.name = "bf16", .activations = DType::kBf16, .factors = DType::kBf16};
  const Storage wide{.name = "fp32", .activations = DType::kFp32, .factors = DType::kFp32};
  const Problem from_narrow = random_problem(c, narrow, kWeightDType<TypeParam>);
  // The same bf16 values, but x in bf16 with grad_y, y and grad_x in fp32.
  const Problem to_wide(wide, kWeightDType<TypeParam>, from_narrow.layer(), from_narrow.batch());
  const Outputs want = step_alone<TypeParam>(from_narrow);
  Outputs got(to_wide);
  Moe<TypeParam> moe = make_moe<TypeParam>(from_narrow);
  moe.forward_sft(from_narrow.routing(), from_narrow.x(), got.y());
  amx_sft_moe::Gradients grads = got.gradients();
  Outputs narrow_factors(from_narrow);
  grads.lora = narrow_factors.lora_gradients();
  moe.backward(to_wide.grad_y(), grads);

  const Expected expected = expected_step(from_narrow);
  expect_close(expected, reference::kY, got[reference::kY]);
  expect_close(expected, reference::kGradX, got[reference::kGradX]);
  expect_close(expected, reference::kGradW, got[reference::kGradW]);
  EXPECT_EQ(want[reference::kDownA].bits(), narrow_factors[reference::kDownA].bits());
  // The narrow result is the wide one, rounded once.
  const std::vector<double> exact = got[reference::kY].values();
  const std::vector<double> rounded_once = want[reference::kY].values();
  for (std::size_t n = 0; n < exact.size(); ++n) {
    ASSERT_EQ(reference::round_to_bf16(exact[n]), rounded_once[n]) << "y[" << n << "]";
  }
}

}  // namespace
}  // namespace sft_test
