// The one list of phases: timer, NVTX ranges, text and JSON dumps and the Python bindings all read it.
//
// The published names (backward_down {D0..D4}, backward_activation, backward_gate_up {GU0..GU3}) are those that
// users of KTransformers' operator compare by. What this design fuses or does not need keeps its name and says
// so. What they do not know (the gradients of base weights, sums into tokens) has names of ours.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// A group is one stage of a pass: an NVTX range on the calling thread and one [BWD TIMER] / [FWD TIMER] line. That of the
// routing weights, a published name, has a line only: their gradients are written in kBackwardGateUp's last region.
enum class PhaseGroup : std::uint8_t {
  kForwardGather,
  kForwardGateUp,
  kForwardDown,
  kForwardSum,
  kBackwardDown,
  kBackwardActivation,
  kBackwardGateUp,
  kBackwardRoutingWeights,
  kCount,
};

// A phase is a kind of work inside a group: an NVTX range on each thread that does it, and one line of the
// dump.
enum class Phase : std::uint8_t {
  kRoute,             // sort routes by expert
  kGather,            // x into packed panels
  kLoraAForward,      // u = s x A^T for gate and up
  kGateUpGemm,        // gate and up projections, LoRA B as a second segment, activation
  kLoraADownForward,  // u_down = s h A_down^T
  kDownGemm,          // down projection
  kSumTokens,         // y
  kD0Prepare,         // not needed: nothing is cleared
  kD1Scatter,         // grad_y into expert order
  kD2Quantize,        // not needed: no quantised activations
  kD3Gemm,            // grad_h = p Wd + v_d Ad
  kD4LoraGrad,        // v_d, grad_A_down, grad_B_down
  kD5WeightGrad,      // grad_W_down, where it is wanted
  kSiluBackward,      // grad_g, grad_u
  kGu0Prepare,        // not needed
  kGuBasePass,        // grad_x rows = grad_g Wg + grad_u Wu + LoRA's data gradients: one fused contraction
  kGu2Requantize,     // not needed
  kGuLoraGate,        // v_g, grad_A_gate, grad_B_gate
  kGuLoraUp,          // v_u, grad_A_up, grad_B_up
  kGuWeightGradGate,  // grad_W_gate, where it is wanted
  kGuWeightGradUp,    // grad_W_up
  kGu4SumTokens,      // grad_x
  kRoutingWeights,    // grad of the routing weights; fused into the activation's backward
  kCount,
};

inline constexpr std::size_t kPhaseCount = static_cast<std::size_t>(Phase::kCount);
inline constexpr std::size_t kPhaseGroupCount = static_cast<std::size_t>(PhaseGroup::kCount);

enum class PhaseKind : std::uint8_t { kMeasured, kFused, kNotNeeded };

struct PhaseInfo {
  std::string_view name;
  std::string_view prefix;  // of its line in the text dump
  PhaseGroup group;
  PhaseKind kind;
};

inline constexpr std::array<PhaseInfo, kPhaseCount> kPhases{{
    {"route", "GATHER", PhaseGroup::kForwardGather, PhaseKind::kMeasured},
    {"gather", "GATHER", PhaseGroup::kForwardGather, PhaseKind::kMeasured},
    {"lora_a(gate,up)", "GATHER", PhaseGroup::kForwardGather, PhaseKind::kMeasured},
    {"gemm(gate)+gemm(up)+activation", "GU", PhaseGroup::kForwardGateUp, PhaseKind::kFused},
    {"lora_a(down)", "GU", PhaseGroup::kForwardGateUp, PhaseKind::kMeasured},
    {"gemm(down)", "DOWN", PhaseGroup::kForwardDown, PhaseKind::kMeasured},
    {"sum_tokens", "SUM", PhaseGroup::kForwardSum, PhaseKind::kMeasured},
    {"D0_prepare+memset", "DOWN", PhaseGroup::kBackwardDown, PhaseKind::kNotNeeded},
    {"D1_scatter", "DOWN", PhaseGroup::kBackwardDown, PhaseKind::kMeasured},
    {"D2_quantize", "DOWN", PhaseGroup::kBackwardDown, PhaseKind::kNotNeeded},
    {"D3_gemm", "DOWN", PhaseGroup::kBackwardDown, PhaseKind::kMeasured},
    {"D4_lora_grad", "DOWN", PhaseGroup::kBackwardDown, PhaseKind::kMeasured},
    {"D5_weight_grad", "DOWN", PhaseGroup::kBackwardDown, PhaseKind::kMeasured},
    {"silu_backward", "ACT", PhaseGroup::kBackwardActivation, PhaseKind::kMeasured},
    {"GU0_prepare+memset", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kNotNeeded},
    {"base_pass(gate)+base_pass(up)", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kFused},
    {"GU2_requantize_for_lora", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kNotNeeded},
    {"lora_pass(gate)", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kMeasured},
    {"lora_pass(up)", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kMeasured},
    {"weight_grad(gate)", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kMeasured},
    {"weight_grad(up)", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kMeasured},
    {"GU4_sum_tokens", "GU", PhaseGroup::kBackwardGateUp, PhaseKind::kMeasured},
    {"backward_routing_weights", "RW", PhaseGroup::kBackwardRoutingWeights, PhaseKind::kFused},
}};

inline constexpr std::array<std::string_view, kPhaseGroupCount> kPhaseGroups{
    "forward_gather", "forward_gate_up",     "forward_down",     "forward_sum_tokens",
    "backward_down",  "backward_activation", "backward_gate_up", "backward_routing_weights"};

constexpr const PhaseInfo& info_of(Phase phase) {
  return kPhases[static_cast<std::size_t>(phase)];
}
constexpr std::string_view name_of(PhaseGroup group) {
  return kPhaseGroups[static_cast<std::size_t>(group)];
}

AMX_SFT_MOE_NAMESPACE_END
