// The phases of a forward pass, in order. Each is one region of tasks; its end is a synchronisation point (4 in
// all).
//
//   gather        x -> operand of gemm_nt per expert;  u = s x A^T for gate and up
//   gate_up       g = x Wg^T + u_g Bg^T + bias, u likewise; h = act(g, u) -> operand; u_down = s h Ad^T
//                 (saved: w u_down)
//   down          w d = w (h Wd^T + u_d Bd^T + bias) per route
//   sum_tokens    y = sum over a token's routes
#pragma once

#include "amx_sft_moe/moe/bias.hpp"
#include "amx_sft_moe/moe/forward_rows.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

// x [T, H] of any dtype.
template <class Kernel>
void forward_gather(Step<Kernel>& step, const ForwardRows<Kernel>& operands, const AnyConstMatrix& x) {
  Workspace& work = step.work;
  set_row_tasks(step);
  run_region(step, PhaseGroup::kForwardGather, [&](Worker<Kernel>& worker, const Task& task) {
    const ExpertRows& expert = *task.expert;
    const auto packed = operands.x.of(expert, task.row);
    worker.time(Phase::kGather, [&] {
      const auto rows = gemm::AnyRows(x).gathered(work.routing.token_of_row() + expert.row_begin + task.row);
      gemm::pack_operand<Kernel>(rows, task.rows, step.hidden, step.form(expert), packed);
    });
    if (step.lora.gate.rank() + step.lora.up.rank() == 0) return;
    worker.time(Phase::kLoraAForward, [&] {
      const auto target = [&](const LoraAdapter& adapter, const auto& u, const auto& saved) {
        return lora::ProjectionTarget<Kernel>{adapter.scaling, u.of(expert, task.row),
                                              rows_of(saved, expert, task.row)};
      };
      const std::array<lora::ProjectionTarget<Kernel>, 2> targets{
          target(step.lora.gate, operands.u_gate, step.saved.u_gate),
          target(step.lora.up, operands.u_up, step.saved.u_up)};
      const auto project = [&](const LoraAdapter& adapter, std::size_t first, std::size_t count) {
        if (adapter.rank() == 0) return;
        lora::project<Kernel>(worker.gemm, adapter.a[expert.expert], task.rows, step.form(expert),
                              read_only(packed), std::span(targets).subspan(first, count));
      };
      if (step.lora.gate_up_share_a()) return project(step.lora.gate, 0, 2);
      project(step.lora.gate, 0, 1);
      project(step.lora.up, 1, 1);
    });
  });
}

// The terms W x^T and B u^T of an adapted projection, for weight rows from `first` on.
template <class Kernel>
std::array<gemm::Term<typename Kernel::Compute>, 2> adapted_terms(
    const MatrixView<const typename Kernel::Weight>& weight, const LoraAdapter& adapter, index_t expert,
    index_t first, const gemm::Panels<typename Kernel::Compute>& x,
    const gemm::Panels<typename Kernel::Compute>& u) {
  std::array<gemm::Term<typename Kernel::Compute>, 2> terms;
  terms[0] = {gemm::AnyRows(weight).from(first, 0), weight.cols, read_only(x)};
  if (adapter.rank() > 0) {
    terms[1] = {gemm::AnyRows(adapter.b[expert]).from(first, 0), adapter.rank(), read_only(u)};
  }
  return terms;
}

// Adds the biases, stores g and u for backward, applies the activation and appends h to the down projection's
// operand, block by block.
template <class Kernel>
void finish_gate_up_block(Step<Kernel>& step, const Task& task, const std::array<gemm::TokenBlock, 2>& blocks,
                          bool past_caches, const gemm::Panels<typename Kernel::Compute>& h) {
  using Stored = typename Kernel::Stored;
  const gemm::TokenBlock& gate = blocks[0];
  const gemm::TokenBlock& up = blocks[1];
  const index_t first = task.col + gate.out;
  add_bias(gate, step.weights.biases.gate, task.expert->expert, first);
  add_bias(up, step.weights.biases.up, task.expert->expert, first);
  if (step.saved.gate.data != nullptr) {
    auto save = [&](const gemm::TokenBlock& block, const MatrixView<Stored>& to) {
      const MatrixView<Stored> rows = rows_of(to, *task.expert, task.row + block.token);
      gemm::store_tokens<Kernel>(block, rows.data + first, rows.row_stride, 1.0F, nullptr, past_caches);
    };
    save(gate, step.saved.gate);
    save(up, step.saved.up);
  }
  std::visit(
      [&](const auto& activation) {
        for (index_t i = 0; i < gate.lines(); ++i) {
          Kernel::Activation::forward(activation, gate.line(i), up.line(i), gate.length(), gate.line(i));
        }
      },
      step.activation);
  gemm::append_operand<Kernel>(gate, step.form(*task.expert), 1.0F, h.from_column(gate.token), first,
                               step.intermediate);
}

// gemm_nt of an expert's tokens with weights of it, [out, k], cut into tasks.
template <class Kernel>
void add_weight_row_tasks(Step<Kernel>& step, const ExpertRows& expert, index_t k, index_t out,
                          std::int32_t* groups = nullptr) {
  const index_t tokens = step.blocking.template tokens_for<Kernel>(k, expert.rows);
  const index_t rows = step.blocking.template nt_rows<Kernel>(std::min(tokens, expert.rows), out, step.load());
  add_tasks(step.work.tasks, 0, expert, {expert.rows, out, tokens, rows}, groups);
}

template <class Kernel>
void forward_gate_up(Step<Kernel>& step, const ForwardRows<Kernel>& operands) {
  using E = typename Kernel::Compute;
  Workspace& work = step.work;
  const LoraWeights& lora = step.lora;
  work.tasks.clear();
  std::int32_t groups = 0;
  for (const ExpertRows& expert : work.routing.active()) {
    add_weight_row_tasks(step, expert, step.hidden, step.intermediate, &groups);
  }
  // u_down needs all of h for its tokens: whichever task finishes a group's last block goes on with it.
  parallel::Countdown* unfinished = work.reserve_countdowns(groups);
  for (std::int32_t g = 0; g < groups; ++g) unfinished[g].reset(0);
  for (const Task& task : work.tasks) unfinished[task.group].add(1);

  const bool past_caches = step.template past_caches<typename Kernel::Stored>(2 * step.intermediate);
  run_region(step, PhaseGroup::kForwardGateUp, num_tasks(step), [&](Worker<Kernel>& worker, const Task& task) {
    const ExpertRows& expert = *task.expert;
    const index_t e = expert.expert;
    const auto x = operands.x.of(expert, task.row);
    const auto h = operands.h.of(expert, task.row);
    worker.time(Phase::kGateUpGemm, [&] {
      const auto gate = adapted_terms<Kernel>(step.weights.gate[e], lora.gate, e, task.col, x,
                                              operands.u_gate.of(expert, task.row));
      const auto up = adapted_terms<Kernel>(step.weights.up[e], lora.up, e, task.col, x,
                                            operands.u_up.of(expert, task.row));
      const std::array<std::span<const gemm::Term<E>>, 2> outputs{{gate, up}};
      gemm::gemm_nt<Kernel>(worker.gemm, task.cols, task.rows, step.form(expert), outputs,
                            [&](const std::array<gemm::TokenBlock, 2>& blocks) {
                              finish_gate_up_block(step, task, blocks, past_caches, h);
                            });
      gemm::settle_stores<Kernel>(past_caches);
    });
    if (!unfinished[task.group].finish() || lora.down.rank() == 0) return;
    worker.time(Phase::kLoraADownForward, [&] {
      const std::array<lora::ProjectionTarget<Kernel>, 1> target{
          {{lora.down.scaling, operands.u_down.of(expert, task.row),
            rows_of(step.saved.u_down, expert, task.row),
            work.routing.weight_of_row() + expert.row_begin + task.row}}};
      lora::project<Kernel>(worker.gemm, lora.down.a[e], task.rows, step.form(expert), read_only(h), target);
    });
  });
}

template <class Kernel>
void forward_down(Step<Kernel>& step, const ForwardRows<Kernel>& operands) {
  using E = typename Kernel::Compute;
  Workspace& work = step.work;
  const bool past_caches = step.template past_caches<float>(step.hidden);

  work.tasks.clear();
  for (const ExpertRows& expert : work.routing.active()) {
    add_weight_row_tasks(step, expert, step.intermediate, step.hidden);
  }
  run_region(step, PhaseGroup::kForwardDown, num_tasks(step), [&](Worker<Kernel>& worker, const Task& task) {
    const ExpertRows& expert = *task.expert;
    const index_t e = expert.expert;
    worker.time(Phase::kDownGemm, [&] {
      const auto terms =
          adapted_terms<Kernel>(step.weights.down[e], step.lora.down, e, task.col,
                                operands.h.of(expert, task.row), operands.u_down.of(expert, task.row));
      const std::array<std::span<const gemm::Term<E>>, 1> outputs{{terms}};
      const float* weights = work.routing.weight_of_row() + expert.row_begin + task.row;
      const MatrixView<float> rows = rows_of(operands.out, expert, task.row);
      gemm::gemm_nt<Kernel>(worker.gemm, task.cols, task.rows, step.form(expert), outputs,
                            [&](const std::array<gemm::TokenBlock, 1>& blocks) {
                              const gemm::TokenBlock& d = blocks[0];
                              add_bias(d, step.weights.biases.down, e, task.col + d.out);
                              gemm::store_tokens<Kernel>(d, rows.row(d.token) + task.col + d.out,
                                                         rows.row_stride, 1.0F, weights + d.token, past_caches);
                            });
      gemm::settle_stores<Kernel>(past_caches);
    });
  });
}

// Tasks over tokens, not over an expert's rows.
inline void add_token_tasks(std::vector<Task>& tasks, index_t tokens, int threads) {
  const index_t step = gemm::Blocking::tokens_per_sum(tokens, threads);
  for (index_t t = 0; t < tokens; t += step) {
    Task task;
    task.row = t;
    task.rows = std::min(step, tokens - t);
    tasks.push_back(task);
  }
}

// out [T, H] = for each token the sum of its routes' rows, in fp32, rounded once.
template <class Kernel>
void sum_rows_of_tokens(Step<Kernel>& step, const Task& task, const MatrixView<float>& rows,
                        const AnyMatrix& out) {
  const std::int32_t* row_of_route = step.work.routing.row_of_route();
  out.visit([&](auto* data) {
    for (index_t t = task.row; t < task.row + task.rows; ++t) {
      Kernel::Rows::sum_rows(rows.data, rows.row_stride, row_of_route + t * step.top_k, step.top_k, step.hidden,
                             data + t * out.row_stride());
    }
  });
}

template <class Kernel>
void forward_sum_tokens(Step<Kernel>& step, const ForwardRows<Kernel>& rows, const AnyMatrix& y) {
  step.work.tasks.clear();
  add_token_tasks(step.work.tasks, step.tokens, step.threads);
  run_region(step, PhaseGroup::kForwardSum, [&](Worker<Kernel>& worker, const Task& task) {
    worker.time(Phase::kSumTokens, [&] { sum_rows_of_tokens(step, task, rows.out, y); });
  });
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
