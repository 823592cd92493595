"""The experiment: the check, then warm-up and timed iterations of forward, backward and both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from amx_sft_moe import _core
from amx_sft_moe.sft_moe import SftMoe

from .layer import FACTORS, Batch, Layer
from .options import Options
from .reference import float64_step, relative_errors

# bf16 keeps 8 bits: what is rounded twice on its way, and sums of it, lie well within; mistakes far outside.
ALLOWED_ERROR = {"bfloat16": 3e-2, "float32": 1e-4}


@dataclass
class Timing:
    """Iterations of one kind, milliseconds each, and what the operator recorded of them."""

    warmup: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)  # wall time of the calls from Python
    forwards: list[dict[str, Any]] = field(default_factory=list)  # last_forward_times() of the timed iterations
    backwards: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Of the timed iterations."""
        return statistics.fmean(self.calls)

    @property
    def deviation(self) -> float:
        """Standard deviation of the timed iterations; 0 of a single one."""
        return statistics.stdev(self.calls) if len(self.calls) > 1 else 0.0

    @property
    def inside(self) -> float:
        """Mean time inside the operator."""
        return statistics.fmean(
            sum(times["total_ms"] for times in passes) for passes in self._passes_by_iteration()
        )

    def _passes_by_iteration(self) -> Iterator[list[dict[str, Any]]]:
        for n in range(len(self.calls)):
            yield [passes[n] for passes in (self.forwards, self.backwards) if passes]


@dataclass
class Results:
    """Everything that the report says."""

    kernel: str
    errors: dict[str, float]
    forward: Timing
    backward: Timing
    both: Timing
    machine: dict[str, Any] | None


def check(op: SftMoe, layer: Layer, batch: Batch) -> dict[str, float]:
    """Relative errors of one step against float64, by tensor."""
    y = op.forward_sft(batch.x, batch.expert_ids, batch.routing_weights)
    grads = op.backward(batch.grad_y).as_dict()
    return relative_errors({"y": y, **grads}, float64_step(layer, batch), batch)


def allowed_error(name: str, options: Options) -> float:
    """Of the tensor of that name; gradients of factors are rounded to the factors' type."""
    of_result = options.lora_dtype if name in FACTORS else options.dtype
    return max(ALLOWED_ERROR[options.dtype], ALLOWED_ERROR[of_result])


def passed(errors: dict[str, float], options: Options) -> bool:
    """Whether every error is a number within what the types allow."""
    return all(error <= allowed_error(name, options) for name, error in errors.items())


@contextmanager
def _timed(name: str, into: list[float]) -> Iterator[None]:
    with _core.NvtxRange(name):
        began = time.perf_counter()
        yield
        into.append((time.perf_counter() - began) * 1e3)


def _repeat(iteration: Callable[[Timing, list[float]], None], warmup: int, iterations: int) -> Timing:
    timing = Timing()
    for _ in range(warmup):
        iteration(Timing(), timing.warmup)
    for _ in range(iterations):
        iteration(timing, timing.calls)
    return timing


def measure(op: SftMoe, layer: Layer, batch: Batch) -> tuple[Timing, Timing, Timing]:
    """Times forwards, backwards and both one after the other. Results go to tensors that are there already."""
    y = torch.zeros_like(batch.x)
    grads = layer.gradients(batch)

    def forward() -> None:
        op.forward_sft(batch.x, batch.expert_ids, batch.routing_weights, out=y)

    def backward() -> None:
        op.backward(batch.grad_y, out=grads)

    def forward_only(timing: Timing, into: list[float]) -> None:
        with _timed("forward_only", into):
            forward()
        timing.forwards.append(op.last_forward_times())
        op.clear()

    def backward_only(timing: Timing, into: list[float]) -> None:
        forward()
        with _timed("backward_only", into):
            backward()
        timing.backwards.append(op.last_backward_times())

    def full_train_loop(timing: Timing, into: list[float]) -> None:
        with _timed("full_train_loop", into):
            forward()
            backward()
        timing.forwards.append(op.last_forward_times())
        timing.backwards.append(op.last_backward_times())

    warmup, iterations = layer.options.warmup, layer.options.iterations
    return (
        _repeat(forward_only, warmup, iterations),
        _repeat(backward_only, warmup, iterations),
        _repeat(full_train_loop, warmup, iterations),
    )
