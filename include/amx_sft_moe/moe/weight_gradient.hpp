// Gradients of the base weights, for whoever trains them:
//
//   grad_Wd = (w p)^T h  [H, I]        grad_Wg = grad_g^T x,  grad_Wu = grad_u^T x  [I, H]
//
// h is made again from g and u, chunk by chunk (gradient_chunks.hpp). Kernels of strips finish these gradients in
// registers (gemm/finished_strips.hpp).
#pragma once

#include <algorithm>

#include "amx_sft_moe/gemm/finished_strips.hpp"
#include "amx_sft_moe/moe/backward_rows.hpp"
#include "amx_sft_moe/moe/gradient_chunks.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

// Cuts the gradient [rows, cols] of an expert's weight into tasks.
template <class Kernel>
void add_weight_tasks(Step<Kernel>& step, int kind, const ExpertRows& expert, index_t rows, index_t cols) {
  const index_t tokens = std::min(expert.rows, gemm::Blocking::kGradTokens);
  const index_t col_step = step.blocking.template grad_cols<Kernel>(tokens, rows, cols, step.load());
  add_tasks(step.work.tasks, kind, expert, {rows, cols, gemm::Blocking::kGradRowsPerTask, col_step});
}

// Columns [col, col + cols) of h = act(g, u) for rows [row, row + rows) of an expert, made again: h was not kept.
template <class Kernel>
gemm::AnyRows activation_columns(Step<Kernel>& step, Worker<Kernel>& worker, const ExpertRows& expert,
                                 index_t row, index_t rows, index_t col, index_t cols) {
  using Stored = typename Kernel::Stored;
  const MatrixView<Stored> gate = rows_of(step.saved.gate, expert, row);
  const MatrixView<Stored> up = rows_of(step.saved.up, expert, row);
  MatrixView<Stored> h{nullptr, rows, cols, spread_row_stride<Stored>(cols)};
  h.data = worker.gemm.scratch.rows.template as<Stored>(rows * h.row_stride);
  std::visit(
      [&](const auto& activation) {
        for (index_t i = 0; i < rows; ++i) {
          Kernel::Activation::forward(activation, gate.row(i) + col, up.row(i) + col, cols, h.row(i));
        }
      },
      step.activation);
  return h;
}

// The chunk's part of a rectangle = factor^T x columns, finished in registers.
template <gemm::MultipliesStrips Kernel>
void finish_chunk(Worker<Kernel>& worker, const gemm::Factor& factor, const gemm::AnyRows& columns,
                  const GradientChunk& chunk) {
  const GradientRectangle& to = chunk.to;
  gemm::Scratch& scratch = worker.gemm.scratch;
  const auto tokens = gemm::strips_of_tokens<Kernel>(scratch, columns, chunk.count, to.cols);
  to.grad.visit([&](auto* data) {
    for (index_t row = 0; row < to.rows; row += gemm::Blocking::kFinishedRows) {
      gemm::gemm_tn_finished<Kernel>(scratch, std::min(gemm::Blocking::kFinishedRows, to.rows - row),
                                     factor_of(factor, chunk, row), tokens, chunk.read_soon,
                                     target_of(to, data, row, 0, chunk.mode));
    }
  });
}

// The task's rectangle of a base weight's gradient = factor^T x columns; columns(row, rows) gives those of the expert's rows.
template <class Kernel, class Columns>
void weight_gradient(Worker<Kernel>& worker, const Task& task, const gemm::Factor& factor, Columns&& columns,
                     const AnyMatrix& grad, const GradientMode& mode) {
  const std::array<gemm::Factor, 1> factors{{{factor.rows.from(0, task.row), factor.weights}}};
  const GradientRectangle to{grad, task.row, task.rows, task.col, task.cols};
  in_chunks(worker, task.expert->rows, to, mode, [&](const GradientChunk& chunk) {
    const gemm::AnyRows of_chunk = columns(chunk.first, chunk.count);
    if constexpr (gemm::MultipliesStrips<Kernel>) {
      finish_chunk(worker, factors[0], of_chunk, chunk);
    } else {
      const auto packed = gemm::pack_tokens<Kernel>(worker.gemm, of_chunk, chunk.count, task.cols);
      multiply_chunk(worker, factors, packed, chunk);
    }
  });
}

// A rectangle of grad_Wd = (w p)^T h.
template <class Kernel>
void backward_down_weight(Step<Kernel>& step, const BackwardRows<Kernel>& rows, Worker<Kernel>& worker,
                          const Task& task, const Gradients& grads) {
  const ExpertRows& expert = *task.expert;
  const gemm::Factor factor{rows_of(rows.p, expert, 0), step.work.routing.weight_of_row() + expert.row_begin};
  const auto h = [&](index_t row, index_t count) {
    return activation_columns(step, worker, expert, row, count, task.col, task.cols);
  };
  weight_gradient<Kernel>(worker, task, factor, h, grads.weights.down[expert.expert], grads.mode());
}

// A rectangle of grad_W = grad^T x of gate or up.
template <class Kernel>
void backward_gate_up_weight(Step<Kernel>& step, Worker<Kernel>& worker, const Task& task,
                             const MatrixView<typename Kernel::Stored>& grad, const AnyConstMatrix& x,
                             const AnyExpertTensor& grad_weight, const Gradients& grads) {
  const ExpertRows& expert = *task.expert;
  const auto inputs = gemm::AnyRows(x).gathered(step.work.routing.token_of_row() + expert.row_begin);
  const auto columns = [&](index_t row, index_t) { return inputs.from(row, task.col); };
  weight_gradient<Kernel>(worker, task, {rows_of(grad, expert, 0), nullptr}, columns,
                          grad_weight[expert.expert], grads.mode());
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
