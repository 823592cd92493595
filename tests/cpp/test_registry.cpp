// Kernels by name at run time, and the operator without its template parameter.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compare.hpp"
#include "cpuinfo.hpp"
#include "emulation.hpp"
#include "environment.hpp"
#include "refusal.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

// Instantiated once, in moe_<kernel>.cpp: here again they took minutes.
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::PortableBf16>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::PortableFp32>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::Avx2Bf16>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::Avx2Fp32>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::Avx512Bf16>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::Avx512WidenedBf16>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::Avx512Fp32>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::AmxBf16>;
#ifdef SFT_TEST_HAS_ONEDNN
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::OneDnnBf16>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::OneDnnFp32>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::OneDnnWidenedBf16>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::OneDnnAvx2Fp32>;
extern template class amx_sft_moe::AMX_SFT_MOE<sft_test::OneDnnPlainFp32>;
#endif

namespace sft_test {
namespace {

using amx_sft_moe::AnySavedActivations;
using amx_sft_moe::AnySftMoe;
using amx_sft_moe::ArgumentError;
using amx_sft_moe::KernelError;

template <class... Arguments>
auto make_of_listed(const Arguments&... arguments) {
  return amx_sft_moe::make_sft_moe<ListedKernels>(arguments...);
}
std::string resolve_kernel(std::string_view kernel, DType weights) {
  return amx_sft_moe::resolve_kernel<ListedKernels>(kernel, weights);
}

inline constexpr Case kCase{"registry", 9, 2, 3, 17, 33, {4, 5, 6}};
inline constexpr const char* kVariable = "AMX_SFT_MOE_KERNEL";

// The kernel that a name stands for here is the first available of those that share it.
template <class Kernel>
bool is_chosen_by_name() {
  bool found = false;
  bool chosen = false;
  ListedKernels::for_each([&]<class Listed>() {
    const bool same = Listed::kName == Kernel::kName && kWeightDType<Listed> == kWeightDType<Kernel>;
    if (found || !same || !Listed::available()) return;
    found = true;
    chosen = std::is_same_v<Listed, Kernel>;
  });
  return chosen;
}

template <class Kernel>
class Registry : public KernelTest<Kernel> {
 protected:
  void SetUp() override {
    KernelTest<Kernel>::SetUp();
    if (this->IsSkipped() || is_chosen_by_name<Kernel>()) return;
    GTEST_SKIP() << Kernel::kName << " stands for a better kernel of that name on this CPU";
  }
};
TYPED_TEST_SUITE(Registry, AllKernels, KernelLabels);

TYPED_TEST(Registry, OperatorByNameGivesTheSameBits) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  const std::unique_ptr<AnySftMoe> moe = make_of_listed(
      TypeParam::kName, problem.config(), problem.base<typename TypeParam::Weight>(), problem.lora());
  EXPECT_EQ(moe->kernel_name(), TypeParam::kName);
  EXPECT_EQ(moe->weight_dtype(), kWeightDType<TypeParam>);
  EXPECT_EQ(moe->stored_dtype(), amx_sft_moe::kDTypeOf<typename TypeParam::Stored>);
  EXPECT_EQ(moe->config().hidden_size, kCase.hidden);
  Outputs got(problem);
  moe->forward_sft(problem.routing(), problem.x(), got.y(), true);
  EXPECT_EQ(moe->saved_depth(), 1);
  moe->backward(problem.grad_y(), got.gradients());
  EXPECT_EQ(moe->saved_depth(), 0);
  expect_same_bits(want, got);
  EXPECT_FALSE(moe->last_forward().empty());
  EXPECT_FALSE(moe->last_backward().empty());
  EXPECT_NE(moe->backward_text().find("[BWD TIMER] backward_down: "), std::string::npos)
      << moe->backward_text();
  EXPECT_GT(moe->memory().workspace_bytes, 0);
  moe->forward_sft(problem.routing(), problem.x(), got.y());  // saved, as an operator of one kernel does
  EXPECT_EQ(moe->saved_depth(), 1);
  moe->clear();
  EXPECT_EQ(moe->saved_depth(), 0);
}

TYPED_TEST(Registry, CallersBuffersAndWeightsTypedAtRunTime) {
  using Stored = typename TypeParam::Stored;
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const amx_sft_moe::AnyBaseWeights base = problem.base<typename TypeParam::Weight>();
  const std::unique_ptr<AnySftMoe> moe =
      make_of_listed(TypeParam::kName, problem.config(), base, problem.lora());
  EXPECT_EQ(moe->weight_dtype(), kWeightDType<TypeParam>);
  const SavedBuffers<Stored> buffers(problem);
  const AnySavedActivations saved{buffers.gate.matrix_view(), buffers.up.matrix_view(),
                                  buffers.u_gate.matrix_view(), buffers.u_up.matrix_view(),
                                  buffers.u_down.matrix_view()};
  Outputs got(problem);
  moe->forward_sft(problem.routing(), problem.x(), got.y(), saved);
  moe->backward(problem.routing(), problem.x(), saved, problem.grad_y(), got.gradients());
  expect_same_bits(step_alone<TypeParam>(problem), got);

  AnySavedActivations other_type = saved;
  Tensor wrong = Tensor::matrix(moe->stored_dtype() == DType::kBf16 ? DType::kFp32 : DType::kBf16,
                                routed_rows(problem), kCase.intermediate);
  other_type.up = wrong.matrix_view();
  expect_refused<ArgumentError>([&] { moe->forward_sft(problem.routing(), problem.x(), got.y(), other_type); },
                                {"saved.up", "bf16", "fp32"});
}

TYPED_TEST(Registry, WeightsOfTheOtherTypeAreRefused) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const std::unique_ptr<AnySftMoe> moe = make_of_listed(
      TypeParam::kName, problem.config(), problem.base<typename TypeParam::Weight>(), problem.lora());
  const DType other_type = kWeightDType<TypeParam> == DType::kBf16 ? DType::kFp32 : DType::kBf16;
  const Problem other = random_problem(kCase, kPlain, other_type);
  const auto set_other = [&] {
    if (other_type == DType::kBf16) return moe->set_base(other.base<bf16>());
    moe->set_base(other.base<float>());
  };
  expect_refused<ArgumentError>(set_other, {"weights", "bf16", "fp32"});
  Outputs got(problem);
  moe->forward_sft(problem.routing(), problem.x(), got.y(), true);
  moe->backward(problem.grad_y(), got.gradients());
  expect_same_bits(step_alone<TypeParam>(problem), got);
}

TYPED_TEST(Registry, IsListedAndChosenByTheVariable) {
  bool listed = false;
  for (const auto& info : amx_sft_moe::list_kernels<ListedKernels>()) {
    if (info.name != TypeParam::kName || info.weights != kWeightDType<TypeParam>) continue;
    listed = true;
    EXPECT_TRUE(info.available);
    EXPECT_TRUE(info.why_not.empty());
  }
  EXPECT_TRUE(listed);
  const std::string name(TypeParam::kName);
  const Variable variable(kVariable, name);
  EXPECT_EQ(resolve_kernel("auto", kWeightDType<TypeParam>), name);
  // An argument goes before the variable.
  EXPECT_EQ(resolve_kernel("portable", kWeightDType<TypeParam>), "portable");
}

TEST(RegistryOfKernels, AutoIsTheFirstAvailable) {
  const Variable none(kVariable, std::nullopt);
  for (const DType weights : {DType::kBf16, DType::kFp32}) {
    std::string first;
    for (const auto& info : amx_sft_moe::list_kernels<ListedKernels>()) {
      if (first.empty() && info.available && info.weights == weights) first = info.name;
      EXPECT_EQ(info.available, info.why_not.empty()) << info.name;
    }
    EXPECT_EQ(resolve_kernel("auto", weights), first);
  }
  const Variable empty(kVariable, "");
  EXPECT_NO_THROW(resolve_kernel("auto", DType::kBf16));
}

template <class List>
std::vector<std::string_view> order_on(const amx_sft_moe::CpuFeatures& cpu, DType weights) {
  std::vector<std::string_view> names;
  const auto of_these = [weights](std::string_view, DType of) { return of == weights; };
  for (const auto& info : amx_sft_moe::registry::kernels_that_are<List>(of_these, cpu))
    names.push_back(info.name);
  return names;
}

TEST(RegistryOfKernels, OrderOnEitherVendorsCpu) {
  using Names = std::vector<std::string_view>;
  using List = amx_sft_moe::DefaultKernels;
  const amx_sft_moe::CpuFeatures amd, intel{.slow_dpbf16 = true};
  EXPECT_EQ(order_on<List>(amd, DType::kBf16),
            (Names{"amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"}));
  EXPECT_EQ(order_on<List>(intel, DType::kBf16),
            (Names{"amx_bf16", "avx512", "avx512_bf16", "avx2", "portable"}));
  for (const auto& cpu : {amd, intel}) {
    EXPECT_EQ(order_on<List>(cpu, DType::kFp32), (Names{"avx512", "avx2", "portable"}));
  }
}

// Whichever of the two a list of one's own names first.
TEST(RegistryOfKernels, FmaGoesBeforeSlowDotProducts) {
  using amx_sft_moe::kernels::Avx512Bf16, amx_sft_moe::kernels::KernelList;
  using Fma = amx_sft_moe::kernels::Avx512<amx_sft_moe::bf16>;
  for (const bool slow : {false, true}) {
    const amx_sft_moe::CpuFeatures cpu{.slow_dpbf16 = slow};
    EXPECT_EQ((order_on<KernelList<Fma, Avx512Bf16>>(cpu, DType::kBf16).front()), Fma::kName);
    EXPECT_EQ((order_on<KernelList<Avx512Bf16, Fma>>(cpu, DType::kBf16).front()),
              slow ? Fma::kName : Avx512Bf16::kName);
  }
}

TEST(RegistryOfKernels, OrderIsThatOfThisCpusVendor) {
  const auto vendor = cpuinfo("vendor_id");
  if (!vendor) GTEST_SKIP() << "/proc/cpuinfo names no vendor";
  const bool intel = *vendor == "GenuineIntel";
  EXPECT_EQ(amx_sft_moe::arch::cpu_features().slow_dpbf16, intel);
  EXPECT_EQ(amx_sft_moe::list_kernels()[1].name, intel ? "avx512" : "avx512_bf16");
}

TEST(RegistryOfKernels, UnknownNamesAreRefusedWithThoseAvailable) {
  expect_refused<KernelError>([] { resolve_kernel("amx_fp64", DType::kBf16); },
                              {"kernel", "portable", "amx_fp64"});
  const Variable variable(kVariable, "nonsense");
  expect_refused<KernelError>([] { resolve_kernel("auto", DType::kFp32); },
                              {kVariable, "portable", "nonsense"});
  EXPECT_EQ(resolve_kernel("portable", DType::kFp32), "portable");
}

// Whether or not the CPU has them: neither a conversion nor another kernel.
TEST(RegistryOfKernels, Fp32WeightsAreRefusedByTheKernelsOfBf16) {
  const Problem problem = random_problem(kCase, kPlain, DType::kFp32);
  for (const std::string name : {"amx_bf16", "avx512_bf16"}) {
    const Complaint complaint{"kernel", "portable", name + ": it does not take fp32 weights"};
    expect_refused<KernelError>([&] { resolve_kernel(name, DType::kFp32); }, complaint);
    expect_refused<KernelError>(
        [&] { make_of_listed(name, problem.config(), problem.base<float>(), problem.lora()); }, complaint);
    const Variable variable(kVariable, name);
    expect_refused<KernelError>([] { resolve_kernel("auto", DType::kFp32); },
                                {kVariable, "portable", complaint.got});
  }
}

TEST(RegistryOfKernels, AbsentKernelIsRefusedWithThoseAvailable) {
  const WithoutEmulation real;  // so that a kernel is missing on every CPU but those with all of AMX
  int absent = 0;
  for (const auto& info : amx_sft_moe::list_kernels<ListedKernels>()) {
    if (info.available) continue;
    ++absent;
    const std::string name(info.name);
    expect_refused<KernelError>([&] { resolve_kernel(name, info.weights); }, {"kernel", "portable", name});
    expect_refused<KernelError>([&] { resolve_kernel(name, info.weights); }, {name, info.why_not, ""});
  }
  if (absent == 0) GTEST_SKIP() << "this CPU has every kernel";
}

// As AMX's would ask the operating system for its permission, which changes what the process may do afterwards.
struct CountsQuestions {
  static constexpr std::string_view kName = "counts_questions";
  using Weight = bf16;
  static inline int asked = 0;
  static std::string refusal() {
    ++asked;
    return {};
  }
};

TEST(ResolveKernel, AsksNoKernelThatIsNotWanted) {
  using amx_sft_moe::kernels::KernelList;
  using List =
      KernelList<CountsQuestions, amx_sft_moe::kernels::Portable<bf16>, amx_sft_moe::kernels::Portable<float>>;
  const Variable unset(kVariable, "");
  EXPECT_EQ(amx_sft_moe::resolve_kernel<List>("portable", DType::kBf16), "portable");
  EXPECT_EQ(amx_sft_moe::resolve_kernel<List>("auto", DType::kFp32), "portable");
  {
    const Variable named(kVariable, "portable");
    EXPECT_EQ(amx_sft_moe::resolve_kernel<List>("auto", DType::kBf16), "portable");
  }
  EXPECT_EQ(CountsQuestions::asked, 0);
  EXPECT_EQ(amx_sft_moe::resolve_kernel<List>("auto", DType::kBf16), "counts_questions");
  EXPECT_EQ(CountsQuestions::asked, 1);
}

}  // namespace
}  // namespace sft_test
