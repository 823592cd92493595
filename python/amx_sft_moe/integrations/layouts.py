"""Where an experts module of transformers keeps its weights, and the same weights as the operator reads them.

Four layouts: ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``, or both transposed, ``[E, H, 2I]`` and
``[E, I, H]``; and rows of gate before those of up, or alternating with them. The operator takes rows of any
stride whose elements lie side by side. So alternating rows are a view, and a transposed weight is one as soon
as its memory is laid out the other way round. :func:`lay_out_rows` does that once: the parameter stays what it
was, with its shape and values; its strides change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.graph import get_gradient_edge

from amx_sft_moe.integrations.adapters_in_use import NotUnderstoodError, parametrizations_of
from amx_sft_moe.integrations.mapped_experts import MappedStack, weights_one_by_one
from amx_sft_moe.layer import ExpertBiases, Weight

logger = logging.getLogger("amx_sft_moe")

FLOATS = (torch.bfloat16, torch.float32)
_MARK = "_amx_sft_moe_held"
# Two threads that meet a new model together: one lays out its memory, the other waits.
_laying_out = threading.Lock()


@dataclass(frozen=True)
class Layout:
    """How gate, up and down lie in a module's parameters."""

    transposed: bool
    interleaved: bool
    biased: bool


def base_weight(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter below whatever adapts it, or the plain tensor that FSDP has in its place while the module
    runs."""
    weight: torch.Tensor | None = module._parameters.get(name)
    if weight is None and isinstance(plain := module.__dict__.get(name), torch.Tensor):
        weight = plain
    if weight is None and (parametrizations := parametrizations_of(module, name)) is not None:
        weight = getattr(parametrizations, "original", None)
    if weight is None:
        raise NotUnderstoodError(f"expected a parameter {name}, got none")
    return weight


def require_gated(module: nn.Module) -> None:
    """Raises NotUnderstoodError where transformers' flags tell of other steps than the operator's."""
    for flag, expected in (("has_gate", True), ("has_post_expert_norm", False)):
        if getattr(module, flag, expected) is not expected:
            raise NotUnderstoodError(f"expected {flag}={expected}, got {getattr(module, flag)}")


def layout_of(module: nn.Module, interleaved: bool) -> Layout:
    """The layout that transformers' flags tell, where it is one that the operator takes.

    Args:
        interleaved: whether the gate takes alternating entries.

    Raises:
        NotUnderstoodError: another layout, or flags that contradict the gate.
    """
    if bool(getattr(module, "is_concatenated", True)) is interleaved:
        raise NotUnderstoodError(
            f"expected is_concatenated={not interleaved}, as the gate takes its input, got {interleaved}"
        )
    return Layout(
        transposed=bool(getattr(module, "is_transposed", False)),
        interleaved=interleaved,
        biased=bool(getattr(module, "has_bias", False)),
    )


def require_kinds(weights: Mapping[str, torch.Tensor]) -> None:
    """Raises NotUnderstoodError where the operator cannot take such weights, whatever their layout."""
    for name, weight in weights.items():
        if type(weight) not in (torch.Tensor, nn.Parameter, MappedStack):
            raise NotUnderstoodError(f"expected {name} as a plain tensor, got {type(weight).__name__}")
        if weight.device.type != "cpu" or weight.dtype not in FLOATS:
            raise NotUnderstoodError(
                f"expected {name} in bfloat16 or float32 on cpu, got {weight.dtype} on {weight.device}"
            )


def require_weights(layout: Layout, gate_up: torch.Tensor, down: torch.Tensor, hidden: int) -> None:
    """Raises NotUnderstoodError where the operator cannot take these weights."""
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        if weight.dim() != 3 or (not layout.transposed and weight.stride(2) != 1):
            raise NotUnderstoodError(
                f"expected {name} with 3 dimensions and adjacent elements in the last, got shape "
                f"{list(weight.shape)}, strides {list(weight.stride())}"
            )
    if gate_up.dtype != down.dtype:
        raise NotUnderstoodError(
            f"expected one dtype, got gate_up_proj {gate_up.dtype} and down_proj {down.dtype}"
        )
    e, rows, cols = gate_up.shape
    inner = (cols if layout.transposed else rows) // 2
    wanted = [(e, 2 * inner, hidden), (e, hidden, inner)]
    letters = "[E, 2I, H] and down_proj [E, H, I]"
    if layout.transposed:
        wanted = [(e, out, into) for e, into, out in wanted]
        letters = "[E, H, 2I] and down_proj [E, I, H]"
    if [tuple(gate_up.shape), tuple(down.shape)] != wanted or inner == 0:
        raise NotUnderstoodError(
            f"expected gate_up_proj {letters} with H={hidden}, got {list(gate_up.shape)} and {list(down.shape)}"
        )


def _biases(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        # Only the plain parameter: a bias that something adapts is not what is stored.
        bias = module._parameters.get(name)
        if bias is None:
            raise NotUnderstoodError(f"expected a parameter {name}, got none")
        found.append(bias)
    return found[0], found[1]


def require_biases(module: nn.Module, layout: Layout, down: Sequence[int]) -> None:
    """Raises NotUnderstoodError where the operator cannot take the module's biases beside a ``down_proj`` of
    this shape."""
    experts, hidden, intermediate = (down[0], down[2], down[1]) if layout.transposed else down
    shapes = (experts, 2 * intermediate), (experts, hidden)
    names = "gate_up_proj_bias", "down_proj_bias"
    for name, bias, shape in zip(names, _biases(module), shapes, strict=True):
        if type(bias) is not nn.Parameter or bias.device.type != "cpu" or bias.dtype not in FLOATS:
            raise NotUnderstoodError(
                f"expected {name} as a plain parameter in bfloat16 or float32 on cpu, got a "
                f"{type(bias).__name__} in {bias.dtype} on {bias.device}"
            )
        if tuple(bias.shape) != shape:
            raise NotUnderstoodError(f"expected {name} {list(shape)}, got {list(bias.shape)}")


def biases_of(module: nn.Module, layout: Layout) -> ExpertBiases:
    """The module's biases as the operator takes them: differentiable views of its parameters."""
    if not layout.biased:
        return ExpertBiases()
    gate_up, down = _biases(module)
    if layout.interleaved:
        gate, up = gate_up.unflatten(1, (-1, 2)).unbind(2)
        return ExpertBiases(gate_bias=gate, up_bias=up, down_bias=down)
    return ExpertBiases(gate_up_bias=gate_up, down_bias=down)


def as_operator_takes_them(layout: Layout, gate_up: torch.Tensor, down: torch.Tensor) -> Mapping[str, Weight]:
    """Views of the weights by the operator's names: ``gate_up_proj [E, 2I, H]``, or ``gate_proj`` and
    ``up_proj [E, I, H]``; and ``down_proj [E, H, I]``. The weights themselves where nothing has to change.

    Differentiable: gradients of the views arrive at the parameters in the parameters' own shape. Mapped weights
    are one matrix per expert and frozen.
    """
    if isinstance(gate_up, MappedStack) or isinstance(down, MappedStack):
        return weights_one_by_one(layout.transposed or layout.interleaved, gate_up, down)
    if layout.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not layout.interleaved:
        return {"gate_up_proj": gate_up, "down_proj": down}
    gate, up = gate_up.unflatten(1, (-1, 2)).unbind(2)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def lay_out_rows(
    kind: str, layout: Layout, weights: dict[str, torch.Tensor], *, left_before: str | None = None
) -> None:
    """Puts the elements of each row side by side in memory where a layout is transposed; values, shapes and
    identity of the parameters stay.

    Done in place, one expert's matrix at a time, where the memory is the parameter's alone. Where it is not
    (mapped from a file, shared between processes, seen through other tensors) the parameter gets new memory and
    the old stays as it is for whoever holds it: under FSDP2 a layer's experts then stay in memory as a whole. A
    gradient that a parameter has is laid out like it, and stays the same tensor. The state of an optimizer is
    not to be found from here: torch's fused CPU optimizers apply one that was made with the old layout to other
    elements than it belongs to (docs/troubleshooting.md).

    Args:
        kind: of module, for the log.
        left_before: why these were refused before; they are again, since an optimizer may have made its state.

    Raises:
        NotUnderstoodError: a weight trains, others count on how it lies, and nothing was touched. Who sees its
            memory, or its gradient's, may be who writes updates (FSDP2, flat buffers), which new memory would
            never get; DistributedDataParallel reduces gradients in buckets of the strides of before.
    """
    if not layout.transposed:
        return
    with _laying_out, torch.inference_mode(False), torch.no_grad():
        for name, weight in weights.items():
            if weight.requires_grad and not _is_by_rows(weight):
                if left_before is not None:
                    raise NotUnderstoodError(left_before)
                _require_that_none_counts_on_strides(name, weight)
        for name, weight in weights.items():
            if _is_by_rows(weight):
                continue
            if _is_its_own(weight):
                how = "in place"
                # An interrupt between two experts would leave some of them turned: it reaches the main thread
                # only, and this waits until the other one is done.
                with ThreadPoolExecutor(1) as uninterrupted:
                    uninterrupted.submit(_turn_in_place, weight).result()
            else:
                how = "in new memory, since its own is mapped, shared or seen through other tensors"
                weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
            if (grad := weight.grad) is not None:  # fused optimizers go through both as they lie in memory
                grad.data = grad.data.transpose(1, 2).contiguous().transpose(1, 2)
            logger.info("%s: %s %s laid out by rows %s", kind, name, list(weight.shape), how)


def _require_that_none_counts_on_strides(name: str, weight: torch.Tensor) -> None:
    trains = f"{name}, which trains and is transposed,"
    if _is_seen_by_others(weight):
        raise NotUnderstoodError(
            f"expected {trains} in memory of its own at the first call, got memory that is shared or seen "
            "through other tensors"
        )
    if weight.grad is not None and _is_seen_by_others(weight.grad):
        raise NotUnderstoodError(
            f"expected the gradient of {trains} in memory of its own at the first call, got memory that is "
            "shared or seen through other tensors"
        )
    if _is_reduced(weight):
        raise NotUnderstoodError(
            f"expected a first call with {trains} before DistributedDataParallel around it, got one after that"
        )


@torch.no_grad()
def _turn_in_place(parameter: torch.Tensor) -> None:
    with torch.inference_mode(parameter.is_inference()):  # such memory is written in this mode alone
        weight = parameter.data
        experts, rows, cols = weight.shape
        memory = weight.view(experts, cols, rows)
        turned = weight.new_empty(cols, rows)  # before the first expert is touched
        for expert in range(experts):
            memory[expert] = turned.copy_(weight[expert].t())
        parameter.data = memory.transpose(1, 2)


def _is_by_rows(weight: torch.Tensor) -> bool:
    """Whether a transposed weight's elements along its second dimension lie side by side."""
    return weight.stride(1) == 1 or weight.shape[1] == 1


def _is_its_own(weight: torch.Tensor) -> bool:
    """Whether nothing else sees the weight's memory and it is ordinary memory of this process."""
    # Memory that torch did not allocate itself (maps, numpy's, frombuffer) cannot be resized.
    ordinary = weight.untyped_storage().resizable()
    return ordinary and weight.is_contiguous() and not _is_seen_by_others(weight)


def _is_seen_by_others(weight: torch.Tensor) -> bool:
    """Whether other tensors or processes see the weight's memory, or may, since torch does not tell."""
    storage = weight.untyped_storage()
    uses = getattr(torch._C, "_storage_Use_Count", None)
    if storage.is_shared() or uses is None or storage.nbytes() != weight.nbytes:
        return True
    # One by the tensor and one by the object that is asked here.
    return bool(uses(storage._cdata) > 2)


def _is_reduced(weight: torch.Tensor) -> bool:
    """Whether a reducer waits for the weight's gradient, as that of DistributedDataParallel does.

    It holds the node that accumulates the gradient; that it is there torch tells within its own forward alone.
    Without anybody who holds it the node is another one each time it is asked for. A graph that is not gone yet
    holds it too, and counts: which of the two it is cannot be told.
    """
    if weight.is_inference() or not (distributed.is_available() and distributed.is_initialized()):
        return False
    _notes_of_node(weight)[_MARK] = True
    return _notes_of_node(weight).pop(_MARK, False)


def _notes_of_node(weight: torch.Tensor) -> dict[str, bool]:
    notes: Any = get_gradient_edge(weight).node.metadata  # a method, to torch's types
    found: dict[str, bool] = notes
    return found
