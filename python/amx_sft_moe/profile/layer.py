"""Weights, LoRA factors, inputs and gradients of one layer, and the operator on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from amx_sft_moe.sft_moe import SftMoe

from .options import Options

FACTORS = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")


@dataclass(frozen=True)
class Batch:
    """What one step is called with."""

    x: torch.Tensor  # [T, H]
    expert_ids: torch.Tensor  # [T, k]
    routing_weights: torch.Tensor  # [T, k]
    grad_y: torch.Tensor  # [T, H]

    @property
    def tokens(self) -> int:
        """T"""
        return len(self.x)


class Layer:
    """One layer of the options' shape: gate, up `[E, I, H]`, down `[E, H, I]` and the LoRA factors."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._random = torch.Generator().manual_seed(options.seed)
        shape = options.shape
        self.gate_proj = self._experts(shape.intermediate, shape.hidden)
        self.up_proj = self._experts(shape.intermediate, shape.hidden)
        self.down_proj = self._experts(shape.hidden, shape.intermediate)
        self.factors = self._factors() if options.rank else {}

    @property
    def scaling(self) -> float:
        """alpha / rank"""
        return self.options.alpha / self.options.rank if self.options.rank else 1.0

    def _normal(self, *shape: int, std: float, dtype: str) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).mul_(std).to(getattr(torch, dtype))

    def _experts(self, rows: int, cols: int) -> torch.Tensor:
        # One expert's numbers, shifted by some rows for the next: random numbers for all would take minutes.
        one = self._normal(rows, cols, std=cols**-0.5, dtype=self.options.dtype)
        weight = torch.empty(self.options.shape.experts, rows, cols, dtype=one.dtype)
        for e, expert in enumerate(weight):
            first = e * 7 % rows
            expert[: rows - first] = one[first:]
            expert[rows - first :] = one[:first]
        return weight

    def _factors(self) -> dict[str, torch.Tensor]:
        shape, rank = self.options.shape, self.options.rank
        made = {}
        for name in FACTORS:
            down = name.startswith("down")
            n_in = shape.intermediate if down else shape.hidden
            n_out = shape.hidden if down else shape.intermediate
            rows, cols = (rank, n_in) if name.endswith("_a") else (n_out, rank)
            std = (n_in**-0.5) if name.endswith("_a") else 0.5 * rank**-0.5
            made[name] = self._normal(shape.experts, rows, cols, std=std, dtype=self.options.lora_dtype)
        return made

    def batch(self, tokens: int) -> Batch:
        """Random inputs; every token goes to top_k distinct experts, evenly on average."""
        shape, dtype = self.options.shape, self.options.dtype
        scores = torch.rand(tokens, shape.experts, generator=self._random)
        weights, ids = scores.topk(shape.top_k, dim=1)
        return Batch(
            self._normal(tokens, shape.hidden, std=1.0, dtype=dtype),
            ids,
            weights / weights.sum(1, keepdim=True),
            self._normal(tokens, shape.hidden, std=1.0, dtype=dtype),
        )

    def operator(self) -> SftMoe:
        """An operator on this layer."""
        options = self.options
        op = SftMoe(
            options.shape.experts,
            options.shape.top_k,
            options.shape.hidden,
            options.shape.intermediate,
            lora_rank=options.rank,
            lora_alpha=options.alpha if options.rank else None,
            kernel=options.kernel,
            num_threads=options.threads,
            name=options.name,
        )
        op.set_base(self.gate_proj, self.up_proj, self.down_proj)
        factors: dict[str, Any] = dict(self.factors)  # names the six factors and no scaling
        op.set_lora(**factors)
        return op

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Tensors for every gradient of a step, written to so that the first step does not pay for fresh
        memory."""
        like = {"grad_x": batch.x, "grad_routing_weights": batch.routing_weights, **self.factors}
        return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
