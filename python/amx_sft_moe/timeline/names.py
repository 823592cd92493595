"""Names of groups and phases, as include/amx_sft_moe/profile/phases.hpp has them (a test compares the two).

They are needed where a file does not say by itself what is a group: NVTX ranges of our domain.
"""

from __future__ import annotations

import re

DOMAIN = "amx_sft_moe"

PHASES_OF_GROUPS = {
    "forward_gather": ("route", "gather", "lora_a(gate,up)"),
    "forward_gate_up": ("gemm(gate)+gemm(up)+activation", "lora_a(down)"),
    "forward_down": ("gemm(down)",),
    "forward_sum_tokens": ("sum_tokens",),
    "backward_down": (
        "D0_prepare+memset",
        "D1_scatter",
        "D2_quantize",
        "D3_gemm",
        "D4_lora_grad",
        "D5_weight_grad",
    ),
    "backward_activation": ("silu_backward",),
    "backward_gate_up": (
        "GU0_prepare+memset",
        "base_pass(gate)+base_pass(up)",
        "GU2_requantize_for_lora",
        "lora_pass(gate)",
        "lora_pass(up)",
        "weight_grad(gate)",
        "weight_grad(up)",
        "GU4_sum_tokens",
    ),
    "backward_routing_weights": ("backward_routing_weights",),
}
GROUPS = tuple(PHASES_OF_GROUPS)
FORWARD_GROUPS, BACKWARD_GROUPS = GROUPS[:4], GROUPS[4:]
PHASES = tuple(phase for phases in PHASES_OF_GROUPS.values() for phase in phases)

# Ranges that drivers of the operator put around their steps.
DRIVER_RANGES = ("forward_only", "backward_only", "full_train_loop")

_GEMM = re.compile(r"gemm|base_pass|weight_grad")
_GROUP_OF_STEP = {**dict.fromkeys(FORWARD_GROUPS, "forward"), **dict.fromkeys(BACKWARD_GROUPS, "backward")}


def is_total(phase: str) -> bool:
    """Whether a published name is the sum of others (GU1_base_passes_total), which would count twice."""
    return phase.endswith("_total")


def is_gemm(phase: str) -> bool:
    """Whether a phase is a product as large as the base weights, with them or for their gradients; LoRA's own
    products are too thin to be judged by the peak."""
    return _GEMM.search(phase) is not None


def step_of_group(group: str) -> str | None:
    """``"forward"`` or ``"backward"``; None for a name that is no group of ours."""
    return _GROUP_OF_STEP.get(group)


def step_kind(name: str) -> str:
    """The kind of pass that a range is, by its name: forward and backward where the name says so."""
    for kind in ("backward", "forward"):
        if kind in name:
            return kind
    return name
