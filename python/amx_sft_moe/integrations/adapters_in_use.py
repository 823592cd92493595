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


def active_on(module: nn.Module) -> list[ActiveAdapters]:
    """The adapters of the current call of ``module``, marked as used."""
    found = [adapters for adapters in active.get() if adapters.module is module]
    for adapters in found:
        adapters.used = True
    return found


def lora_of(module: nn.Module, adapters: list[ActiveAdapters], num_experts: int) -> LoraFactors:
    """Factors of ``gate_up_proj`` and ``down_proj``, several adapters as one of their summed rank."""
    factors: dict[str, list[Factors]] = {"gate_up_proj": [], "down_proj": []}
    for one in adapters:
        factors[one.parameter] += one.read()
    for name, found in factors.items():
        if nn.utils.parametrize.is_parametrized(module, name):
            found += _of_proxies(module.parametrizations[name], name)
        for a, b, _ in found:
            _require_factors(name, a, b, num_experts)
    gate_up_a, gate_up_b, gate_up_scaling = _as_one(factors["gate_up_proj"])
    down_a, down_b, down_scaling = _as_one(factors["down_proj"])
    return LoraFactors(
        (gate_up_a, gate_up_b, None, None, down_a, down_b),
        shared_a=gate_up_a is not None,
        scaling=(gate_up_scaling, gate_up_scaling, down_scaling),
    )


def _of_proxies(parametrizations: nn.Module, name: str) -> list[Factors]:
    found = []
    for proxy in parametrizations:
        if not all(hasattr(proxy, part) for part in ("lhs", "rhs", "scaling")):
            raise NotUnderstoodError(
                f"expected LoRA factors on {name}, got a parametrization {type(proxy).__name__}"
            )
        found.append((proxy.rhs, proxy.lhs, proxy.scaling))
    return found


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
