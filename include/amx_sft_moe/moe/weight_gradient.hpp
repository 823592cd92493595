// Gradients of the base weights, for whoever trains them, and of LoRA's A of down. Each is a gemm_tn:
//
//   grad_Wd = (w p)^T h  [H, I]        grad_Wg = grad_g^T x,  grad_Wu = grad_u^T x  [I, H]
//   grad_Ad = (w v_d)^T h  [r, I]
//
// A task makes a rectangle of one expert's gradient:
//
//   for each chunk of the expert's rows          its x, or h made again from g and u, packed once
//     for each group of the rectangle's rows     their factor transposed; gemm_tn
//
// Where there are several chunks their products are summed in fp32, in the scratch, and rounded once. Chunks have
// a fixed length: a task's memory has a bound, and neither threads nor caches change a bit.
#pragma once

#include <algorithm>

#include "amx_sft_moe/moe/backward_rows.hpp"
#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/moe/step.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

// Cuts the gradient [rows, cols] of an expert's weight into tasks; row and rows of a task are the gradient's.
template <class Kernel>
void add_weight_tasks(Step<Kernel>& step, int kind, const ExpertRows& expert, index_t rows, index_t cols) {
  const index_t tokens = std::min(expert.rows, gemm::Blocking::kGradTokens);
  const index_t col_step = step.blocking.template grad_cols<Kernel>(tokens, rows, cols, step.load());
  for (index_t row = 0; row < rows; row += gemm::Blocking::kGradRowsPerTask) {
    for (index_t col = 0; col < cols; col += col_step) {
      Task task;
      task.kind = kind;
      task.expert = &expert;
      task.row = row;
      task.rows = std::min(gemm::Blocking::kGradRowsPerTask, rows - row);
      task.col = col;
      task.cols = std::min(col_step, cols - col);
      step.work.tasks.push_back(task);
    }
  }
}

// Columns of an expert's x or h that a gradient is made from: rows [0, depth), zeros behind the expert's.
struct GradientInput {
  gemm::AnyRows rows;
  index_t depth;
};

// Room for [rows, cols] in the scratch, until the next call, and with strips for rows of zeros up to their unit of K.
template <class Kernel, class E>
MatrixView<E> adjacent_rows(Worker<Kernel>& worker, index_t rows, index_t cols) {
  const index_t depth = gemm::MultipliesStrips<Kernel> ? round_up(rows, Kernel::Microkernel::kKUnit) : rows;
  MatrixView<E> adjacent{nullptr, depth, cols, spread_row_stride<E>(cols)};
  adjacent.data = worker.gemm.scratch.rows.template as<E>(depth * adjacent.row_stride);
  for (index_t i = rows; i < depth; ++i) std::fill_n(adjacent.row(i), cols, from_float<E>(0.0F));
  return adjacent;
}

// Columns [col, col + cols) of h = act(g, u) for rows [row, row + rows) of an expert, made again: h was not kept.
template <class Kernel>
GradientInput activation_columns(Step<Kernel>& step, Worker<Kernel>& worker, const ExpertRows& expert,
                                 index_t row, index_t rows, index_t col, index_t cols) {
  using Stored = typename Kernel::Stored;
  const MatrixView<Stored> gate = rows_of(step.saved.gate, expert, row);
  const MatrixView<Stored> up = rows_of(step.saved.up, expert, row);
  const MatrixView<Stored> h = adjacent_rows<Kernel, Stored>(worker, rows, cols);
  std::visit(
      [&](const auto& activation) {
        for (index_t i = 0; i < rows; ++i) {
          Kernel::Activation::forward(activation, gate.row(i) + col, up.row(i) + col, cols, h.row(i));
        }
      },
      step.activation);
  return {h, h.rows};
}

// [rows, cols] of x, gathered. Where strips are made ahead of their products they are copied first: what comes next is not
// where the tokens of an expert lie, but behind what is here.
template <class Kernel>
GradientInput adjacent_columns(Worker<Kernel>& worker, const gemm::AnyRows& x, index_t rows, index_t cols) {
  using E = typename Kernel::Compute;
  if (!gemm::MakesRowsAhead<Kernel> || rows < arch::kAheadDepth) return {x, rows};
  const MatrixView<E> adjacent = adjacent_rows<Kernel, E>(worker, rows, cols);
  x.visit([&](const auto& source) {
    Kernel::Rows::template stage<E>(source, rows, cols, cols, adjacent.data, adjacent.row_stride);
  });
  return {adjacent, adjacent.rows};
}

// The task's rectangle of `grad` = factor^T x input; input(row, rows) gives the columns [task.col, task.col +
// task.cols) of these of the expert's rows.
template <class Kernel, class Input>
void weight_gradient(Worker<Kernel>& worker, const Task& task, const gemm::Factor& factor, Input&& input,
                     const AnyMatrix& grad, const lora::GradientMode& mode) {
  constexpr index_t kChunk = gemm::Blocking::kGradTokens;
  const index_t tokens = task.expert->rows;
  const bool in_chunks = tokens > kChunk;
  const index_t row_step = gemm::Blocking::grad_rows<Kernel>(std::min(tokens, kChunk));
  AnyMatrix sums;
  const index_t stride = spread_row_stride<float>(task.cols);
  float* sum = nullptr;
  if (in_chunks) {
    sum = worker.gemm.scratch.sums.template as<float>(task.rows * stride);
    sums = {sum, task.rows, task.cols, stride};
  }
  for (index_t first = 0; first < tokens; first += kChunk) {
    const index_t here = std::min(kChunk, tokens - first);
    const GradientInput columns = input(first, here);
    const auto panels = gemm::pack_tokens<Kernel>(worker.gemm, columns.rows, here, columns.depth, task.cols);
    for (index_t row = 0; row < task.rows; row += row_step) {
      const index_t rows = std::min(row_step, task.rows - row);
      const float* weights = factor.weights == nullptr ? nullptr : factor.weights + first;
      const std::array<gemm::Factor, 1> factors{{{factor.rows.from(first, task.row + row), weights}}};
      gemm::gemm_tn<Kernel>(worker.gemm, rows, factors, panels, [&](gemm::Block block) {
        block.row += row;
        if (in_chunks) return lora::store_gradient<Kernel>(block, sums, false, 0, {first > 0, 1.0F});
        block.row += task.row;
        lora::store_gradient<Kernel>(block, grad, false, task.col, mode);
      });
    }
  }
  if (!in_chunks) return;
  const gemm::Block whole{task.row, task.rows, 0, task.cols, sum, stride};
  lora::store_gradient<Kernel>(whole, grad, false, task.col, mode);
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
  weight_gradient<Kernel>(worker, task, factor, h, grads.weights.down[expert.expert],
                          {grads.accumulate, grads.scale});
}

// A rectangle of grad_W = grad^T x of gate or up.
template <class Kernel>
void backward_gate_up_weight(Step<Kernel>& step, Worker<Kernel>& worker, const Task& task,
                             const MatrixView<typename Kernel::Stored>& grad, const AnyConstMatrix& x,
                             const AnyExpertTensor& grad_weight, const Gradients& grads) {
  const ExpertRows& expert = *task.expert;
  const auto inputs = gemm::AnyRows(x).gathered(step.work.routing.token_of_row() + expert.row_begin);
  const auto columns = [&](index_t row, index_t count) {
    return adjacent_columns(worker, inputs.from(row, task.col), count, task.cols);
  };
  weight_gradient<Kernel>(worker, task, {rows_of(grad, expert, 0), nullptr}, columns,
                          grad_weight[expert.expert], {grads.accumulate, grads.scale});
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
