"""How long the experts of all layers take in a step, forward and backward, whoever runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class _Mark(torch.autograd.Function):
    """The identity, which calls `reached` when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.reached = reached
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.reached()
        return None, *gradients


class ExpertClock:
    """Seconds inside the experts since the last `reset`, summed over layers.

    Forward is the time of the modules' calls. Backward of one call runs from the gradient of its output
    arriving to the gradients of its inputs leaving. On the CPU autograd runs one node at a time, the one made
    last first, so all that the call put into the graph, and nothing else, runs in between: the gradients of
    its LoRA factors too, and whatever PEFT computes around the experts.
    """

    def __init__(self) -> None:
        self.forward = 0.0
        self.backward = 0.0

    def reset(self) -> None:
        """Starts over."""
        self.forward = self.backward = 0.0

    @property
    def total(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward

    @contextmanager
    def attached(self, experts: Sequence[torch.nn.Module]) -> Iterator[ExpertClock]:
        """Times the calls of `experts` as long as the context lasts.

        Each is called with (x, expert ids, routing weights) and gives y. An input without a gradient, as in a
        first layer that nothing trainable precedes, has no backward to be timed.
        """
        handles = []
        for module in experts:
            handles += self._watch(module)
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, module: torch.nn.Module) -> list[Any]:
        forward_began = backward_began = 0.0

        def before(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            nonlocal forward_began
            x, expert_ids, routing_weights = inputs
            if torch.is_grad_enabled():
                x, routing_weights = _Mark.apply(backward_ends, x, routing_weights)
            forward_began = time.perf_counter()
            return x, expert_ids, routing_weights

        def after(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
            self.forward += time.perf_counter() - forward_began
            return _Mark.apply(backward_begins, y)[0] if torch.is_grad_enabled() else y

        def backward_begins() -> None:
            nonlocal backward_began
            backward_began = time.perf_counter()

        def backward_ends() -> None:
            self.backward += time.perf_counter() - backward_began

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
