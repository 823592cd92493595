// The kernels named onednn that the suite over all kernels leaves out (moe.hpp): bf16 weights widened to fp32 products,
// with AVX512's row operations and with those of any CPU. Exact on integers, as test_operator_exact.cpp has it.
#include <gtest/gtest.h>

#include <string>

#include "compare.hpp"
#include "integers.hpp"
#include "moe_definition.hpp"  // the operator of these two is in no file of tests/support
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::bf16;
using amx_sft_moe::kernels::OneDnn;
using Variants = testing::Types<OneDnn<bf16, amx_sft_moe::kernels::OneDnnWithAvx512>,
                                OneDnn<bf16, amx_sft_moe::kernels::OneDnnAnywhere>>;

template <class Kernel>
class OneDnnVariants : public KernelTest<Kernel> {};
TYPED_TEST_SUITE(OneDnnVariants, Variants, KernelLabels);

TYPED_TEST(OneDnnVariants, StepsAreExact) {
  for (const Case& c : {with_trained_base(with_biases({"primes", 33, 3, 5, 37, 53, {7, 3, 5}})),
                        Case{"many_rows", 521, 1, 2, 8, 5, {4, 0, 2}, kOneExpert}}) {
    for (const Storage& storage : {kPlain, kWide, kPeftLike}) {
      SCOPED_TRACE(std::string(c.name) + "/" + storage.name);
      const Problem problem = integer_problem(c, storage, kWeightDType<TypeParam>);
      expect_exact(problem, step_alone<TypeParam>(problem));
    }
  }
}

}  // namespace
}  // namespace sft_test
