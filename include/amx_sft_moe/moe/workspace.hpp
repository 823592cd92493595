// All memory of a step that nobody needs after it: named buffers with shapes. One workspace may serve many
// layers that run one after another; it grows to the largest and stays.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "amx_sft_moe/core/errors.hpp"
#include "amx_sft_moe/gemm/scratch.hpp"
#include "amx_sft_moe/moe/routing_table.hpp"
#include "amx_sft_moe/parallel/tasks.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

namespace moe {

// One unit of work of a region: a rectangle of one expert's result, or some tokens. `kind` is the phase's own.
struct Task {
  std::int32_t kind = 0;
  std::int32_t group = 0;              // of tasks that end together (Countdown)
  const ExpertRows* expert = nullptr;  // null: of tokens, or of an idle expert's gradients
  index_t idle_expert = -1;
  // Of the expert's rows, of a base weight's gradient where that is what it makes, or tokens.
  index_t row = 0, rows = 0;
  index_t col = 0, cols = 0;  // of the output's columns
};

}  // namespace moe

struct Workspace {
  // S routed rows, P groups of 16 of them (an expert's begin a new one); `Stored` and `Compute` are the kernel's
  // types. Operands are laid out as the kernel's gemm_nt wants them (gemm/tokens.hpp).
  gemm::Buffer x_operand;        // [16 P, H] Compute
  gemm::Buffer u_gate_operand;   // [16 P, r_gate] Compute: s x Ag^T
  gemm::Buffer u_up_operand;     // [16 P, r_up] Compute
  gemm::Buffer h_operand;        // [16 P, I] Compute
  gemm::Buffer u_down_operand;   // [16 P, r_down] Compute: s h Ad^T
  gemm::Buffer out_rows;         // [S, H] fp32: forward w d, backward grad_x of each route
  gemm::Buffer p_rows;           // [S, H] Stored: grad_y of each row's token
  gemm::Buffer v_down;           // [S, r_down] Stored: s p Bd
  gemm::Buffer weighted_v_down;  // [S, r_down] Stored: w s p Bd
  gemm::Buffer grad_h;           // [S, I] fp32, unweighted
  gemm::Buffer grad_gate;        // [S, I] Stored
  gemm::Buffer grad_up;          // [S, I] Stored
  gemm::Buffer v_gate;           // [S, r_gate] Stored: s grad_gate Bg
  gemm::Buffer v_up;             // [S, r_up] Stored
  gemm::Buffer row_weight_grad;  // [S] fp32: <p, bias>, then <grad_h, h> + <p, bias>

  moe::RoutingTable routing;
  std::vector<moe::Task> tasks;
  std::vector<gemm::Scratch> scratch;  // one per thread
  std::unique_ptr<parallel::Countdown[]> countdowns;
  index_t countdown_capacity = 0;
  std::atomic<bool> in_use{false};

  void reserve_threads(int threads) {
    if (scratch.size() < static_cast<std::size_t>(threads)) scratch.resize(static_cast<std::size_t>(threads));
  }
  // Which thread met the largest tasks is chance: after a step every thread has room for what any of them
  // needed, so that the next step of this kind allocates nothing. Where memory does not suffice for that, it allocates.
  void level_threads() noexcept {
    if (scratch.empty()) return;
    try {
      for (const gemm::Scratch& thread : scratch) scratch.front().grow_to(thread);
      for (gemm::Scratch& thread : scratch) thread.grow_to(scratch.front());
    } catch (const std::exception&) {  // the step has succeeded
    }
  }
  parallel::Countdown* reserve_countdowns(index_t count) {
    if (count > countdown_capacity) {
      countdowns = std::make_unique<parallel::Countdown[]>(static_cast<std::size_t>(count));
      countdown_capacity = count;
    }
    return countdowns.get();
  }

  index_t bytes() const {
    index_t total = routing.bytes() + static_cast<index_t>(tasks.capacity() * sizeof(moe::Task)) +
                    countdown_capacity * static_cast<index_t>(sizeof(parallel::Countdown));
    for (const gemm::Buffer* buffer :
         {&x_operand, &u_gate_operand, &u_up_operand, &h_operand, &u_down_operand, &out_rows, &p_rows, &v_down,
          &weighted_v_down, &grad_h, &grad_gate, &grad_up, &v_gate, &v_up, &row_weight_grad}) {
      total += buffer->bytes();
    }
    for (const gemm::Scratch& thread : scratch) total += thread.bytes();
    return total;
  }
};

AMX_SFT_MOE_NAMESPACE_END
