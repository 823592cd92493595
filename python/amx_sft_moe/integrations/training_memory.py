"""How much memory training takes, from shapes alone.

Saved activations of the experts and the operator's workspace follow what the operator allocates (tests compare
them with what it did allocate); everything else is counted from the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.integrations.trained_parts import LoraOfExperts

# Values that an optimizer keeps of each trained one, in the parameter's type.
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "none": 0}
# The operator begins each of its saved matrices on a new line of so many elements, and an expert's rows in its
# workspace with a new group.
_LINE, _GROUP = 32, 16


@dataclass(frozen=True)
class LayerShape:
    """One layer's experts as the operator runs them."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    ranks: LoraOfExperts
    dtype: torch.dtype  # of the base weights

    @property
    def stored_bytes(self) -> int:
        """Of an element of what a forward leaves for its backward: bf16 for bf16 weights, or fp32."""
        return 2 if self.dtype == torch.bfloat16 else 4


def saved_by_operator(layer: LayerShape, tokens: int) -> int:
    """Bytes that a forward leaves for its backward: gate and up before the activation, LoRA's products.

    With all routes taken: T k rows of ``2 I + r_gate + r_up + r_down`` values.
    """
    rows = tokens * layer.top_k
    widths = [layer.intermediate_size] * 2 + [layer.ranks.gate, layer.ranks.up, layer.ranks.down]
    return sum(-(-rows * width // _LINE) * _LINE for width in widths) * layer.stored_bytes


def inputs_kept(layer: LayerShape, tokens: int, activation_bytes: int) -> int:
    """Bytes of x ``[T, H]``, expert ids ``[T, k]`` int64 and routing weights ``[T, k]`` fp32, which autograd
    keeps."""
    return tokens * (layer.hidden_size * activation_bytes + layer.top_k * (8 + 4))


def workspace(layer: LayerShape, tokens: int) -> int:
    """Bytes of scratch memory that all layers of a thread share, forward and backward, within about a fifth.

    The threads' own blocks (some MB) come on top; kernels that compute in bf16 need less for operands.
    """
    rows = tokens * layer.top_k
    active = min(layer.num_experts, rows)
    padded = rows + active * (_GROUP - 1) // 2  # on average half a group is empty
    ranks = layer.ranks.gate + layer.ranks.up + layer.ranks.down
    h, i, stored = layer.hidden_size, layer.intermediate_size, layer.stored_bytes
    operands = padded * (h + i + ranks) * 4  # x, h and LoRA's products as the products take them
    in_fp32 = rows * (h + i) * 4  # routes' outputs, grad_h
    gradients = rows * (h + 2 * i + ranks) * stored  # grad_y by row, grad_gate, grad_up, LoRA's
    return operands + in_fp32 + gradients


def optimizer_bytes(optimizer: str | float, parameters: int, parameter_bytes: int) -> int:
    """Bytes of an optimizer's state: by name as torch keeps it, or bytes a trained parameter.

    Raises:
        ArgumentError: the name is unknown, or the number negative or not finite.
    """
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise ArgumentError(
                f"optimizer: expected one of {', '.join(OPTIMIZERS)} or bytes a parameter, got {optimizer!r}"
            )
        return OPTIMIZERS[optimizer] * parameter_bytes
    if isinstance(optimizer, bool) or not isinstance(optimizer, (int, float)):
        raise ArgumentError(f"optimizer: expected a name or bytes a parameter, got {optimizer!r}")
    if not 0 <= optimizer * max(parameters, 1) < float("inf"):
        raise ArgumentError(
            f"optimizer: expected a finite number of at least 0 bytes a parameter, got {optimizer}"
        )
    return round(optimizer * parameters)


def layer_shape(module: nn.Module, num_experts: int, top_k: int, ranks: LoraOfExperts) -> LayerShape | None:
    """The shape of a fused experts module, from its weights; None where they are not of the kind that the
    operator takes."""
    weights = {n: p for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    first, down = weights.get("gate_up_proj", weights.get("gate_proj")), weights.get("down_proj")
    if first is None or down is None:
        return None
    hidden, inner = down.shape[1:]
    if getattr(module, "is_transposed", False):
        hidden, inner = inner, hidden
    return LayerShape(num_experts, top_k, hidden, inner, ranks, down.dtype)
