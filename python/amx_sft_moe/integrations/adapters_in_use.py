"""The LoRA factors that apply to an experts module in the current call, as inputs of the operator.

Two ways lead here. Where :mod:`peft_lora` took PEFT's place, the wrappers of this call stand in a context
variable and their parameters are read directly. Otherwise PEFT has parametrized the module, and its proxies
hold the factors. Either gives what is added to the parameter as it is stored; how the model stores it
(transposed, gate and up interleaved) decides what that is to the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from amx_sft_moe.autograd import LoraFactors

_FLOATS = (torch.bfloat16, torch.float32)


class NotUnderstoodError(Exception):
    """Why a layer or its adapters cannot be taken by the operator."""


class Delta(NamedTuple):
    """What one adapter adds to a parameter ``[E, rows, cols]``: ``scaling * left @ right``."""

    left: torch.Tensor  # [E, rows, r]
    right: torch.Tensor  # [E, r, cols]
    scaling: float


class Factors(NamedTuple):
    """One adapter of one projection as the operator takes it."""

    a: torch.Tensor  # [E, r, in]
    b: torch.Tensor  # [E, out, r]
    scaling: float


@dataclass(eq=False)
class ActiveAdapters:
    """LoRA on one weight of one experts module, during a call of that module."""

    module: nn.Module
    parameter: str
    read: Callable[[], list[Delta]]
    as_peft_does_it: Callable[[], AbstractContextManager[Any]]
    used: bool = field(default=False)


active: ContextVar[tuple[ActiveAdapters, ...]] = ContextVar("amx_sft_moe_active_adapters", default=())


# Attributes of experts modules: dynamo can guard a graph by those, not by a context variable. The first has an
# entry for each of the adapters in use in eager calls, of all threads; the second has those of the call that is
# being traced.
_SCOPES = "_amx_sft_moe_scopes"
_TRACED = "_amx_sft_moe_traced"


@contextmanager
def in_use(adapters: ActiveAdapters) -> Iterator[None]:
    """The time in which calls of the adapters' module find them, in this thread or this graph."""
    if torch.compiler.is_compiling():
        before = getattr(adapters.module, _TRACED, ())
        setattr(adapters.module, _TRACED, (*before, adapters))
        try:
            yield
        finally:
            # An attribute that stayed would be a change to the module: dynamo would trace all anew with it.
            if before:
                setattr(adapters.module, _TRACED, before)
            else:
                delattr(adapters.module, _TRACED)
        return
    # Ctrl-C may come between any two lines: what is taken out if it is there comes out right, a count would
    # stay wrong. And a list is none of the constants that a gate may depend on.
    scopes: list[object] = adapters.module.__dict__.setdefault(_SCOPES, [])
    before, this = active.get(), object()
    try:
        scopes.append(this)
        active.set((*before, adapters))
        yield
    finally:
        try:
            active.set(before)
        finally:
            if this in scopes:
                scopes.remove(this)


def traced_on(module: nn.Module) -> list[ActiveAdapters] | None:
    """The adapters of the call of ``module`` that dynamo traces, marked as used; None where the graph cannot
    know them, since they came before it."""
    found = list(getattr(module, _TRACED, ()))
    if is_parametrized(module) or len(getattr(module, _SCOPES, ())) > 0:
        return None
    for adapters in found:
        adapters.used = True
    return found


def active_on(module: nn.Module) -> list[ActiveAdapters]:
    """The adapters of the current call of ``module``, marked as used."""
    found = [adapters for adapters in active.get() if adapters.module is module]
    for adapters in found:
        adapters.used = True
    return found


def lora_of(
    module: nn.Module, adapters: list[ActiveAdapters], num_experts: int, *, transposed: bool, interleaved: bool
) -> LoraFactors:
    """Factors of ``gate_up_proj`` and ``down_proj``, several adapters as one of their summed rank.

    Views of PEFT's parameters, nothing is copied; with several adapters at once their factors are put side by
    side.

    Args:
        transposed: whether the module's weights are ``[E, in, out]``.
        interleaved: whether gate and up alternate in them.

    Raises:
        NotUnderstoodError: something adapts the module that is not LoRA in bfloat16 or float32 on the CPU.
    """
    deltas: dict[str, list[Delta]] = {"gate_up_proj": [], "down_proj": []}
    for one in adapters:
        deltas[one.parameter] += one.read()
    for name, found in deltas.items():
        if (proxies := parametrizations_of(module, name)) is not None:
            found += _of_proxies(proxies, name)
        for delta in found:
            _require_delta(name, delta, _stored_shape(module, name), num_experts)
    gate_up, down = (_as_one([as_factors(delta, transposed) for delta in found]) for found in deltas.values())
    down_a, down_b, down_scaling = down if down is not None else (None, None, 1.0)
    if gate_up is None:
        return LoraFactors((None, None, None, None, down_a, down_b), scaling=(1.0, 1.0, down_scaling))
    scaling = (gate_up.scaling, gate_up.scaling, down_scaling)
    if not interleaved:
        return LoraFactors((gate_up.a, gate_up.b, None, None, down_a, down_b), shared_a=True, scaling=scaling)
    # The same A twice: the operator computes with it once.
    gate_b, up_b = split_interleaved(gate_up.b)
    return LoraFactors((gate_up.a, gate_b, gate_up.a, up_b, down_a, down_b), scaling=scaling)


def as_factors(delta: Delta, transposed: bool) -> Factors:
    """``transposed``: the parameter is stored ``[E, in, out]``, otherwise ``[E, out, in]``."""
    if transposed:
        return Factors(delta.left.transpose(1, 2), delta.right.transpose(1, 2), delta.scaling)
    return Factors(delta.right, delta.left, delta.scaling)


def split_interleaved(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """B of gate and of up ``[E, I, r]`` as views of B ``[E, 2I, r]`` with rows gate 0, up 0, gate 1, up 1..."""
    if b.shape[1] % 2 != 0:
        raise NotUnderstoodError(f"expected LoRA factors B [E, 2I, r] on gate_up_proj, got {list(b.shape)}")
    # unbind and not slices: its backward writes both gradients once.
    gate, up = b.unflatten(1, (-1, 2)).unbind(2)
    return gate, up


def parametrizations_of(module: nn.Module, name: str) -> ParametrizationList | None:
    """torch's parametrizations of the parameter; None where it has none."""
    if not is_parametrized(module, name):
        return None
    by_name: Any = module.parametrizations  # a ModuleDict, which nn.Module's types do not know
    return by_name[name]


def _of_proxies(proxies: Iterable[Any], name: str) -> list[Delta]:
    found = []
    for proxy in proxies:
        if not all(hasattr(proxy, part) for part in ("lhs", "rhs", "scaling")):
            raise NotUnderstoodError(
                f"expected LoRA factors on {name}, got a parametrization {type(proxy).__name__}"
            )
        found.append(Delta(proxy.lhs, proxy.rhs, float(proxy.scaling)))
    return found


def _stored_shape(module: nn.Module, name: str) -> torch.Size:
    parametrizations = parametrizations_of(module, name)
    return getattr(module, name).shape if parametrizations is None else parametrizations.original.shape


def _require_delta(name: str, delta: Delta, shape: torch.Size, num_experts: int) -> None:
    left, right, _ = delta
    fits = left.dim() == right.dim() == 3 and left.shape[2] == right.shape[1]
    fits = fits and left.shape[0] == right.shape[0] == shape[0] == num_experts
    if not fits or (left.shape[1], right.shape[2]) != tuple(shape[1:]):
        raise NotUnderstoodError(
            f"expected LoRA factors [E, rows, r] and [E, r, cols] on {name} {list(shape)} with "
            f"E={num_experts}, got {list(left.shape)} and {list(right.shape)}"
        )
    for factor in (left, right):
        if factor.device.type != "cpu" or factor.dtype not in _FLOATS:
            elsewhere = factor.device.type != "cpu"
            advice = (
                " (amx_sft_moe.keep_experts_on_cpu(model) keeps them with their experts)" if elsewhere else ""
            )
            raise NotUnderstoodError(
                f"expected LoRA factors on {name} in bfloat16 or float32 on cpu, got {factor.dtype} on "
                f"{factor.device}{advice}"
            )


def _as_one(found: list[Factors]) -> Factors | None:
    if len(found) < 2:
        return found[0] if found else None
    # B A summed over adapters is one product of the ranks side by side; each scaling goes into its B.
    dtype = torch.float32 if any(a.dtype == torch.float32 for a, _, _ in found) else torch.bfloat16
    a = torch.cat([a.to(dtype) for a, _, _ in found], dim=1)
    b = torch.cat([b.to(dtype) * scaling for _, b, scaling in found], dim=2)
    return Factors(a, b, 1.0)
