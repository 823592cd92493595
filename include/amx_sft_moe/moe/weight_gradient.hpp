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
// Kernels of strips finish base weights' gradients in registers (gemm/finished_strips.hpp); grad_Ad, of few rows, is stored
// from a cache by all kernels.
//
// Where there are several chunks their products are summed in fp32, in the scratch, and rounded once. Chunks have
// a fixed length: a task's memory has a bound, and neither threads nor caches change a bit.
#pragma once

#include <algorithm>

#include "amx_sft_moe/gemm/finished_strips.hpp"
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

// Rows [first, first + count) of an expert, and where what they give goes: to the task's rectangle of the gradient, or, of
// several chunks, to fp32 sums, which the next chunk and the rounding read.
struct GradientChunk {
  index_t first, count;
  AnyMatrix to;
  index_t row, col;  // of `to`
  lora::GradientMode mode;
  bool read_soon;
};

// Calls product(GradientChunk) for all of the expert's rows; the rectangle of `grad` is the sum of what these give.
template <class Kernel, class Product>
void in_chunks(Worker<Kernel>& worker, const Task& task, const AnyMatrix& grad, const lora::GradientMode& mode,
               Product&& product) {
  constexpr index_t kChunk = gemm::Blocking::kGradTokens;
  const index_t tokens = task.expert->rows;
  if (tokens <= kChunk) return product(GradientChunk{0, tokens, grad, task.row, task.col, mode, false});
  const index_t stride = spread_row_stride<float>(task.cols);
  float* sum = worker.gemm.scratch.sums.template as<float>(task.rows * stride);
  const AnyMatrix sums{sum, task.rows, task.cols, stride};
  for (index_t first = 0; first < tokens; first += kChunk) {
    const index_t count = std::min(kChunk, tokens - first);
    product(GradientChunk{first, count, sums, 0, 0, {first > 0, 1.0F}, true});
  }
  const gemm::Block whole{task.row, task.rows, 0, task.cols, sum, stride};
  lora::store_gradient<Kernel>(whole, grad, false, task.col, mode);
}

// The factor of the chunk's tokens, for the gradient's rows from `row` on.
inline gemm::Factor factor_of(const gemm::Factor& factor, const GradientChunk& chunk, index_t row) {
  return {factor.rows.from(chunk.first, row),
          factor.weights == nullptr ? nullptr : factor.weights + chunk.first};
}

// The chunk's products of the task's rectangle with its columns of x or h, by gemm_tn.
template <class Kernel>
void multiply_chunk(Worker<Kernel>& worker, const Task& task, const gemm::Factor& factor,
                    const gemm::AnyRows& columns, const GradientChunk& chunk) {
  const auto tokens = gemm::pack_tokens<Kernel>(worker.gemm, columns, chunk.count, task.cols);
  for (index_t row = 0; row < task.rows; row += gemm::Blocking::kGradRows) {
    const std::array<gemm::Factor, 1> factors{factor_of(factor, chunk, task.row + row)};
    const index_t rows = std::min(gemm::Blocking::kGradRows, task.rows - row);
    gemm::gemm_tn<Kernel>(worker.gemm, rows, factors, tokens, [&](gemm::Block block) {
      block.row += chunk.row + row;
      lora::store_gradient<Kernel>(block, chunk.to, false, chunk.col, chunk.mode);
    });
  }
}

// The same finished in registers.
template <gemm::MultipliesStrips Kernel>
void finish_chunk(Worker<Kernel>& worker, const Task& task, const gemm::Factor& factor,
                  const gemm::AnyRows& columns, const GradientChunk& chunk) {
  gemm::Scratch& scratch = worker.gemm.scratch;
  const auto tokens = gemm::strips_of_tokens<Kernel>(scratch, columns, chunk.count, task.cols);
  chunk.to.visit([&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    const index_t row_stride = chunk.to.row_stride(), col_stride = chunk.to.col_stride();
    for (index_t row = 0; row < task.rows; row += gemm::Blocking::kFinishedRows) {
      const arch::BlockTarget<T> to{data + (chunk.row + row) * row_stride + chunk.col * col_stride,
                                    row_stride,
                                    col_stride,
                                    chunk.mode.accumulate,
                                    chunk.mode.scale,
                                    nullptr};
      gemm::gemm_tn_finished<Kernel>(scratch, std::min(gemm::Blocking::kFinishedRows, task.rows - row),
                                     factor_of(factor, chunk, task.row + row), tokens, chunk.read_soon, to);
    }
  });
}

// The task's rectangle of a base weight's gradient = factor^T x input; input(row, rows) gives the columns [task.col, task.col +
// task.cols) of these of the expert's rows.
template <class Kernel, class Input>
void weight_gradient(Worker<Kernel>& worker, const Task& task, const gemm::Factor& factor, Input&& input,
                     const AnyMatrix& grad, const lora::GradientMode& mode) {
  in_chunks(worker, task, grad, mode, [&](const GradientChunk& chunk) {
    const gemm::AnyRows columns = input(chunk.first, chunk.count);
    if constexpr (gemm::MultipliesStrips<Kernel>) {
      finish_chunk(worker, task, factor, columns, chunk);
    } else {
      multiply_chunk(worker, task, factor, columns, chunk);
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
  const auto columns = [&](index_t row, index_t) { return inputs.from(row, task.col); };
  weight_gradient<Kernel>(worker, task, {rows_of(grad, expert, 0), nullptr}, columns,
                          grad_weight[expert.expert], {grads.accumulate, grads.scale});
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
