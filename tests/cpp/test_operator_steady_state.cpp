// What a step costs beside arithmetic: synchronisation points, and no allocation once buffers have grown.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "allocation_counter.hpp"
#include "openmp_counter.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

inline constexpr std::size_t kMostInForward = 4;
inline constexpr std::size_t kMostInBackward = 5;

inline constexpr Case kCasesOfSteps[] = {
    {"usual", 33, 2, 4, 64, 96, {16, 16, 16}},
    {"primes", 33, 3, 5, 37, 53, {7, 3, 5}},
    {"no_lora", 33, 2, 4, 64, 96, {0, 0, 0}},
    {"shared_a", 20, 2, 3, 48, 64, {8, 8, 8}, kDistinct, true},
    {"skewed", 33, 2, 4, 64, 96, {8, 8, 8}, kSkewed},
    {"panels_then_rows", 16, 1, 1, 2100, 200, {7, 0, 66}},
    {"one_token", 1, 1, 8, 64, 96, {8, 8, 8}},
    {"clamped", 20, 2, 3, 48, 64, {8, 8, 8}, kDistinct, false, kClamped},
    with_trained_base({"base", 11, 2, 3, 33, 17, {3, 3, 3}, kSkewed}),
    with_trained_base(with_biases({"in_chunks", 514, 1, 2, 8, 5, {4, 3, 2}, kOneExpert})),
};

template <class Kernel>
class OperatorSteadyState : public KernelTest<Kernel> {};
TYPED_TEST_SUITE(OperatorSteadyState, AllKernels, KernelLabels);

TEST(AllocationCounter, Counts) {
  const std::int64_t before = allocation_count();
  // Volatile, so that the compiler does not remove the pair.
  int* volatile kept = new int;
  delete kept;
  EXPECT_EQ(allocation_count() - before, 1);
}

TYPED_TEST(OperatorSteadyState, SynchronisesRarely) {
  for (const Case& c : kCasesOfSteps) {
    for (const Storage& storage : {kPlain, kWide}) {
      SCOPED_TRACE(std::string(c.name) + "/" + storage.name);
      const Problem problem = random_problem(c, storage, kWeightDType<TypeParam>);
      Moe<TypeParam> moe = make_moe<TypeParam>(problem);
      const Outputs out(problem);
      const std::int64_t start = sync_point_count();
      moe.forward_sft(problem.routing(), problem.x(), out.y());
      const std::int64_t middle = sync_point_count();
      moe.backward(problem.grad_y(), out.gradients());
      const std::int64_t end = sync_point_count();
      EXPECT_LE(moe.last_forward().sync_points(), kMostInForward);
      EXPECT_LE(moe.last_backward().sync_points(), kMostInBackward);
      EXPECT_GE(moe.last_forward().sync_points(), 1U);
      if (!can_count_sync_points()) continue;
      // What the record says is what happened.
      EXPECT_EQ(middle - start, static_cast<std::int64_t>(moe.last_forward().sync_points()));
      EXPECT_EQ(end - middle, static_cast<std::int64_t>(moe.last_backward().sync_points()));
    }
  }
}

TYPED_TEST(OperatorSteadyState, AllocatesNothing) {
  if (kIsOneDnn<TypeParam>) GTEST_SKIP() << "oneDNN itself allocates in each execution of a primitive";
  for (const Case& c : kCasesOfSteps) {
    SCOPED_TRACE(c.name);
    const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    const Outputs out(problem);
    const SavedBuffers<typename TypeParam::Stored> saved(problem);
    const auto routing = problem.routing();
    const auto grads = out.gradients();
    const auto step = [&] {
      moe.forward_sft(routing, problem.x(), out.y());
      moe.backward(problem.grad_y(), grads);
      moe.forward_sft(routing, problem.x(), out.y(), false);
      moe.forward_sft(routing, problem.x(), out.y(), saved.view());
      moe.backward(routing, problem.x(), saved.view(), problem.grad_y(), grads);
    };
    step();
    // Many, because which thread takes which task changes: a thread's first task of a kind must not allocate
    // either.
    const std::int64_t before = allocation_count();
    for (int n = 0; n < 12; ++n) step();
    EXPECT_EQ(allocation_count() - before, 0);
  }
}

// Spans have their room, which depends on the work alone.
TYPED_TEST(OperatorSteadyState, AllocatesNothingWhileItRecordsSpans) {
  if (kIsOneDnn<TypeParam>) GTEST_SKIP() << "oneDNN itself allocates in each execution of a primitive";
  const Case c{"spans", 33, 2, 4, 64, 96, {8, 8, 8}};
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  amx_sft_moe::Config config = problem.config();
  config.record_spans = true;
  Moe<TypeParam> moe = make_moe<TypeParam>(problem, config);
  const Outputs out(problem);
  run_step(moe, problem, out);
  const std::int64_t before = allocation_count();
  for (int n = 0; n < 12; ++n) run_step(moe, problem, out);
  EXPECT_EQ(allocation_count() - before, 0);
  for (const auto& region : moe.last_backward().regions()) {
    std::size_t spans = 0;
    for (std::size_t t = 0; t < region.threads.size(); ++t) {
      spans += region.spans_of(t).size();
      EXPECT_EQ(region.threads[t].spans_dropped, 0);
    }
    EXPECT_GT(spans, 0U);
  }
}

// Nor does anything pile up, of oneDNN's compiled products for example, which are part of the count.
TYPED_TEST(OperatorSteadyState, WorkspaceStaysAsLarge) {
  for (const Case& c : kCasesOfSteps) {
    SCOPED_TRACE(c.name);
    const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    const Outputs out(problem);
    run_step(moe, problem, out);
    const auto bytes = moe.memory().workspace_bytes;
    for (int n = 0; n < 12; ++n) run_step(moe, problem, out);
    EXPECT_EQ(moe.memory().workspace_bytes, bytes);
  }
}

// What each further thread takes does not depend on how many tokens an expert has.
TYPED_TEST(OperatorSteadyState, MemoryOfAThreadHasABound) {
  const auto bytes_of_a_thread = [](int tokens) {
    const Case c = with_trained_base(with_biases({"c", tokens, 1, 2, 40, 37, {17, 9, 33}, kOneExpert}));
    const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
    std::array<index_t, 2> bytes{};
    for (const int threads : {1, 2}) {
      amx_sft_moe::Config config = problem.config();
      config.num_threads = threads;
      Moe<TypeParam> moe = make_moe<TypeParam>(problem, config);
      run_step(moe, problem, Outputs(problem));
      bytes[static_cast<std::size_t>(threads - 1)] = moe.memory().workspace_bytes;
    }
    return bytes[1] - bytes[0];
  };
  EXPECT_LE(100 * bytes_of_a_thread(2048), 101 * bytes_of_a_thread(1024));  // oneDNN keeps what it compiles
}

// Batches no larger than those before fit what is there, however they are routed, as long as they are multiplied in the same
// ways: the first dot products of an operator make a copy of x for them.
TYPED_TEST(OperatorSteadyState, AllocatesNothingForSmallerBatches) {
  if (kIsOneDnn<TypeParam>) GTEST_SKIP() << "oneDNN itself allocates in each execution of a primitive";
  const Case c = with_trained_base({"c", 40, 2, 4, 37, 53, {7, 7, 7}});
  const Problem large = random_problem(c, kPlain, kWeightDType<TypeParam>);
  const Problem small = another_batch(large, c, 11, 5);
  const Outputs of_large(large);
  const Outputs of_small(small);
  Moe<TypeParam> moe = make_moe<TypeParam>(large);
  run_step(moe, large, of_large);
  const std::int64_t before = allocation_count();
  run_step(moe, small, of_small);
  run_step(moe, large, of_large);
  EXPECT_EQ(allocation_count() - before, 0);
}

}  // namespace
}  // namespace sft_test
