// Task-parallel regions: the only place in the library that knows OpenMP.
//
// A region runs tasks 0..n-1 on a team of threads, each taken by the next free thread. Results must not depend
// on who takes which task. Its end is a synchronisation point. Exceptions thrown by a task end the region early
// and are rethrown, the first one, on the calling thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "amx_sft_moe/core/element.hpp"
#include "amx_sft_moe/core/float_mode.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Beyond any machine's hardware threads. A number that is no number of threads is refused by whoever takes one: OpenMP's
// runtimes end the process when they cannot start one. That the operating system allows fewer (ulimit -u, a control
// group's pids.max) stays a matter between the two.
inline constexpr int kMaxThreads = 4096;

namespace parallel {

// As many as a region that the calling thread starts now would have: one within another region, unless OpenMP is told to
// nest them.
inline int default_num_threads() {
#ifdef _OPENMP
  if (omp_get_active_level() >= omp_get_max_active_levels()) return 1;
  return omp_get_max_threads() < omp_get_thread_limit() ? omp_get_max_threads() : omp_get_thread_limit();
#else
  return 1;
#endif
}

// While it lives, a region that the calling thread starts has one thread. For libraries that a task calls: they
// would start a team of their own, or cut their work by the number of threads they could have.
class SingleThreaded {
 public:
#ifdef _OPENMP
  SingleThreaded() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreaded() { omp_set_num_threads(before_); }
#else
  SingleThreaded() = default;
#endif
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
#ifdef _OPENMP
  int before_;
#endif
};

class FirstError {
 public:
  bool raised() const { return raised_.load(std::memory_order_relaxed); }
  void capture() noexcept {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
    raised_.store(true, std::memory_order_relaxed);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  std::atomic<bool> raised_{false};
};

// Hands out tasks 0..n-1, each once, to any number of threads; in their order but for the first `products` of them.
// Those multiply with weights and begin with most tokens, which wait for arithmetic, and end with fewest, which wait for
// memory: threads of even number take them from the front, the others from the back, so that both are in use at a time
// (benchmarks/LOG.md, "From both ends"). The last tasks of all come in their order, so that threads end together.
class TaskQueue {
 public:
  TaskQueue(index_t tasks, index_t products, int threads)
      : from_both_(std::max<index_t>(std::min(products, tasks - kInOrderPerThread * threads), 0)) {}

  // n or more: none is left.
  index_t take(int thread) {
    const index_t taken = taken_.fetch_add(1, std::memory_order_relaxed);
    if (taken >= from_both_) return taken;
    const bool back = thread % 2 != 0;
    const index_t here = (back ? from_back_ : from_front_).fetch_add(1, std::memory_order_relaxed);
    return back ? from_both_ - 1 - here : here;
  }

 private:
  static constexpr index_t kInOrderPerThread = 2;

  const index_t from_both_;  // so many, from the first on
  std::atomic<index_t> taken_{0}, from_front_{0}, from_back_{0};
};

// make_worker(thread) is called once on each thread of the team (0 <= thread < num_threads) and returns an
// object whose call operator takes a task's index; the object is destroyed on its thread when no task is left.
// All of them round as the calling thread does. `products`: TaskQueue's.
template <class MakeWorker>
void run_tasks(int num_threads, index_t tasks, MakeWorker&& make_worker, index_t products = 0) {
  TaskQueue queue(tasks, products, num_threads);
  FirstError error;
  const FloatMode mode = FloatMode::of_this_thread();
  auto work = [&](int thread) noexcept {
    const FloatMode::Scope same_mode(mode);
    try {
      auto worker = make_worker(thread);
      for (;;) {
        const index_t task = queue.take(thread);
        if (task >= tasks || error.raised()) break;
        worker(task);
      }
    } catch (...) {
      error.capture();
    }
  };
#ifdef _OPENMP
  // A nested or restricted OpenMP may grant fewer threads: the queue hands out all tasks all the same.
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  work(omp_get_thread_num());
#else
  (void)num_threads;
  work(0);
#endif
  error.rethrow();
}

// Lets the last of several tasks that contribute to one thing go on with it: finish() is true exactly once, for
// the task that makes the count zero, and that task then sees all that the others wrote.
class Countdown {
 public:
  // Before the tasks run.
  void reset(index_t count) { left_.store(count, std::memory_order_relaxed); }
  void add(index_t count) { left_.fetch_add(count, std::memory_order_relaxed); }
  bool finish() { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::atomic<index_t> left_{0};
};

}  // namespace parallel
AMX_SFT_MOE_NAMESPACE_END
