// What the phases of a forward pass hand on, in the workspace: operands of gemm_nt, and rows over the routes.
#pragma once

#include "amx_sft_moe/moe/step.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

template <class Kernel>
class ForwardRows {
  using E = typename Kernel::Compute;

 public:
  // [16 P, k], laid out as the kernel's gemm_nt wants it.
  class Operand {
   public:
    Operand(gemm::Buffer& buffer, index_t padded_rows, index_t k)
        : row_stride_(gemm::token_stride<Kernel>(k)), data_(buffer.as<E>(padded_rows * row_stride_)) {}

    // An expert's rows from `row`, a multiple of 16, on.
    gemm::Panels<E> of(const ExpertRows& expert, index_t row) const {
      const index_t panel_stride = row_stride_ * arch::kPanelCols;
      return {data_ + (expert.panel_begin + row / arch::kPanelCols) * panel_stride, panel_stride};
    }

   private:
    index_t row_stride_;
    E* data_;
  };

  Operand x;              // [16 P, H]
  Operand u_gate, u_up;   // [16 P, r]
  Operand h;              // [16 P, I]
  Operand u_down;         // [16 P, r_down]
  MatrixView<float> out;  // [S, H]: w d of each route

  explicit ForwardRows(Step<Kernel>& step) : ForwardRows(step, step.work.routing.panels() * arch::kPanelCols) {}

 private:
  ForwardRows(Step<Kernel>& step, index_t padded_rows)
      : x(step.work.x_operand, padded_rows, step.hidden),
        u_gate(step.work.u_gate_operand, padded_rows, step.lora.gate.rank()),
        u_up(step.work.u_up_operand, padded_rows, step.lora.up.rank()),
        h(step.work.h_operand, padded_rows, step.intermediate),
        u_down(step.work.u_down_operand, padded_rows, step.lora.down.rank()),
        out(row_matrix<float>(step.work.out_rows, step.work.routing.routed_rows(), step.hidden)) {}
};

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
