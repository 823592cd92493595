// What the phases of one forward or backward share, and how a phase runs its tasks.
#pragma once

#include <utility>

#include "amx_sft_moe/core/activation.hpp"
#include "amx_sft_moe/gemm/blocking.hpp"
#include "amx_sft_moe/gemm/forms.hpp"
#include "amx_sft_moe/lora/products.hpp"
#include "amx_sft_moe/moe/base_weights.hpp"
#include "amx_sft_moe/moe/saved_activations.hpp"
#include "amx_sft_moe/moe/workspace.hpp"
#include "amx_sft_moe/profile/backward_timer.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

namespace moe {

template <class Kernel>
struct Step {
  using Weight = typename Kernel::Weight;
  using Stored = typename Kernel::Stored;
  using Compute = typename Kernel::Compute;

  index_t hidden = 0, intermediate = 0, top_k = 0, tokens = 0;
  Activation activation;
  BaseWeights<Weight> weights;
  LoraWeights lora;
  gemm::Blocking blocking;
  int threads = 1;
  Workspace& work;
  StepTimer& timer;
  SavedActivations<Stored> saved;  // of this step; null views in a forward that saves nothing

  // How x and h of an expert stand in its products, with LoRA's u beside them.
  static constexpr gemm::TokenForm form(const ExpertRows& expert) {
    return gemm::token_form<Kernel>(expert.rows);
  }

  // What the tasks of a region share out.
  gemm::Load load() const {
    return {static_cast<index_t>(work.routing.active().size()), work.routing.routed_rows(), threads};
  }
  // Whether rows over the routes, with `cols` of T each, are written past the caches.
  template <class T>
  bool past_caches(index_t cols) const {
    const index_t bytes = work.routing.routed_rows() * cols * index_t{sizeof(T)};
    return blocking.template past_caches<Kernel>(bytes, threads);
  }
};

// A thread in a region: what it times, and what it brings to a GEMM.
template <class Kernel>
struct Worker {
  ThreadTimer timer;
  gemm::ThreadContext<Kernel> gemm;

  Worker(StepTimer& step, int thread, gemm::Scratch& scratch) : timer(step, thread), gemm(scratch) {}

  // Runs `work` as part of `phase`.
  template <class F>
  void time(Phase phase, F&& work) {
    timer.begin(phase);
    std::forward<F>(work)();
    BACKWARD_TIMER_CHECKPOINT(timer, phase);
  }
};

template <class Kernel>
index_t num_tasks(const Step<Kernel>& step) {
  return static_cast<index_t>(step.work.tasks.size());
}

// One parallel region over step.work.tasks: run(worker, task) on some thread for each. Its end is a
// synchronisation point; without tasks there is none. The first `products` tasks multiply with weights, the experts of most
// rows first.
template <class Kernel, class Run>
void run_region(Step<Kernel>& step, PhaseGroup group, index_t products, Run&& run) {
  const auto& tasks = step.work.tasks;
  if (tasks.empty()) return;
  BACKWARD_TIMER_START(step.timer, group, step.threads, num_tasks(step));
  const auto make_worker = [&](int thread) {
    // The lambda is the worker's call operator; the Worker lives in it, on its thread, until no task is left.
    return
        [&, worker = Worker<Kernel>(step.timer, thread, step.work.scratch[static_cast<std::size_t>(thread)])](
            index_t i) mutable { run(worker, tasks[static_cast<std::size_t>(i)]); };
  };
  parallel::run_tasks(step.threads, num_tasks(step), make_worker, products);
  BACKWARD_TIMER_END(step.timer);
}
template <class Kernel, class Run>
void run_region(Step<Kernel>& step, PhaseGroup group, Run&& run) {
  run_region(step, group, 0, std::forward<Run>(run));
}

// [rows, cols] in rectangles of up to [row_step, col_step].
struct Rectangles {
  index_t rows, cols, row_step, col_step;
};

// Appends tasks of `kind` for rectangles of something of `expert`'s. Tasks of the same rows share a group.
inline void add_tasks(std::vector<Task>& tasks, int kind, const ExpertRows& expert, const Rectangles& of,
                      std::int32_t* groups = nullptr) {
  for (index_t row = 0; row < of.rows; row += of.row_step) {
    for (index_t col = 0; col < of.cols; col += of.col_step) {
      Task task;
      task.kind = kind;
      task.group = groups == nullptr ? 0 : *groups;
      task.expert = &expert;
      task.row = row;
      task.rows = std::min(of.row_step, of.rows - row);
      task.col = col;
      task.cols = std::min(of.col_step, of.cols - col);
      tasks.push_back(task);
    }
    if (groups != nullptr) ++*groups;
  }
}

// The tasks of a phase that goes over all routed rows, each as a whole.
template <class Kernel>
void set_row_tasks(Step<Kernel>& step) {
  step.work.tasks.clear();
  for (const ExpertRows& expert : step.work.routing.active()) {
    add_tasks(step.work.tasks, 0, expert, {expert.rows, 1, gemm::Blocking::kRowChunk, 1});
  }
}

template <class E>
gemm::Panels<const E> read_only(const gemm::Panels<E>& panels) {
  return {panels.data, panels.panel_stride};
}

// Rows [expert.row_begin + row, ...) of a matrix over routed rows.
template <class T>
MatrixView<T> rows_of(const MatrixView<T>& all, const ExpertRows& expert, index_t row) {
  if (all.data == nullptr) return all;
  return {all.row(expert.row_begin + row), expert.rows - row, all.cols, all.row_stride};
}

// A matrix of the workspace over the routed rows.
template <class T>
MatrixView<T> row_matrix(gemm::Buffer& buffer, index_t rows, index_t cols) {
  const index_t stride = spread_row_stride<T>(cols);
  return {buffer.as<T>(rows * stride), rows, cols, stride};
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
