"""The same layer in float64 by torch's autograd, for the check before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from .layer import FACTORS, Batch, Layer


def _adapted(
    x: torch.Tensor, weight: torch.Tensor, factors: Sequence[torch.Tensor | None], scaling: float
) -> torch.Tensor:
    a, b = factors
    y = x @ weight.T
    return y if a is None or b is None else y + scaling * ((x @ a.T) @ b.T)


def float64_step(layer: Layer, batch: Batch) -> dict[str, torch.Tensor]:
    """y and all gradients of a step by name. Factors' gradients hold the experts that `batch` uses only, in
    the order of `used_experts`; the others' are zero."""
    x = batch.x.double().requires_grad_()
    weights = batch.routing_weights.double().requires_grad_()
    used = used_experts(batch)
    factors = {name: layer.factors[name][used].double().requires_grad_() for name in layer.factors}
    y = torch.zeros_like(x)
    for position, expert in enumerate(used.tolist()):
        tokens, slots = torch.where(batch.expert_ids == expert)
        a_and_b = [factors[name][position] if factors else None for name in FACTORS]
        rows = x[tokens]
        gate = _adapted(rows, layer.gate_proj[expert].double(), a_and_b[0:2], layer.scaling)
        up = _adapted(rows, layer.up_proj[expert].double(), a_and_b[2:4], layer.scaling)
        down = _adapted(F.silu(gate) * up, layer.down_proj[expert].double(), a_and_b[4:6], layer.scaling)
        y = y.index_add(0, tokens, weights[tokens, slots, None] * down)
    inputs = {"grad_x": x, "grad_routing_weights": weights, **factors}
    grads = torch.autograd.grad(y, list(inputs.values()), batch.grad_y.double())
    return {"y": y.detach(), **dict(zip(inputs, grads, strict=True))}


def used_experts(batch: Batch) -> torch.Tensor:
    """Ids of the experts with tokens, ascending."""
    return batch.expert_ids.unique()


def relative_errors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], batch: Batch
) -> dict[str, float]:
    """Norm of the error over the norm of the result, by name. What should be zero and is not counts fully."""
    used = used_experts(batch)
    errors = {}
    for name, exact in expected.items():
        whole = found[name]
        got = (whole[used] if name in FACTORS else whole).double()
        error = (got - exact).norm()
        if name in FACTORS:
            idle = torch.ones(len(whole), dtype=torch.bool)
            idle[used] = False
            error = torch.hypot(error, whole[idle].double().norm())
        errors[name] = (error / exact.norm()).item()
    return errors
