// What each phase of a pass has to do: FLOP and bytes, from shapes alone. Every GFLOP/s, GB/s and share of a peak
// that this library prints comes from here.
//
//   FLOP    2 for each multiply-add of a matrix product over routed rows. Padding, packing, conversions and
//           element-wise work (activation, weighting, biases, sums over routes) count nothing.
//   bytes   what the phase must at least read and write: each tensor once, however often blocking reads it. A
//           weight counts for experts with tokens only. Caches may hold part of it, so GB/s can exceed the
//           memory's.
#pragma once

#include "amx_sft_moe/core/element.hpp"
#include "amx_sft_moe/profile/phases.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

enum Projection : std::uint8_t { kGate, kUp, kDown, kProjections };

// Dimensions of a pass, and bytes an element (0: there is none, or the gradient is not wanted).
struct StepShape {
  index_t tokens = 0, top_k = 0;                // T, k
  index_t routed_rows = 0;                      // S
  index_t experts = 0, active_experts = 0;      // E, and those with rows
  index_t hidden = 0, intermediate = 0;         // H, I
  std::array<index_t, kProjections> rank{};     // r; 0: no adapter
  bool shared_a = false;                        // gate and up have one A
  bool saves = false;                           // a forward that leaves g, u and LoRA's u for its backward
  bool accumulates = false;                     // a backward that adds to parameter gradients
  index_t weight = 0, compute = 0, stored = 0;  // the kernel's types
  index_t id = 0, route_weight = 0;             // routing
  index_t x = 0, y = 0;                         // y: y of a forward, grad_y of a backward
  index_t grad_x = 0, grad_route_weight = 0;
  std::array<index_t, kProjections> a{}, b{}, bias{};
  std::array<index_t, kProjections> grad_a{}, grad_b{}, grad_bias{}, grad_weight{};

  index_t in(Projection p) const { return p == kDown ? intermediate : hidden; }
  index_t out(Projection p) const { return p == kDown ? hidden : intermediate; }
};

struct StepWork {
  std::array<std::int64_t, kPhaseCount> flop{}, bytes{};

  std::int64_t flop_of(Phase phase) const { return flop[static_cast<std::size_t>(phase)]; }
  std::int64_t bytes_of(Phase phase) const { return bytes[static_cast<std::size_t>(phase)]; }
  void add(Phase phase, std::int64_t more_flop, std::int64_t more_bytes) {
    flop[static_cast<std::size_t>(phase)] += more_flop;
    bytes[static_cast<std::size_t>(phase)] += more_bytes;
  }
};

namespace work {

// Reading ids and routing weights; writing token and weight of each row and the row of each route.
inline index_t routing_bytes(const StepShape& s) {
  return s.tokens * s.top_k * (s.id + s.route_weight + 4) + s.routed_rows * 8;
}

// Summing rows of fp32 into tokens.
inline index_t sum_bytes(const StepShape& s, index_t element) {
  return s.routed_rows * s.hidden * 4 + s.tokens * (s.hidden * element + s.top_k * 4);
}

// Factors A (or B) of the experts with tokens.
inline index_t a_bytes(const StepShape& s, Projection p) {
  return s.active_experts * s.rank[p] * s.in(p)*s.a[p];
}
inline index_t b_bytes(const StepShape& s, Projection p) {
  return s.active_experts * s.rank[p] * s.out(p) * s.b[p];
}

// A parameter gradient of `elements` an expert: overwritten for all experts, or read and written for those with
// tokens.
inline index_t gradient_bytes(const StepShape& s, index_t elements, index_t element) {
  return (s.accumulates ? 2 * s.active_experts : s.experts) * elements * element;
}

// grad_A = v^T input and grad_B, grad_bias = grad^T (u, 1), without their operands: input, u, v and grad.
inline index_t factor_gradient_bytes(const StepShape& s, Projection p) {
  return gradient_bytes(s, s.rank[p] * s.in(p), s.grad_a[p]) +
         gradient_bytes(s, s.rank[p] * s.out(p), s.grad_b[p]) + gradient_bytes(s, s.out(p), s.grad_bias[p]);
}

// lora_pass(gate) or lora_pass(up).
inline void add_lora_pass(StepWork& work, const StepShape& s, Projection p, Phase phase) {
  const index_t rows = s.routed_rows;
  const index_t rank = s.rank[p];
  const bool second = p == kUp && s.shared_a;  // its share of the one grad_A is made with gate's
  const index_t rank_of_a = p == kGate && s.shared_a ? rank + s.rank[kUp] : rank;
  index_t flop = 2 * rows * s.intermediate * rank;  // v = s grad B
  if (s.grad_b[p] != 0) flop += 2 * rows * s.intermediate * rank;
  if (s.grad_a[p] != 0 && !second) flop += 2 * rows * s.hidden * rank_of_a;
  index_t bytes = b_bytes(s, p) + rows * rank * s.stored + factor_gradient_bytes(s, p);
  if (rank != 0 || s.grad_bias[p] != 0) bytes += rows * s.intermediate * s.stored;
  if (s.grad_b[p] != 0) bytes += rows * rank * s.stored;
  // x is packed once for both, unless an expert has several chunks of tokens.
  if (p == kGate && (s.grad_a[kGate] != 0 || s.grad_a[kUp] != 0)) bytes += s.tokens * s.hidden * s.x;
  work.add(phase, flop, bytes);
}

// grad_W = grad^T input: of down (w p)^T h, with h from g and u; of gate and up grad^T x.
inline void add_weight_gradient(StepWork& work, const StepShape& s, Projection p, Phase phase) {
  if (s.grad_weight[p] == 0) return;
  const index_t rows = s.routed_rows;
  const index_t elements = s.hidden * s.intermediate;
  const index_t input = p == kDown ? 2 * rows * s.intermediate * s.stored : s.tokens * s.hidden * s.x;
  work.add(phase, 2 * rows * elements,
           rows * s.out(p) * s.stored + input + gradient_bytes(s, elements, s.grad_weight[p]));
}

inline void add_backward_down(StepWork& work, const StepShape& s) {
  const index_t rows = s.routed_rows;
  const index_t rank = s.rank[kDown];
  // grad_h = p Wd + v_d Ad
  work.add(Phase::kD3Gemm, 2 * rows * s.intermediate * (s.hidden + rank),
           s.active_experts * s.hidden * s.intermediate * s.weight + a_bytes(s, kDown) +
               rows * (s.hidden + rank) * s.stored + rows * s.intermediate * 4);
  // v_d = s p Bd; grad_Ad = (w v_d)^T h, h from g and u; grad_Bd = (w p)^T u_d
  index_t flop = 2 * rows * s.hidden * rank;
  index_t bytes = b_bytes(s, kDown) + rows * rank * s.stored + factor_gradient_bytes(s, kDown);
  if (rank != 0 || s.grad_bias[kDown] != 0) bytes += rows * s.hidden * s.stored;
  if (s.grad_a[kDown] != 0) {
    flop += 2 * rows * s.intermediate * rank;
    bytes += 2 * rows * s.intermediate * s.stored;
  }
  if (s.grad_b[kDown] != 0) {
    flop += 2 * rows * s.hidden * rank;
    bytes += rows * rank * s.stored;
  }
  work.add(Phase::kD4LoraGrad, flop, bytes);
  add_weight_gradient(work, s, kDown, Phase::kD5WeightGrad);
}

inline StepWork forward_work(const StepShape& s) {
  StepWork done;
  const index_t rows = s.routed_rows;
  const index_t ranks = s.rank[kGate] + s.rank[kUp];
  const index_t kept = s.saves ? s.stored : 0;
  done.add(Phase::kRoute, 0, routing_bytes(s));
  done.add(Phase::kGather, 0, s.tokens * s.hidden * s.x + rows * s.hidden * s.compute);
  if (ranks != 0) {  // u = s x A^T; with one A for both, x A^T is one product
    done.add(Phase::kLoraAForward, 2 * rows * s.hidden * (s.shared_a ? s.rank[kGate] : ranks),
             rows * s.hidden * s.compute + a_bytes(s, kGate) + (s.shared_a ? 0 : a_bytes(s, kUp)) +
                 rows * ranks * (s.compute + kept));
  }
  // g = x Wg^T + u_g Bg^T + bias, u the same; h = act(g, u)
  done.add(Phase::kGateUpGemm, 2 * rows * s.intermediate * (2 * s.hidden + ranks),
           s.active_experts * s.intermediate * (2 * s.hidden * s.weight + s.bias[kGate] + s.bias[kUp]) +
               b_bytes(s, kGate) + b_bytes(s, kUp) + rows * (s.hidden + ranks + s.intermediate) * s.compute +
               2 * rows * s.intermediate * kept);
  if (s.rank[kDown] != 0) {  // u_d = s h Ad^T
    done.add(Phase::kLoraADownForward, 2 * rows * s.intermediate * s.rank[kDown],
             rows * s.intermediate * s.compute + a_bytes(s, kDown) + rows * s.rank[kDown] * (s.compute + kept));
  }
  // w d = w (h Wd^T + u_d Bd^T + bias)
  done.add(Phase::kDownGemm, 2 * rows * s.hidden * (s.intermediate + s.rank[kDown]),
           s.active_experts * s.hidden * (s.intermediate * s.weight + s.bias[kDown]) + b_bytes(s, kDown) +
               rows * (s.intermediate + s.rank[kDown]) * s.compute + rows * (s.hidden + 1) * 4);
  done.add(Phase::kSumTokens, 0, sum_bytes(s, s.y));
  return done;
}

inline StepWork backward_work(const StepShape& s) {
  StepWork done;
  const index_t rows = s.routed_rows;
  const index_t ranks = s.rank[kGate] + s.rank[kUp];
  // Routing again, then p = grad_y of each row's token and <p, bias>.
  done.add(Phase::kD1Scatter, 0,
           routing_bytes(s) + s.tokens * s.hidden * s.y + rows * (s.hidden * s.stored + 4) +
               s.active_experts * s.hidden * s.bias[kDown]);
  add_backward_down(done, s);
  // grad_g, grad_u from grad_h, g and u; <grad_h, h>
  done.add(Phase::kSiluBackward, 0, rows * (s.intermediate * (4 + 4 * s.stored) + 8));
  if (s.grad_x != 0) {  // grad_g Wg + grad_u Wu + v_g Ag + v_u Au
    done.add(Phase::kGuBasePass, 2 * rows * s.hidden * (2 * s.intermediate + ranks),
             2 * s.active_experts * s.hidden * s.intermediate * s.weight + a_bytes(s, kGate) +
                 (s.shared_a ? 0 : a_bytes(s, kUp)) + rows * (2 * s.intermediate + ranks) * s.stored +
                 rows * s.hidden * 4);
    done.add(Phase::kGu4SumTokens, 0, sum_bytes(s, s.grad_x));
  }
  add_lora_pass(done, s, kGate, Phase::kGuLoraGate);
  add_lora_pass(done, s, kUp, Phase::kGuLoraUp);
  add_weight_gradient(done, s, kGate, Phase::kGuWeightGradGate);
  add_weight_gradient(done, s, kUp, Phase::kGuWeightGradUp);
  if (s.grad_route_weight != 0) {
    done.add(Phase::kRoutingWeights, 0, rows * 4 + s.tokens * s.top_k * (4 + s.grad_route_weight));
  }
  return done;
}

}  // namespace work

using work::backward_work;
using work::forward_work;

AMX_SFT_MOE_NAMESPACE_END
