// What the phases of a backward pass hand on: matrices over routed rows, in the workspace.
#pragma once

#include "amx_sft_moe/moe/gradients.hpp"
#include "amx_sft_moe/moe/step.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

template <class Kernel>
struct BackwardRows {
  using Stored = typename Kernel::Stored;
  MatrixView<Stored> p;             // [S, H]
  MatrixView<Stored> v_down;        // [S, r_down]
  MatrixView<Stored> weighted_v;    // [S, r_down]: w v_down
  MatrixView<float> grad_h;         // [S, I]
  MatrixView<Stored> grad_gate;     // [S, I]
  MatrixView<Stored> grad_up;       // [S, I]
  MatrixView<Stored> v_gate, v_up;  // [S, r]
  MatrixView<float> grad_x;         // [S, H]; none where nobody wants it
  float* weight_grad;               // [S]: <p, bias> until the activation's phase completes it

  BackwardRows(Step<Kernel>& step, const Gradients& grads) {
    Workspace& work = step.work;
    const index_t rows = work.routing.routed_rows();
    p = row_matrix<Stored>(work.p_rows, rows, step.hidden);
    v_down = row_matrix<Stored>(work.v_down, rows, step.lora.down.rank());
    weighted_v = row_matrix<Stored>(work.weighted_v_down, rows, step.lora.down.rank());
    grad_h = row_matrix<float>(work.grad_h, rows, step.intermediate);
    grad_gate = row_matrix<Stored>(work.grad_gate, rows, step.intermediate);
    grad_up = row_matrix<Stored>(work.grad_up, rows, step.intermediate);
    v_gate = row_matrix<Stored>(work.v_gate, rows, step.lora.gate.rank());
    v_up = row_matrix<Stored>(work.v_up, rows, step.lora.up.rank());
    if (!grads.x.empty()) grad_x = row_matrix<float>(work.out_rows, rows, step.hidden);
    weight_grad = work.row_weight_grad.as<float>(rows);
  }
};

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
