"""The operator behind transformers: making it available, and asking one step of it where its time went."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import amx_sft_moe

from .errors import FinetuneError
from .model import bare_model, expert_modules
from .options import OURS

TIMED = f"{OURS}_timed"  # the same experts, made while the timer's environment variables are set

# "[DOWN] D3_gemm: 41.123 ms (fused)" and "[BWD TIMER] backward_down: 193.885 ms (total: 193.885 ms)"
_LINE = re.compile(r"^\[(?P<part>[^]]+)\] (?P<name>.+?): (?P<ms>[0-9.]+) ms")
_BACKWARD = "BWD TIMER"
_FORWARD = "FWD TIMER"


@dataclass(frozen=True)
class BackwardTimes:
    """One layer's backward in one step."""

    layer: int  # counted from 1
    layers: int
    text: str  # the operator's own dump
    phases: dict[str, float]  # milliseconds by published name
    groups: dict[str, float]  # milliseconds; they add up to the backward


def register(kernel: str, threads: int, dtype: torch.dtype) -> str:
    """Makes the operator known to transformers as OURS; returns the kernel that runs weights of `dtype`.

    Raises FinetuneError with the kernels that are available where `kernel` is not, and where there are too many
    `threads`.
    """
    try:
        amx_sft_moe.register(OURS, kernel=kernel, num_threads=threads)
        probe = amx_sft_moe.SftMoe(num_experts=1, top_k=1, hidden_size=1, intermediate_size=1, kernel=kernel)
        weight = torch.zeros(1, 1, 1, dtype=dtype)
        probe.set_base(weight, weight, weight)  # a kernel also has to know the weights' type
    except (amx_sft_moe.KernelError, amx_sft_moe.ArgumentError) as error:
        of_threads = str(error).startswith("num_threads:")
        option = f"--threads {threads}" if of_threads else f"--kernel {kernel} with {dtype} weights"
        raise FinetuneError(f"{option}: {error}") from error
    return probe.kernel


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def backward_times(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], kernel: str, threads: int, scratch: Path
) -> BackwardTimes:
    """Runs forward and backward of `batch`; returns the first layer's backward, the last one computed.

    Nothing is updated and no gradient is kept. The step is run twice and the second counts: the first grows
    buffers. An operator reads AMX_SFT_MOE_TIMER when it is made, so the layers get operators of their own for
    this. A limit that the user has set is for files of his: this dump is not bound by it, and his trace does
    not get these steps.
    """
    dump = scratch / "timer.txt"
    bare = bare_model(model)
    implementation = bare.config._experts_implementation
    was_training = model.training
    model.train()
    own = {"AMX_SFT_MOE_TIMER": "text", "AMX_SFT_MOE_TIMER_FILE": str(dump)}
    with _environment({**own, "AMX_SFT_MOE_TRACE_LIMIT": "", "AMX_SFT_MOE_TRACE": ""}):
        amx_sft_moe.register(TIMED, kernel=kernel, num_threads=threads)
        bare.set_experts_implementation(TIMED)
        try:
            for _ in range(2):
                model(**batch, use_cache=False).loss.backward()
        finally:
            model.zero_grad()
            bare.set_experts_implementation(implementation)
            model.train(was_training)
    text = last_backward(dump.read_text(encoding="utf-8"))
    return BackwardTimes(1, len(expert_modules(model)), text, *parse_dump(text))


def last_backward(dumps: str) -> str:
    """The lines of the last backward in a file of dumps; forwards end with lines of their own."""
    lines = dumps.splitlines()
    parts = [match["part"] if (match := _LINE.match(line)) else "" for line in lines]
    total = max(index for index, part in enumerate(parts) if part == _BACKWARD)
    # Back to where the step before it ends: a forward, or a backward whose groups were all told already.
    names: set[str] = set()
    first = total
    while first >= 0 and parts[first] != _FORWARD and lines[first].partition(":")[0] not in names:
        names.add(lines[first].partition(":")[0])
        first -= 1
    return "\n".join(lines[first + 1 : total + 1])


def parse_dump(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """(phases, groups) of a dump, milliseconds by name."""
    phases: dict[str, float] = {}
    groups: dict[str, float] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            (groups if match["part"] == _BACKWARD else phases)[match["name"]] = float(match["ms"])
    return phases, groups
