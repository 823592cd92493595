// Same inputs, same kernel: same bits. For any number of threads, on repetition, and whatever ran before.
#include <gtest/gtest.h>
#include <xmmintrin.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <string>

#include "compare.hpp"
#include "environment.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::Config;

// More blocks than threads and fewer, skewed and balanced, with and without a tail in each dimension.
inline constexpr Case kCasesOfThreads[] = {
    {"balanced", 40, 2, 4, 64, 96, {16, 16, 16}},
    {"skewed", 61, 3, 5, 37, 53, {7, 3, 5}, kSkewed},
    {"one_expert", 50, 1, 8, 97, 33, {4, 4, 4}, kOneExpert},
    {"single_task", 1, 1, 1, 16, 16, {1, 1, 1}},
    {"shared_a", 20, 2, 3, 48, 64, {8, 8, 8}, kDistinct, true},
    {"many_experts", 9, 2, 32, 32, 17, {4, 4, 4}},
    {"columns_cut_by_threads", 24, 2, 8, 1100, 600, {4, 4, 4}},  // tasks of 1024, 512 and 256 columns
    {"few_tokens_wide_ranks", 24, 4, 8, 700, 300, {20, 33, 17}},
    {"sixteen_tokens", 16, 1, 1, 2100, 200, {7, 0, 66}},
    {"h_of_several_tasks", 15, 1, 1, 200, 2300, {66, 7, 5}},
    {"whole_strips", 150, 1, 1, 545, 290, {8, 8, 8}},
    {"rows_past_one_cache", 300, 1, 1, 8192, 16, {4, 4, 4}},  // 10 MB, more than L2 of one thread four times
    {"saved_past_one_cache", 300, 1, 1, 16, 8192, {4, 4, 4}},
    with_trained_base({"base", 61, 3, 5, 37, 53, {7, 3, 5}, kSkewed}),
    with_trained_base({"base_columns_cut_by_threads", 70, 1, 2, 1088, 576, {0, 0, 0}}),
    with_trained_base(with_biases({"in_chunks", 530, 1, 2, 8, 5, {4, 3, 2}, kOneExpert})),
};

template <class Kernel>
class OperatorDeterminism : public KernelTest<Kernel> {
 protected:
  static Config with_threads(const Problem& problem, int threads) {
    Config config = problem.config();
    config.num_threads = threads;
    return config;
  }
};
TYPED_TEST_SUITE(OperatorDeterminism, AllKernels, KernelLabels);

TYPED_TEST(OperatorDeterminism, AnyNumberOfThreads) {
  for (const Case& c : kCasesOfThreads) {
    for (const Storage& storage : {kPlain, kMixed}) {
      const Problem problem = random_problem(c, storage, kWeightDType<TypeParam>);
      const Outputs alone = step_alone<TypeParam>(problem, this->with_threads(problem, 1));
      for (const int threads : {2, 3, 5, 16}) {
        SCOPED_TRACE(std::string(c.name) + "/" + storage.name + " on " + std::to_string(threads) + " threads");
        expect_same_bits(alone, step_alone<TypeParam>(problem, this->with_threads(problem, threads)));
      }
    }
  }
}

#ifdef _OPENMP
TYPED_TEST(OperatorDeterminism, ThreadsOfOpenMpAtTheTimeOfTheCall) {
  const Problem problem = random_problem(kCasesOfThreads[0], kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem, this->with_threads(problem, 1));
  Moe<TypeParam> moe = make_moe<TypeParam>(problem, this->with_threads(problem, 0));
  const int before = omp_get_max_threads();
  std::size_t most = 0;  // of the calls so far: their room for threads is kept
  for (const int threads : {1, 4, 3}) {
    most = std::max(most, static_cast<std::size_t>(threads));
    omp_set_num_threads(threads);
    Outputs got(problem);
    run_step(moe, problem, got);
    expect_same_bits(want, got);
    std::size_t team = 0;
    for (const auto& region : moe.last_forward().regions()) team = std::max(team, region.threads.size());
    EXPECT_EQ(most, team);
  }
  omp_set_num_threads(before);
}
#endif

TYPED_TEST(OperatorDeterminism, Repetition) {
  const Problem problem = random_problem(kCasesOfThreads[1], kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  for (int n = 0; n < 10; ++n) {
    SCOPED_TRACE(n);
    Outputs got(problem);
    run_step(moe, problem, got);
    expect_same_bits(want, got);
  }
}

// Whatever an earlier call left in the workspace: larger, smaller and empty batches in between.
TYPED_TEST(OperatorDeterminism, WhateverRanBefore) {
  const Case c{"c", 20, 2, 4, 67, 53, {7, 7, 7}};
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  unsigned seed = 10;
  for (const int tokens : {47, 1, 0, 33}) {
    const Problem other = another_batch(problem, c, tokens, seed++);
    Outputs between(other);
    run_step(moe, other, between);
    Outputs got(problem);
    run_step(moe, problem, got);
    SCOPED_TRACE("after " + std::to_string(tokens) + " tokens");
    expect_same_bits(want, got);
    expect_same_bits(step_alone<TypeParam>(other), between);
  }
}

// A caller who hunts denormals, overflows and invalid operations (feenableexcept), from the copy of x to the dump.
TYPED_TEST(OperatorDeterminism, WhateverTrapsAreOpen) {
  constexpr unsigned kTraps = 0x1F80, kFlags = 0x3F;  // of MXCSR; a trap is masked where its bit is set
  const Problem random = random_problem(kCasesOfThreads[1], kWide, kWeightDType<TypeParam>);
  reference::Batch batch = random.batch();
  batch.x[0] = 1e-40;
  const Problem problem(kWide, kWeightDType<TypeParam>, random.layer(), batch);
  const Outputs want = step_alone<TypeParam>(problem);
  const Variable form("AMX_SFT_MOE_TIMER", "json"),
      file("AMX_SFT_MOE_TIMER_FILE", fresh_file("traps").string());
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  const Outputs got(problem);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before & ~kTraps);
  run_step(moe, problem, got);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  expect_same_bits(want, got);
  EXPECT_EQ(after & ~kFlags, before & ~kTraps & ~kFlags) << "the caller's are his again";
}

}  // namespace
}  // namespace sft_test
