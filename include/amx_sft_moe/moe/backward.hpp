// The phases of a backward pass, in order. Each is one region of tasks; its end is a synchronisation point (5
// in all).
//
//   scatter       p = grad_y of each row's token;  <p, bias>;  v_d = s p Bd, w v_d
//   down          grad_h = p Wd + v_d Ad,        beside  grad_Ad = (w v_d)^T h, grad_Bd = p^T (w u_d),
//                                                        grad_Wd = (w p)^T h
//   activation    grad_g, grad_u = act'(g, u) w grad_h;  <grad_h, h> + <p, bias>;
//                 v_g = s grad_g Bg, v_u = s grad_u Bu
//   gate_up       grad_x rows = grad_g Wg + grad_u Wu + v_g Ag + v_u Au,
//                                                beside  grad_A = v^T x, grad_B = grad^T u, grad_W = grad^T x
//                                                        for gate and up
//   sum_tokens    grad_x and the gradient of the routing weights
//
// Gradients of biases, sums over an expert's rows, are made beside grad_B of the same projection; those of base
// weights are in moe/weight_gradient.hpp. All of them are products over an expert's rows (moe/gradient_chunks.hpp).
//
// s is in the saved u and in v, so no product is scaled again. Tasks of a region do not depend on one another.
#pragma once

#include "amx_sft_moe/moe/backward_rows.hpp"
#include "amx_sft_moe/moe/forward.hpp"
#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/moe/weight_gradient.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

template <class Kernel>
void backward_scatter(Step<Kernel>& step, const BackwardRows<Kernel>& rows, const AnyConstMatrix& grad_y) {
  using Stored = typename Kernel::Stored;
  Workspace& work = step.work;
  set_row_tasks(step);
  run_region(step, PhaseGroup::kBackwardDown, [&](Worker<Kernel>& worker, const Task& task) {
    const ExpertRows& expert = *task.expert;
    const MatrixView<Stored> p = rows_of(rows.p, expert, task.row);
    worker.time(Phase::kD1Scatter, [&] {
      const auto source =
          gemm::AnyRows(grad_y).gathered(work.routing.token_of_row() + expert.row_begin + task.row);
      source.visit([&](const auto& from) {
        Kernel::Rows::template stage<Stored>(from, task.rows, step.hidden, step.hidden, p.data, p.row_stride);
      });
      for (index_t i = 0; i < task.rows; ++i) {
        rows.weight_grad[expert.row_begin + task.row + i] =
            dot_with_bias(p.row(i), step.weights.biases.down, expert.expert);
      }
    });
    if (step.lora.down.rank() == 0) return;
    worker.time(Phase::kD4LoraGrad, [&] {
      lora::project_gradient<Kernel>(worker.gemm, p, task.rows, step.lora.down.b[expert.expert],
                                     {step.lora.down.scaling, rows_of(rows.v_down, expert, task.row),
                                      work.routing.weight_of_row() + expert.row_begin + task.row,
                                      rows_of(rows.weighted_v, expert, task.row)});
    });
  });
}

// Kinds of tasks. Measured costs of tasks (benchmarks/) know them by number: new ones come last.
enum DownTask : int { kDownGemm, kDownGradA, kDownGradB, kDownIdle, kDownWeight, kDownWeightIdle };

// The task's columns of `to` = sum over the terms, whose B begin with them.
template <class Kernel, std::size_t Terms>
void product_into(Step<Kernel>& step, Worker<Kernel>& worker, const Task& task,
                  const std::array<gemm::NnTerm, Terms>& terms, const MatrixView<float>& to) {
  const bool past_caches = step.template past_caches<float>(to.cols);
  gemm::gemm_nn<Kernel>(worker.gemm, task.rows, task.cols, terms, [&](const gemm::Block& block) {
    const arch::BlockTarget<float> target{
        to.row(block.row) + task.col + block.col, to.row_stride, 1, false, 1.0F, nullptr, past_caches};
    Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, target);
  });
  gemm::settle_stores<Kernel>(past_caches);
}

// grad_h = p Wd + v_d Ad, a block of columns.
template <class Kernel>
void backward_down_gemm(Step<Kernel>& step, const BackwardRows<Kernel>& rows, Worker<Kernel>& worker,
                        const Task& task) {
  const ExpertRows& expert = *task.expert;
  const LoraAdapter& adapter = step.lora.down;
  std::array<gemm::NnTerm, 2> terms;
  terms[0] = {rows_of(rows.p, expert, task.row),
              gemm::AnyRows(step.weights.down[expert.expert]).from(0, task.col), step.hidden};
  if (adapter.rank() > 0) {
    terms[1] = {rows_of(rows.v_down, expert, task.row),
                gemm::AnyRows(adapter.a[expert.expert]).from(0, task.col), adapter.rank()};
  }
  product_into<Kernel>(step, worker, task, terms, rows_of(rows.grad_h, expert, task.row));
}

// grad_Ad = (w v_d)^T h, a block of columns.
template <class Kernel>
void backward_down_grad_a(Step<Kernel>& step, const BackwardRows<Kernel>& rows, Worker<Kernel>& worker,
                          const Task& task, const Gradients& grads) {
  const ExpertRows& expert = *task.expert;
  const std::array<gemm::Factor, 1> factors{{{rows_of(rows.weighted_v, expert, 0), nullptr}}};
  ChunkColumns h(worker, task.cols, [&](index_t first, index_t count) {
    return activation_columns(step, worker, expert, first, count, task.col, task.cols);
  });
  const GradientRectangle to{grads.lora.down_a[expert.expert], 0, step.lora.down.rank(), task.col, task.cols};
  gradient_of_tokens(worker, expert.rows, factors, h, to, grads.mode());
}

// grad_B = grad^T u, a block of rows, made as its transpose, and the bias' grad^T 1; grad of gate or up [rows, I], or p with
// each row's weight, which goes to the small factor: u has it already, for the bias it is `weights`.
template <class Kernel>
void gradients_of_outputs(Worker<Kernel>& worker, const Task& task,
                          const MatrixView<typename Kernel::Stored>& grad,
                          const MatrixView<typename Kernel::Stored>& u, const float* weights,
                          const AnyExpertTensor& grad_b, const AnyMatrix& grad_bias, const GradientMode& mode) {
  const ExpertRows& expert = *task.expert;
  ChunkColumns columns(worker, task.cols, [&](index_t first, index_t) {
    return gemm::AnyRows(rows_of(grad, expert, 0)).from(first, task.col);
  });
  const AnyMatrix bias = bias_gradient_of(grad_bias, expert.expert);
  gradient_of_tokens(worker, expert.rows, std::array{factor_of_bias(weights)}, columns,
                     {bias, 0, 1, task.col, task.cols}, mode);
  if (grad_b.empty()) return;
  const std::array<gemm::Factor, 1> factors{{{rows_of(u, expert, 0), nullptr}}};
  gradient_of_tokens(worker, expert.rows, factors, columns,
                     {grad_b[expert.expert].transposed(), 0, u.cols, task.col, task.cols}, mode);
}

// Zeros for the experts without tokens, where gradients are overwritten.
inline void add_idle_tasks(std::vector<Task>& tasks, int kind, const RoutingTable& routing,
                           const Gradients& grads) {
  if (grads.accumulate) return;
  for (const index_t expert : routing.idle()) {
    Task task;
    task.kind = kind;
    task.idle_expert = expert;
    tasks.push_back(task);
  }
}

inline void clear_idle(const AnyExpertTensor& grad, index_t expert) {
  if (!grad.empty()) lora::clear(grad[expert]);
}

// LoRA's gradients: all rows of an expert, `cols` columns of x, h or their gradients cut into tasks.
template <class Kernel>
void add_gradient_tasks(Step<Kernel>& step, int kind, const ExpertRows& expert, index_t cols) {
  const index_t col_step = step.blocking.template tn_cols<Kernel>(expert.rows, cols, step.load());
  add_tasks(step.work.tasks, kind, expert, {expert.rows, cols, expert.rows, col_step});
}

// gemm_nn over k steps, [rows, cols] of an expert cut into tasks.
template <class Kernel>
void add_product_tasks(Step<Kernel>& step, int kind, const ExpertRows& expert, index_t k, index_t cols) {
  const index_t rows = gemm::Blocking::nn_tokens<Kernel>(expert.rows);
  const index_t col_step = step.blocking.template nn_cols<Kernel>(k, rows, cols, step.load());
  add_tasks(step.work.tasks, kind, expert, {expert.rows, cols, rows, col_step});
}

// Returns how many of the list's first tasks are products with the weights.
template <class Kernel>
index_t add_down_tasks(Step<Kernel>& step, const Gradients& grads) {
  auto& tasks = step.work.tasks;
  const bool wants_a = !grads.lora.down_a.empty();
  const bool wants_b = !grads.lora.down_b.empty() || !grads.biases.down.empty();
  const bool wants_weight = !grads.weights.down.empty();
  tasks.clear();
  for (const ExpertRows& expert : step.work.routing.active()) {
    add_product_tasks(step, kDownGemm, expert, step.hidden, step.intermediate);
  }
  const index_t products = num_tasks(step);
  for (const ExpertRows& expert : step.work.routing.active()) {
    if (wants_weight) add_weight_tasks(step, kDownWeight, expert, step.hidden, step.intermediate);
    if (wants_a) add_gradient_tasks(step, kDownGradA, expert, step.intermediate);
    if (wants_b) add_gradient_tasks(step, kDownGradB, expert, step.hidden);
  }
  if (wants_weight) add_idle_tasks(tasks, kDownWeightIdle, step.work.routing, grads);
  if (wants_a || wants_b) add_idle_tasks(tasks, kDownIdle, step.work.routing, grads);
  return products;
}

template <class Kernel>
void backward_down(Step<Kernel>& step, const BackwardRows<Kernel>& rows, const Gradients& grads) {
  const index_t products = add_down_tasks(step, grads);
  run_region(step, PhaseGroup::kBackwardDown, products, [&](Worker<Kernel>& worker, const Task& task) {
    switch (static_cast<DownTask>(task.kind)) {
      case kDownGemm:
        worker.time(Phase::kD3Gemm, [&] { backward_down_gemm(step, rows, worker, task); });
        break;
      case kDownWeight:
        worker.time(Phase::kD5WeightGrad, [&] { backward_down_weight(step, rows, worker, task, grads); });
        break;
      case kDownGradA:
        worker.time(Phase::kD4LoraGrad, [&] { backward_down_grad_a(step, rows, worker, task, grads); });
        break;
      case kDownGradB:
        worker.time(Phase::kD4LoraGrad, [&] {
          const float* weights = step.work.routing.weight_of_row() + task.expert->row_begin;
          gradients_of_outputs(worker, task, rows.p, step.saved.u_down, weights, grads.lora.down_b,
                               grads.biases.down, grads.mode());
        });
        break;
      case kDownWeightIdle:
        worker.time(Phase::kD5WeightGrad, [&] { clear_idle(grads.weights.down, task.idle_expert); });
        break;
      case kDownIdle:
        worker.time(Phase::kD4LoraGrad, [&] {
          clear_idle(grads.lora.down_a, task.idle_expert);
          clear_idle(grads.lora.down_b, task.idle_expert);
          clear_bias_gradient(grads.biases.down, task.idle_expert);
        });
        break;
    }
  });
}

template <class Kernel>
void backward_activation(Step<Kernel>& step, const BackwardRows<Kernel>& rows) {
  Workspace& work = step.work;
  set_row_tasks(step);
  run_region(step, PhaseGroup::kBackwardActivation, [&](Worker<Kernel>& worker, const Task& task) {
    const ExpertRows& expert = *task.expert;
    const index_t first = expert.row_begin + task.row;
    worker.time(Phase::kSiluBackward, [&] {
      std::visit(
          [&](const auto& activation) {
            for (index_t row = first; row < first + task.rows; ++row) {
              rows.weight_grad[row] += Kernel::Activation::backward(
                  activation, rows.grad_h.row(row), step.saved.gate.row(row), step.saved.up.row(row),
                  work.routing.weight_of_row()[row], step.intermediate, rows.grad_gate.row(row),
                  rows.grad_up.row(row));
            }
          },
          step.activation);
    });
    auto project = [&](Phase phase, const LoraAdapter& adapter, const auto& grad, const auto& v) {
      if (adapter.rank() == 0) return;
      worker.time(phase, [&] {
        lora::project_gradient<Kernel>(worker.gemm, rows_of(grad, expert, task.row), task.rows,
                                       adapter.b[expert.expert],
                                       {adapter.scaling, rows_of(v, expert, task.row)});
      });
    };
    project(Phase::kGuLoraGate, step.lora.gate, rows.grad_gate, rows.v_gate);
    project(Phase::kGuLoraUp, step.lora.up, rows.grad_up, rows.v_up);
  });
}

enum GateUpTask : int {
  kBasePass,
  kGradA,
  kGradBGate,
  kGradBUp,
  kGateUpIdle,
  kGateWeight,
  kUpWeight,
  kGateWeightIdle,
  kUpWeightIdle
};

// grad_x rows = grad_g Wg + grad_u Wu + v_g Ag + v_u Au: one contraction, a block of columns.
template <class Kernel>
void backward_base_pass(Step<Kernel>& step, const BackwardRows<Kernel>& rows, Worker<Kernel>& worker,
                        const Task& task) {
  const ExpertRows& expert = *task.expert;
  const index_t e = expert.expert;
  std::array<gemm::NnTerm, 4> terms;
  auto add = [&](std::size_t at, const auto& grad, const auto& weight, const auto& v,
                 const LoraAdapter& adapter) {
    terms[at] = {rows_of(grad, expert, task.row), gemm::AnyRows(weight).from(0, task.col), step.intermediate};
    if (adapter.rank() == 0) return;
    terms[at + 2] = {rows_of(v, expert, task.row), gemm::AnyRows(adapter.a[e]).from(0, task.col),
                     adapter.rank()};
  };
  add(0, rows.grad_gate, step.weights.gate[e], rows.v_gate, step.lora.gate);
  add(1, rows.grad_up, step.weights.up[e], rows.v_up, step.lora.up);
  product_into<Kernel>(step, worker, task, terms, rows_of(rows.grad_x, expert, task.row));
}

// grad_A of gate and up, a block of columns: v^T x, x of one chunk packed once for both. A shared A gets the sum.
template <class Kernel>
void backward_grad_a(Step<Kernel>& step, const BackwardRows<Kernel>& rows, Worker<Kernel>& worker,
                     const Task& task, const AnyConstMatrix& x, const Gradients& grads) {
  const ExpertRows& expert = *task.expert;
  const gemm::Factor gate{rows_of(rows.v_gate, expert, 0), nullptr};
  const gemm::Factor up{rows_of(rows.v_up, expert, 0), nullptr};
  const auto inputs = gemm::AnyRows(x).gathered(step.work.routing.token_of_row() + expert.row_begin);
  ChunkColumns columns(worker, task.cols, [&](index_t first, index_t) { return inputs.from(first, task.col); });
  const auto gradient = [&](const auto& factors, const AnyExpertTensor& grad_a, index_t rank) {
    if (grad_a.empty()) return;
    gradient_of_tokens(worker, expert.rows, factors, columns,
                       {grad_a[expert.expert], 0, rank, task.col, task.cols}, grads.mode());
  };
  const bool shared = step.lora.gate_up_share_a();
  worker.time(Phase::kGuLoraGate, [&] {
    if (shared) return gradient(std::array{gate, up}, grads.lora.gate_a, step.lora.gate.rank());
    gradient(std::array{gate}, grads.lora.gate_a, step.lora.gate.rank());
  });
  if (shared || grads.lora.up_a.empty()) return;
  worker.time(Phase::kGuLoraUp, [&] { gradient(std::array{up}, grads.lora.up_a, step.lora.up.rank()); });
}

// As add_down_tasks().
template <class Kernel>
index_t add_gate_up_tasks(Step<Kernel>& step, const Gradients& grads) {
  auto& tasks = step.work.tasks;
  const LoraGradients& to = grads.lora;
  const bool wants_a = !to.gate_a.empty() || !to.up_a.empty();
  const bool wants_gate_b = !to.gate_b.empty() || !grads.biases.gate.empty();
  const bool wants_up_b = !to.up_b.empty() || !grads.biases.up.empty();
  const bool wants_gate = !grads.weights.gate.empty();
  const bool wants_up = !grads.weights.up.empty();
  tasks.clear();
  if (!grads.x.empty()) {
    for (const ExpertRows& expert : step.work.routing.active()) {
      add_product_tasks(step, kBasePass, expert, 2 * step.intermediate, step.hidden);
    }
  }
  const index_t products = num_tasks(step);
  for (const ExpertRows& expert : step.work.routing.active()) {
    if (wants_gate) add_weight_tasks(step, kGateWeight, expert, step.intermediate, step.hidden);
    if (wants_up) add_weight_tasks(step, kUpWeight, expert, step.intermediate, step.hidden);
    if (wants_a) add_gradient_tasks(step, kGradA, expert, step.hidden);
    if (wants_gate_b) add_gradient_tasks(step, kGradBGate, expert, step.intermediate);
    if (wants_up_b) add_gradient_tasks(step, kGradBUp, expert, step.intermediate);
  }
  if (wants_gate) add_idle_tasks(tasks, kGateWeightIdle, step.work.routing, grads);
  if (wants_up) add_idle_tasks(tasks, kUpWeightIdle, step.work.routing, grads);
  if (wants_a || wants_gate_b || wants_up_b) {
    add_idle_tasks(tasks, kGateUpIdle, step.work.routing, grads);
  }
  return products;
}

template <class Kernel>
void backward_gate_up(Step<Kernel>& step, const BackwardRows<Kernel>& rows, const AnyConstMatrix& x,
                      const Gradients& grads) {
  const index_t products = add_gate_up_tasks(step, grads);
  run_region(step, PhaseGroup::kBackwardGateUp, products, [&](Worker<Kernel>& worker, const Task& task) {
    switch (static_cast<GateUpTask>(task.kind)) {
      case kBasePass:
        worker.time(Phase::kGuBasePass, [&] { backward_base_pass(step, rows, worker, task); });
        break;
      case kGateWeight:
        worker.time(Phase::kGuWeightGradGate, [&] {
          backward_gate_up_weight(step, worker, task, rows.grad_gate, x, grads.weights.gate, grads);
        });
        break;
      case kUpWeight:
        worker.time(Phase::kGuWeightGradUp, [&] {
          backward_gate_up_weight(step, worker, task, rows.grad_up, x, grads.weights.up, grads);
        });
        break;
      case kGradA:
        backward_grad_a(step, rows, worker, task, x, grads);
        break;
      case kGradBGate:
        worker.time(Phase::kGuLoraGate, [&] {
          gradients_of_outputs(worker, task, rows.grad_gate, step.saved.u_gate, nullptr, grads.lora.gate_b,
                               grads.biases.gate, grads.mode());
        });
        break;
      case kGradBUp:
        worker.time(Phase::kGuLoraUp, [&] {
          gradients_of_outputs(worker, task, rows.grad_up, step.saved.u_up, nullptr, grads.lora.up_b,
                               grads.biases.up, grads.mode());
        });
        break;
      case kGateWeightIdle:
        worker.time(Phase::kGuWeightGradGate, [&] { clear_idle(grads.weights.gate, task.idle_expert); });
        break;
      case kUpWeightIdle:
        worker.time(Phase::kGuWeightGradUp, [&] { clear_idle(grads.weights.up, task.idle_expert); });
        break;
      case kGateUpIdle:
        worker.time(Phase::kGuLoraGate, [&] {
          clear_idle(grads.lora.gate_a, task.idle_expert);
          clear_idle(grads.lora.gate_b, task.idle_expert);
          clear_bias_gradient(grads.biases.gate, task.idle_expert);
        });
        worker.time(Phase::kGuLoraUp, [&] {
          if (!step.lora.gate_up_share_a()) clear_idle(grads.lora.up_a, task.idle_expert);
          clear_idle(grads.lora.up_b, task.idle_expert);
          clear_bias_gradient(grads.biases.up, task.idle_expert);
        });
        break;
    }
  });
}

// grad_w of a token's routes; a skipped route's is zero.
inline void store_weight_gradients(const RoutingTable& routing, const Task& task, index_t top_k,
                                   const float* weight_grad, const AnyMatrix& out) {
  out.visit([&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    for (index_t t = task.row; t < task.row + task.rows; ++t) {
      for (index_t j = 0; j < top_k; ++j) {
        const std::int32_t row = routing.row_of_route()[t * top_k + j];
        data[t * out.row_stride() + j * out.col_stride()] = from_float<T>(row < 0 ? 0.0F : weight_grad[row]);
      }
    }
  });
}

template <class Kernel>
void backward_sum_tokens(Step<Kernel>& step, const BackwardRows<Kernel>& rows, const Gradients& grads) {
  step.work.tasks.clear();
  if (!grads.x.empty() || !grads.routing_weights.empty()) {
    add_token_tasks(step.work.tasks, step.tokens, step.threads);
  }
  run_region(step, PhaseGroup::kBackwardGateUp, [&](Worker<Kernel>& worker, const Task& task) {
    if (!grads.x.empty()) {
      worker.time(Phase::kGu4SumTokens, [&] { sum_rows_of_tokens(step, task, rows.grad_x, grads.x); });
    }
    if (!grads.routing_weights.empty()) {
      worker.time(Phase::kRoutingWeights, [&] {
        store_weight_gradients(step.work.routing, task, step.top_k, rows.weight_grad, grads.routing_weights);
      });
    }
  });
}

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
