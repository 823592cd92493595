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


def _expert(layer: Layer, expert: int, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What one expert makes of its rows."""
    a_and_b = [factors.get(name) for name in FACTORS]
    gate = _adapted(x, layer.gate_proj[expert].double(), a_and_b[0:2], layer.scaling)
    up = _adapted(x, layer.up_proj[expert].double(), a_and_b[2:4], layer.scaling)
    return _adapted(F.silu(gate) * up, layer.down_proj[expert].double(), a_and_b[4:6], layer.scaling)


def float64_step(layer: Layer, batch: Batch) -> dict[str, torch.Tensor]:
    """y and all gradients of a step by name. Factors' gradients hold the experts that `batch` uses only, in
    the order of `used_experts`; the others' are zero."""
    x, weights, grad_y = batch.x.double(), batch.routing_weights.double(), batch.grad_y.double()
    used = used_experts(batch)
    step = {"y": torch.zeros_like(x), "grad_x": torch.zeros_like(x)}
    step["grad_routing_weights"] = torch.zeros_like(weights)
    step |= {name: x.new_empty(len(used), *whole.shape[1:]) for name, whole in layer.factors.items()}
    # y is a sum over experts: with gradients one expert after the other, no two are in memory in float64.
    for position, expert in enumerate(used.tolist()):
        tokens, slots = torch.where(batch.expert_ids == expert)
        rows, weight = x[tokens].requires_grad_(), weights[tokens, slots, None].requires_grad_()
        factors = {name: whole[expert].double().requires_grad_() for name, whole in layer.factors.items()}
        part = weight * _expert(layer, expert, rows, factors)
        grads = torch.autograd.grad(part, [rows, weight, *factors.values()], grad_y[tokens])
        step["y"].index_add_(0, tokens, part.detach())
        step["grad_x"].index_add_(0, tokens, grads[0])
        step["grad_routing_weights"][tokens, slots] = grads[1].squeeze(1)
        for name, grad in zip(factors, grads[2:], strict=True):
            step[name][position] = grad
    return step


def used_experts(batch: Batch) -> torch.Tensor:
    """Ids of the experts with tokens, ascending."""
    return batch.expert_ids.unique()


def relative_errors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], batch: Batch
) -> dict[str, float]:
    """Norm of the error over the norm of the result, by name. What should be zero and is not counts fully."""
    used = used_experts(batch).tolist()
    errors = {}
    for name, exact in expected.items():
        of_factor = name in FACTORS
        error = _factor_error(found[name], exact, used) if of_factor else (found[name].double() - exact).norm()
        errors[name] = (error / exact.norm()).item()
    return errors


def _factor_error(found: torch.Tensor, exact: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
    """Norm over all experts, of which `exact` has the used ones."""
    # One expert after the other: the gradients of all in float64 are no part of the memory that is planned.
    exact_of = dict(zip(used, exact, strict=True))
    errors = [(whole.double() - exact_of.get(e, 0.0)).norm() for e, whole in enumerate(found)]
    return torch.stack(errors).norm()
