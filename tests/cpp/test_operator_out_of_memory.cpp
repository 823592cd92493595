// Every allocation that an operator makes may fail, on whichever thread: the call throws std::bad_alloc, the
// object is as before, the same call succeeds when there is memory again, and nothing is leaked. With kernel onednn
// this goes for oneDNN's own allocations too, but for what oneDNN then leaks or locks itself (below).
#include <gtest/gtest.h>

#include <memory>
#include <new>

#include "allocation_counter.hpp"
#include "compare.hpp"
#include "environment.hpp"
#include "integers.hpp"
#include "saved_buffers.hpp"
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
  // needs no further; of oneDNN's tens of thousands, more where threads share the tasks more evenly, each 53rd. After
  // each call that throws `expect_unharmed(moe)` is called, after each that does without the memory
  // `expect_done(moe)`. Returns how many allocations there were.
  template <class Make, class Call, class Check, class Done>
  static int fail_each_allocation(Make&& make, Call&& call, Check&& expect_unharmed, Done&& expect_done) {
    for (int at = 0; at < 200000; at += kIsOneDnn<Kernel> ? 53 : 1) {
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

// Both passes, so that of each the first call with memory again finds what one without it left.
TYPED_TEST(OperatorOutOfMemory, WithActivationsOfTheCaller) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  const SavedBuffers<typename TypeParam::Stored> saved(problem);
  Outputs got(problem);
  const auto routing = problem.routing();
  const auto grads = got.gradients();
  const auto step = [&](auto& moe) {
    got.poison();
    moe.forward_sft(routing, problem.x(), got.y(), saved.view());
    moe.backward(routing, problem.x(), saved.view(), problem.grad_y(), grads);
  };
  const int allocations = this->fail_each_allocation([&] { return make_moe<TypeParam>(problem); }, step,
                                                     [&](auto& moe) {
                                                       EXPECT_EQ(moe.saved_depth(), 0);
                                                       step(moe);
                                                       expect_same_bits(want, got);
                                                     },
                                                     [&](const auto&) { expect_same_bits(want, got); });
  EXPECT_GT(allocations, 5) << "a fresh operator has buffers to make";
}

// What of a workspace had grown when a layer ran out of memory is no worse for the layer it is shared with.
TYPED_TEST(OperatorOutOfMemory, InASharedWorkspace) {
  using Weight = typename TypeParam::Weight;
  const Problem large = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Problem small = random_problem({"small", 5, 2, 3, 17, 9, {3, 3, 3}}, kPlain, kWeightDType<TypeParam>);
  const Outputs want_large = step_alone<TypeParam>(large), want_small = step_alone<TypeParam>(small);
  Outputs of_large(large), of_small(small);
  const auto routing = large.routing();
  struct Layers {
    Moe<TypeParam> large, small;
  };
  const auto make = [&] {
    const auto workspace = std::make_shared<amx_sft_moe::Workspace>();
    Layers layers{Moe<TypeParam>(large.config(), large.base<Weight>(), large.lora(), workspace),
                  Moe<TypeParam>(small.config(), small.base<Weight>(), small.lora(), workspace)};
    run_step(layers.small, small, of_small);
    return layers;
  };
  const auto expect_both = [&](Layers& layers) {
    of_small.poison();
    of_large.poison();
    run_step(layers.small, small, of_small);
    run_step(layers.large, large, of_large);
    expect_same_bits(want_small, of_small);
    expect_same_bits(want_large, of_large);
  };
  const int allocations = this->fail_each_allocation(
      make, [&](Layers& layers) { layers.large.forward_sft(routing, large.x(), of_large.y(), false); },
      expect_both, expect_both);
  EXPECT_GT(allocations, 5) << "a larger layer has buffers to grow";
}

TYPED_TEST(OperatorOutOfMemory, InSetters) {
  using Weight = typename TypeParam::Weight;
  const Problem before = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Problem problem = integer_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  Outputs got(problem);
  const auto base = problem.base<Weight>();
  const auto lora = problem.lora();
  const auto set = [&](auto& moe) {
    moe.set_base(base);
    moe.set_lora(lora);
    moe.set_name("a name that is longer than what a string has room for without an allocation");
  };
  const auto expect_set = [&](auto& moe) {
    run_step(moe, problem, got);
    expect_same_bits(want, got);
  };
  this->fail_each_allocation([&] { return make_moe<TypeParam>(before); }, set,
                             [&](auto& moe) {
                               set(moe);
                               expect_set(moe);
                             },
                             expect_set);
}

TYPED_TEST(OperatorOutOfMemory, InAConstructor) {
  const Problem problem = random_problem(kCase, kPlain, kWeightDType<TypeParam>);
  const std::int64_t live = live_allocations();
  int allocations = 0;
  for (bool failed = true; failed; ++allocations) {
    const FailingAllocation failing(allocations);
    failed = false;
    try {
      const Moe<TypeParam> moe = make_moe<TypeParam>(problem);
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
