"""The operator inside graphs of torch.compile: opaque operators of torch.library with fake implementations.

    amx_sft_moe::forward        y, nothing saved
    amx_sft_moe::forward_saved  y and the saved activations, differentiable
    amx_sft_moe::backward       the gradients that are wanted

A graph holds no base weights of a layer but those that train, only its handle; the operators ask the layer for
them in each call, so that weights which move or change after compilation are seen. Eager calls do not come this
way: their autograd function costs less per call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from amx_sft_moe import autograd
from amx_sft_moe.errors import StateError
from amx_sft_moe.layer import WEIGHT_NAMES, ExpertBiases, ExpertWeights, Weight, as_input

_NUM_PARAMETERS = 14  # six factors, four biases, four base weights
_PARAMETERS = ", ".join(f"Tensor? p{i}" for i in range(_NUM_PARAMETERS))
_CALL = (
    "int layer, Tensor x, Tensor expert_ids, Tensor routing_weights, bool shared_a, bool apart, "
    f"float[] scaling, ScalarType saved, {_PARAMETERS}"
)
# Positions of x, the routing weights and the first parameter in _CALL.
_X, _ROUTING_WEIGHTS, _FIRST = 1, 3, 8


class Layer(Protocol):
    """What a handle stands for, beside ExpertWeights themselves."""

    def experts(self) -> ExpertWeights:
        """The layer's base weights, where they are now."""


_handles: weakref.WeakKeyDictionary[Layer | ExpertWeights, int] = weakref.WeakKeyDictionary()
_layers: weakref.WeakValueDictionary[int, Layer | ExpertWeights] = weakref.WeakValueDictionary()
# The weights of a layer's last forward that saved, while anything saved lives: it may be gone itself then.
_saved_with: weakref.WeakValueDictionary[int, ExpertWeights] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


def refuse_export() -> None:
    """An exported program outlives the process; in the next one its handle is another layer's, or none's."""
    if torch.compiler.is_exporting():
        raise StateError(
            "torch.export: expected torch.compile or eager, got an export: base weights are not part of the "
            "graph"
        )


def handle_of(layer: Layer | ExpertWeights) -> tuple[int, torch.dtype]:
    """The number by which graphs call a layer, for as long as it lives, and the dtype of what its forward
    saves."""
    refuse_export()
    handle = _handles.get(layer)
    if handle is None:
        handle = next(_next_handle)
        _handles[layer] = handle
        _layers[handle] = layer
    return handle, _experts(handle).dtype


# The same while dynamo traces: asked once, then part of the graph, which is guarded by the layer's identity.
in_graph = torch.compiler.assume_constant_result(handle_of)


def _experts(handle: int, parameters: Sequence[torch.Tensor | None] = ()) -> ExpertWeights:
    layer = _layers.get(handle)
    if layer is None:
        layer = _saved_with.get(handle)
    if layer is None:
        raise StateError("compiled graph: expected a layer that it was traced with, got one that is gone")
    experts = layer if isinstance(layer, ExpertWeights) else layer.experts()
    weights = zip(WEIGHT_NAMES, parameters[-len(WEIGHT_NAMES) :], strict=False)
    if given := {name: weight for name, weight in weights if weight is not None}:
        experts.inputs({**experts.weights, **given})  # refuses what is not the layer's own memory
    return experts


def sft_moe(
    layer: tuple[int, torch.dtype],
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    lora: autograd.LoraFactors,
    biases: ExpertBiases,
    weights: Mapping[str, Weight] | None = None,
) -> torch.Tensor:
    """:func:`amx_sft_moe.nn.sft_moe` as one node of a graph, for the layer of this handle."""
    handle, saved = layer
    # Those that train are inputs; the others are the layer's affair.
    in_order = [as_input((weights or {}).get(name)) for name in WEIGHT_NAMES]
    if not any(weight is not None and weight.requires_grad for weight in in_order):
        in_order = [None] * len(WEIGHT_NAMES)
    parameters = (*lora.factors, *biases.tensors(), *in_order)
    gate_a, up_a = lora.factors[0], lora.factors[2]
    # Which of a graph's tensors are views of each other dynamo does not know; apart is right in any case.
    apart = gate_a is not None and up_a is not None and gate_a is not up_a
    form = lora.shared_a, apart, list(lora.scaling)
    call = (handle, x, expert_ids, routing_weights, *form, saved, *parameters)
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, routing_weights, *parameters)
    ):
        return torch.ops.amx_sft_moe.forward_saved(*call)[0]
    return torch.ops.amx_sft_moe.forward(*call)


def _forward(
    handle: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    saved: torch.dtype,
    *parameters: torch.Tensor | None,
) -> torch.Tensor:
    form, inputs = (shared_a, apart, scaling), (x, expert_ids, routing_weights)
    return autograd.run_forward(_experts(handle, parameters), *form, *inputs, parameters, save=False)[0]


def _forward_saved(
    handle: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    saved: torch.dtype,
    *parameters: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    form, inputs = (shared_a, apart, scaling), (x, expert_ids, routing_weights)
    experts = _experts(handle, parameters)
    y, of_backward = autograd.run_forward(experts, *form, *inputs, parameters, save=True)
    if of_backward is None:
        return y, None
    _saved_with[handle] = experts
    return y, _holding(experts, of_backward)


class _Memory(np.ndarray[Any, np.dtype[np.generic]]):
    """Saved activations that keep the weights they were made with alive, and know how often these had been
    changed."""

    experts: ExpertWeights
    versions: list[int]


# By address.
_memory_in_use: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def _holding(experts: ExpertWeights, saved: torch.Tensor) -> torch.Tensor:
    """The same memory: whoever holds it, as a graph does until its backward, holds the weights. A copy, such as
    hooks for saved tensors make, does not, nor does a backward with it notice that they have changed."""
    # NumPy has no bfloat16, and an empty tensor is viewed only as a type of the same size.
    same_size = torch.int16 if saved.element_size() == 2 else torch.int32
    memory = saved.view(same_size).numpy().view(_Memory)
    memory.experts, memory.versions = experts, experts.versions()
    _memory_in_use[saved.data_ptr()] = memory
    return torch.from_numpy(memory).view(saved.dtype)


def _backward(
    handle: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    saved: torch.Tensor,
    grad_y: torch.Tensor,
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    wanted: Sequence[bool],
    *parameters: torch.Tensor | None,
) -> list[torch.Tensor]:
    experts = _experts(handle, parameters)
    memory = _memory_in_use.get(saved.data_ptr())
    if memory is not None and memory.experts is experts and memory.versions != experts.versions():
        raise StateError(autograd.CHANGED_WEIGHTS)
    grads = autograd.run_backward(
        experts,
        shared_a,
        apart,
        scaling,
        x,
        expert_ids,
        routing_weights,
        saved,
        grad_y,
        list(parameters),
        list(wanted),
    )
    of = (x, routing_weights, *parameters)
    # An A given twice, for gate and for up, has its gradient in the first place; a graph needs both.
    return [
        torch.zeros_like(tensor) if grad is None else grad
        for tensor, grad, want in zip(of, grads, wanted, strict=True)
        if want and tensor is not None
    ]


def _fake_y(handle: int, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_y_and_saved(
    handle: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    saved: torch.dtype,
    *parameters: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # How much is saved depends on how many routes have an expert.
    elements = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(x.shape), x.new_empty(elements, dtype=saved)


def _fake_gradients(
    handle: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    saved: torch.Tensor,
    grad_y: torch.Tensor,
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    wanted: Sequence[bool],
    *parameters: torch.Tensor | None,
) -> list[torch.Tensor]:
    of = [x, routing_weights, *parameters]
    return [
        autograd.laid_out_like(tensor, tensor.new_empty(tensor.shape))
        for tensor, want in zip(of, wanted, strict=True)
        if want and tensor is not None
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.handle, ctx.form = inputs[0], inputs[4:7]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[1:4], output[1], *inputs[_FIRST:])


def _differentiate(ctx: Any, grad_y: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    x, expert_ids, routing_weights, saved, *parameters = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [needs[_X], needs[_ROUTING_WEIGHTS], *needs[_FIRST:]]
    inputs = ctx.handle, x, expert_ids, routing_weights, saved, grad_y, *ctx.form, wanted
    found = iter(torch.ops.amx_sft_moe.backward(*inputs, *parameters))
    grad_x, grad_weights, *grads = [next(found) if want else None for want in wanted]
    return None, grad_x, None, grad_weights, None, None, None, None, *grads


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(autograd.NO_SECOND_DERIVATIVE)


torch.library.custom_op("amx_sft_moe::forward", _forward, mutates_args=(), schema=f"({_CALL}) -> Tensor")
torch.library.register_fake("amx_sft_moe::forward", _fake_y)
torch.library.custom_op(
    "amx_sft_moe::forward_saved", _forward_saved, mutates_args=(), schema=f"({_CALL}) -> (Tensor, Tensor)"
)
torch.library.register_fake("amx_sft_moe::forward_saved", _fake_y_and_saved)
torch.library.register_autograd("amx_sft_moe::forward_saved", _differentiate, setup_context=_save)
torch.library.custom_op(
    "amx_sft_moe::backward",
    _backward,
    mutates_args=(),
    # Not `Tensor?[] parameters`: torch.library has no edges to the tensors of a list that holds a None.
    schema=(
        "(int layer, Tensor x, Tensor expert_ids, Tensor routing_weights, Tensor saved, Tensor grad_y, "
        f"bool shared_a, bool apart, float[] scaling, bool[] wanted, {_PARAMETERS}) -> Tensor[]"
    ),
)
torch.library.register_fake("amx_sft_moe::backward", _fake_gradients)
torch.library.register_autograd("amx_sft_moe::backward", _refuse_second_derivative)
