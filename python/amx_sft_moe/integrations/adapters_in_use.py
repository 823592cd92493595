"""The LoRA factors that apply to an experts module in the current call, as inputs of the operator.

Two ways lead here. Where :mod:`peft_lora` took PEFT's place, the wrappers of this call stand in a context
variable and their parameters are read directly. Otherwise PEFT has parametrized the module, and its proxies
hold the factors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amx_sft_moe.autograd import LoraFactors

# A [E, r, in], B [E, out, r] and the scaling of one adapter on one weight.
Factors = tuple[torch.Tensor, torch.Tensor, float]

_FLOATS = (torch.bfloat16, torch.float32)


class NotUnderstoodError(Exception):
    """Why a layer or its adapters cannot be taken by the operator."""


@dataclass(eq=False)
class ActiveAdapters:
    """LoRA on one weight of one experts module, during a call of that module."""

    module: nn.Module
    parameter: str
    read: Callable[[], list[Factors]]
    as_peft_does_it: Callable[[], AbstractContextManager[Any]]
    used: bool = field(default=False)


active: ContextVar[tuple[ActiveAdapters, ...]] = ContextVar("amx_sft_moe_active_adapters", default=())


# On modules whose calls may come with adapters. Graphs can be guarded by an attribute, by `active` they cannot.
_MARK = "_amx_sft_moe_adapted"


def may_be_adapted(module: nn.Module) -> bool:
    """Whether calls of ``module`` have come with adapters, or do so now."""
    return _MARK in module.__dict__ or nn.utils.parametrize.is_parametrized(module)


def mark_as_adapted(module: nn.Module) -> None:
    """Says that calls of ``module`` may come with adapters."""
    module.__dict__[_MARK] = True


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

    Args:
        transposed: whether the module's weights are ``[E, in, out]``.
        interleaved: whether rows of gate and up alternate in them.
    """
    factors: dict[str, list[Factors]] = {"gate_up_proj": [], "down_proj": []}
    for one in adapters:
        factors[one.parameter] += one.read()
    for name, found in factors.items():
        if nn.utils.parametrize.is_parametrized(module, name):
            found += _of_proxies(module.parametrizations[name], name, transposed)
        for a, b, _ in found:
            _require_factors(name, a, b, num_experts)
    gate_up_a, gate_up_b, gate_up_scaling = _as_one(factors["gate_up_proj"])
    if interleaved and gate_up_b is not None:
        gate_up_b = gate_rows_first(gate_up_b)
    down_a, down_b, down_scaling = _as_one(factors["down_proj"])
    return LoraFactors(
        (gate_up_a, gate_up_b, None, None, down_a, down_b),
        shared_a=gate_up_a is not None,
        scaling=(gate_up_scaling, gate_up_scaling, down_scaling),
    )


def _of_proxies(parametrizations: nn.Module, name: str, transposed: bool) -> list[Factors]:
    found = []
    for proxy in parametrizations:
        if not all(hasattr(proxy, part) for part in ("lhs", "rhs", "scaling")):
            raise NotUnderstoodError(
                f"expected LoRA factors on {name}, got a parametrization {type(proxy).__name__}"
            )
        found.append(in_out_by_in(proxy.lhs, proxy.rhs, proxy.scaling, transposed))
    return found


def in_out_by_in(lhs: torch.Tensor, rhs: torch.Tensor, scaling: float, transposed: bool) -> Factors:
    """``scaling lhs rhs``, which is added to a parameter as it is stored, as factors of its weight ``[E, out,
    in]``.

    Args:
        transposed: whether the parameter is ``[E, in, out]``.
    """
    if transposed:
        lhs, rhs = rhs.transpose(1, 2), lhs.transpose(1, 2)
    return rhs, lhs, scaling


def gate_rows_first(lora_b: torch.Tensor) -> torch.Tensor:
    """B ``[E, 2I, r]`` whose rows of gate and up alternate, gate's before up's: a copy, differentiable."""
    if lora_b.stride(0) == 1:
        # As PEFT keeps it, experts last: rows of r E elements move as they are.
        rows = lora_b.permute(1, 2, 0)
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1).permute(2, 0, 1)
    return lora_b.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _require_factors(name: str, a: torch.Tensor, b: torch.Tensor, num_experts: int) -> None:
    fits = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] == num_experts and a.shape[1] == b.shape[2]
    if not fits or num_experts == 1:
        raise NotUnderstoodError(
            f"expected LoRA factors [E, r, in] and [E, out, r] with E={num_experts} > 1 on {name}, got "
            f"{list(a.shape)} and {list(b.shape)}"
        )
    for factor in (a, b):
        if factor.device.type != "cpu" or factor.dtype not in _FLOATS:
            raise NotUnderstoodError(
                f"expected LoRA factors on {name} in bfloat16 or float32 on cpu, got {factor.dtype} on "
                f"{factor.device}"
            )


def _as_one(found: list[Factors]) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    if not found:
        return None, None, 1.0
    if len(found) == 1:
        return found[0]
    # B A summed over adapters is one product of the ranks side by side; each scaling goes into its B.
    dtype = torch.float32 if any(a.dtype == torch.float32 for a, _, _ in found) else torch.bfloat16
    a = torch.cat([a.to(dtype) for a, _, _ in found], dim=1)
    b = torch.cat([b.to(dtype) * scaling for _, b, scaling in found], dim=2)
    return a, b, 1.0
