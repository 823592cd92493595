// Every allocation that an operator makes may fail, on whichever thread: the call throws std::bad_alloc, the
// object is as before, the same call succeeds when there is memory again, and nothing is leaked. With kernel onednn
// this goes for oneDNN's own allocations too, but for what oneDNN then leaks or locks itself (below).
#include <gtest/gtest.h>

#include <new>

#include "allocation_counter.hpp"
#include "compare.hpp"
#include "environment.hpp"
#include "step.hpp"

#ifdef SFT_TEST_HAS_ONEDNN
// What AddressSanitizer's leak checker shall not report: see live_allocations_of_ours().
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libdnnl";
}
#endif

namespace sft_test {
namespace {

inline constexpr Case kCase = with_trained_base(with_biases({"out_of_memory", 33, 2, 4, 37, 53, {7, 3, 5}}));

template <class Kernel>
class OperatorOutOfMemory : public KernelTest<Kernel> {
 protected:
#ifdef SFT_TEST_HAS_ONEDNN
  // oneDNN's cache, one for the whole process, does not survive: where an allocation fails while 2.6.3 compiles into
  // it, it may stay locked, and the next product waits for ever, or keep a broken promise, which is all that the same
  // product gets from then on (std::future_error). Without it each operator here compiles its own.
  void SetUp() override {
    KernelTest<Kernel>::SetUp();
    if (kIsOneDnn<Kernel>) dnnl::set_primitive_cache_capacity(0);
  }
#endif

  // Runs `call` on a fresh operator from `make` with its first, second, ... allocation failing, until one run
  // needs no further; of oneDNN's thousands each 53rd. After each call that throws `expect_unharmed(moe)` is called,
  // after each that does without the memory `expect_done(moe)`. Returns how many allocations there were.
  template <class Make, class Call, class Check, class Done>
  static int fail_each_allocation(Make&& make, Call&& call, Check&& expect_unharmed, Done&& expect_done) {
    for (int at = 0; at < 20000; at += kIsOneDnn<Kernel> ? 53 : 1) {
      SCOPED_TRACE(at);
      const std::int64_t live = live_allocations_of_ours();
      {
        auto moe = make();
        bool failed = false, thrown = false;
        {
          const FailingAllocation failing(at);
          try {
            call(moe);
          } catch (const std::bad_alloc&) {
            thrown = true;
          }
          failed = failing.failed();
        }
        if (!failed) return at;
        thrown ? expect_unharmed(moe) : expect_done(moe);
        if (testing::Test::HasFailure()) return at;
      }
      EXPECT_EQ(live_allocations_of_ours(), live) << "leaked";
    }
    ADD_FAILURE() << "no end of allocations";
    return 0;
  }

 private:
  // oneDNN loses 2 to 10 small objects of its own where one of its own allocations fails (seen with 2.6.3). It makes
  // no aligned ones, and the operator's buffers are all aligned.
  static std::int64_t live_allocations_of_ours() {
    return kIsOneDnn<Kernel> ? live_aligned_allocations() : live_allocations();
  }
};
TYPED_TEST_SUITE(OperatorOutOfMemory, AllKernels, KernelLabels);

TYPED_TEST(OperatorOutOfMemory, InAForward) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Outputs got(problem);
  const auto routing = problem.routing();
  const int allocations = this->fail_each_allocation([&] { return make_moe<TypeParam>(problem); },
                                                     [&](auto& moe) {
                                                       got.poison();  // nothing of the run before may count
                                                       moe.forward_sft(routing, problem.x(), got.y());
                                                     },
                                                     [&](auto& moe) {
                                                       EXPECT_EQ(moe.saved_depth(), 0);
                                                       got.poison();
                                                       run_step(moe, problem, got);
                                                       expect_same_bits(want, got);
                                                     },
                                                     [&](auto& moe) {
                                                       EXPECT_EQ(moe.saved_depth(), 1);
                                                       moe.backward(problem.grad_y(), got.gradients());
                                                       expect_same_bits(want, got);
                                                     });
  EXPECT_GT(allocations, 5) << "a fresh operator has buffers to make";
}

TYPED_TEST(OperatorOutOfMemory, InAConstructor) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const std::int64_t live = live_allocations();
  int allocations = 0;
  for (bool failed = true; failed; ++allocations) {
    const FailingAllocation failing(allocations);
    failed = false;
    try {
      make_moe<TypeParam>(problem);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  }
  EXPECT_EQ(live_allocations(), live) << "leaked";
  EXPECT_GT(allocations, 2);
}

TYPED_TEST(OperatorOutOfMemory, InABackward) {
  const Variable form("AMX_SFT_MOE_TIMER", "text"), file("AMX_SFT_MOE_TIMER_FILE", "/dev/null");
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Outputs got(problem);
  const auto routing = problem.routing();
  const auto grads = got.gradients();
  const Outputs forward(problem);  // whose y is not looked at
  const auto expect_gradients = [&] {
    got[reference::kY].store(want[reference::kY].values());
    expect_same_bits(want, got);
  };
  const int allocations = this->fail_each_allocation(
      [&] {
        Moe<TypeParam> moe = make_moe<TypeParam>(problem);
        moe.forward_sft(routing, problem.x(), forward.y());
        return moe;
      },
      [&](auto& moe) {
        got.poison();  // nothing of the run before may count
        moe.backward(problem.grad_y(), grads);
      },
      [&](auto& moe) {
        ASSERT_EQ(moe.saved_depth(), 1) << "the entry is lost";
        got.poison();
        moe.backward(problem.grad_y(), grads);
        expect_gradients();
      },
      [&](const auto& moe) {
        EXPECT_EQ(moe.saved_depth(), 0);
        expect_gradients();
      });
  EXPECT_GT(allocations, 5) << "the first backward has buffers to make";
}

}  // namespace
}  // namespace sft_test
