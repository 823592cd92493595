// Regions of tasks: every task once, exceptions on the calling thread, the caller's rounding on all threads, and
// the last of several tasks.
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <array>
#include <atomic>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "amx_sft_moe/parallel/tasks.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::index_t;
using amx_sft_moe::parallel::run_tasks;
using amx_sft_moe::parallel::TaskQueue;

constexpr int kThreads = 4;
constexpr unsigned kFlushDenormals = 0x8040;  // FTZ and DAZ
constexpr unsigned kRoundUp = 0x4000;
constexpr unsigned kFlags = 0x3F;

class Caller {
 public:
  explicit Caller(unsigned bits) : before_(_mm_getcsr()) { _mm_setcsr(before_ | bits); }
  ~Caller() { _mm_setcsr(before_); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

 private:
  unsigned before_;
};

// The control bits that each thread of a region has: each makes its worker, whether or not a task is left for it.
std::vector<unsigned> modes_of_the_threads() {
  std::vector<unsigned> modes(kThreads);
  run_tasks(kThreads, kThreads, [&](int thread) {
    modes[static_cast<std::size_t>(thread)] = _mm_getcsr() & ~kFlags;
    return [](index_t) {};
  });
  return modes;
}

TEST(Parallel, EveryTaskOnce) {
  for (const index_t tasks : {0, 1, 3, 1000}) {
    std::vector<std::atomic<int>> times(static_cast<std::size_t>(tasks));
    const auto counting = [&](int) { return [&](index_t task) { ++times[static_cast<std::size_t>(task)]; }; };
    run_tasks(kThreads, tasks, counting);
    run_tasks(kThreads, tasks, counting, tasks / 2);
    for (const auto& count : times) EXPECT_EQ(count, 2);
  }
}

std::vector<index_t> taken(TaskQueue& queue, const std::vector<int>& threads) {
  std::vector<index_t> tasks;
  for (const int thread : threads) tasks.push_back(queue.take(thread));
  return tasks;
}

TEST(Parallel, ProductsAreTakenFromBothEndsAndTheLastTasksInTheirOrder) {
  TaskQueue products(12, 12, 3);  // six from both ends, two for each thread in their order
  EXPECT_EQ(taken(products, {0, 1, 2, 1, 1, 0}), (std::vector<index_t>{0, 5, 1, 4, 3, 2}));
  EXPECT_EQ(taken(products, {1, 1, 0, 2, 2, 1}), (std::vector<index_t>{6, 7, 8, 9, 10, 11}));
  EXPECT_GE(products.take(0), 12);
  EXPECT_GE(products.take(1), 12);
  TaskQueue some(12, 3, 2);
  EXPECT_EQ(taken(some, {1, 0, 1, 1, 0}), (std::vector<index_t>{2, 0, 1, 3, 4}));
}

// OpenMP may grant any part of a team; and few tasks, or no products, are taken in their order.
TEST(Parallel, AnyThreadsTakeAllTasks) {
  TaskQueue by_even(7, 7, 2), by_odd(7, 7, 2), few(3, 3, 2), no_products(7, 0, 2);
  EXPECT_EQ(taken(by_even, std::vector<int>(7, 0)), (std::vector<index_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(taken(by_odd, std::vector<int>(7, 1)), (std::vector<index_t>{2, 1, 0, 3, 4, 5, 6}));
  EXPECT_EQ(taken(few, {1, 1, 0}), (std::vector<index_t>{0, 1, 2}));
  EXPECT_EQ(taken(no_products, {1, 1, 0}), (std::vector<index_t>{0, 1, 2}));
}

// The first task of each of two threads, neither of which takes a second one before the other has its first.
std::array<index_t, 2> first_tasks(index_t tasks, index_t products) {
  std::array<index_t, 2> first{-1, -1};
  std::atomic<int> began{0};
  const auto make_worker = [&](int thread) {
    return [&began, &mine = first.at(static_cast<std::size_t>(thread))](index_t task) {
      if (mine >= 0) return;
      mine = task;
      for (++began; began < 2;) std::this_thread::yield();
    };
  };
  run_tasks(2, tasks, make_worker, products);
  return first;
}

TEST(Parallel, RegionsTakeTheirProductsFromBothEnds) {
  EXPECT_EQ(first_tasks(9, 9), (std::array<index_t, 2>{0, 4}));
  EXPECT_EQ(first_tasks(9, 3), (std::array<index_t, 2>{0, 2}));
  const std::array<index_t, 2> in_order = first_tasks(9, 0);
  EXPECT_EQ(in_order[0] + in_order[1], 1);
}

// On one thread too: there it is certain that the last but one does not see all.
TEST(Parallel, TheLastOfSeveralTasksGoesOnAloneAndSeesWhatTheyWrote) {
  constexpr index_t kTasks = 1000;
  amx_sft_moe::parallel::Countdown left;
  for (const int threads : {1, kThreads}) {
    for (int round = 0; round < 50; ++round) {
      std::vector<index_t> written(kTasks);
      std::atomic<index_t> went_on{0}, seen{0};
      left.reset(kTasks);
      run_tasks(threads, kTasks, [&](int) {
        return [&](index_t task) {
          written[static_cast<std::size_t>(task)] = 1;
          if (!left.finish()) return;
          ++went_on;
          seen = std::accumulate(written.begin(), written.end(), index_t{0});
        };
      });
      ASSERT_EQ(went_on, 1);
      ASSERT_EQ(seen, kTasks);
    }
  }
}

TEST(Parallel, ExceptionsOfAnyPartReachTheCaller) {
  const auto throwing = [](index_t) { throw std::runtime_error("task"); };
  EXPECT_THROW(run_tasks(kThreads, 100, [&](int) { return throwing; }), std::runtime_error);
  const auto broken = [](int) -> void (*)(index_t) { throw std::logic_error("worker"); };
  EXPECT_THROW(run_tasks(kThreads, 100, broken), std::logic_error);
  EXPECT_EQ(modes_of_the_threads()[kThreads - 1], _mm_getcsr() & ~kFlags);  // and the threads go on
}

TEST(Parallel, OfManyExceptionsOneReachesTheCallerWhenAllThreadsAreDone) {
  for (int round = 0; round < 100; ++round) {
    const auto alive = std::make_shared<int>();
    std::vector<std::atomic<bool>> thrown(100);
    int caught = -1;
    try {
      run_tasks(kThreads, 100, [&](int) {
        return [&thrown, held = alive](index_t task) {
          thrown[static_cast<std::size_t>(task)] = true;
          throw static_cast<int>(task);
        };
      });
    } catch (const int task) {
      caught = task;
    }
    ASSERT_GE(caught, 0);
    EXPECT_TRUE(thrown[static_cast<std::size_t>(caught)]);
    EXPECT_EQ(alive.use_count(), 1) << "a worker is left";
  }
}

// The threads are made before the caller's mode changes, and keep theirs from region to region.
TEST(Parallel, ThreadsRoundAsTheirCaller) {
  const std::vector<unsigned> usual(kThreads, _mm_getcsr() & ~kFlags);
  EXPECT_EQ(modes_of_the_threads(), usual);
  for (const unsigned bits : {kFlushDenormals, kRoundUp}) {
    const Caller changed(bits);
    EXPECT_EQ(modes_of_the_threads(), std::vector<unsigned>(kThreads, usual[0] | bits));
  }
  EXPECT_EQ(modes_of_the_threads(), usual);
}

// A caller who hunts invalid operations (feenableexcept): what kernels compute on padding is none of his.
TEST(Parallel, NoThreadTraps) {
  constexpr unsigned kTraps = 0x1F80;  // masked where set
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before & ~kTraps);
  const std::vector<unsigned> modes = modes_of_the_threads();
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(modes, std::vector<unsigned>(kThreads, (before | kTraps) & ~kFlags));
  EXPECT_EQ(after & ~kFlags, before & ~kTraps & ~kFlags) << "the caller's are his again";
}

// Nor are the flags that it raises, on whichever thread that was.
TEST(Parallel, TheCallersFlagsAreWhatTheyWere) {
  constexpr unsigned kInexact = 0x20, kOverflow = 0x08;
  const unsigned before = _mm_getcsr();
  for (const int threads : {1, kThreads}) {
    _mm_setcsr((before & ~kFlags) | kInexact);
    run_tasks(threads, 100, [](int) {
      return [](index_t) {
        volatile float large = 1e38F;
        large = large * large;
      };
    });
    EXPECT_EQ(_mm_getcsr() & kFlags, kInexact) << threads << " threads; " << kOverflow << " is overflow";
  }
  _mm_setcsr(before);
}

#ifdef _OPENMP
TEST(DefaultNumThreads, IsTheTeamThatARegionWouldHave) {
  const int before = omp_get_max_threads(), levels = omp_get_max_active_levels();
  omp_set_num_threads(3);
  EXPECT_EQ(amx_sft_moe::parallel::default_num_threads(), 3);
  omp_set_max_active_levels(1);
  int inside = 0;
#pragma omp parallel num_threads(2)
#pragma omp single
  inside = amx_sft_moe::parallel::default_num_threads();
  EXPECT_EQ(inside, 1);
  omp_set_max_active_levels(levels);
  omp_set_num_threads(before);
}
#endif

}  // namespace
}  // namespace sft_test
