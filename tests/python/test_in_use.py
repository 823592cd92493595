"""Calls that meet another one in the same object, or in a workspace that it shares."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from amx_sft_moe import SftMoe, Workspace
from cases import Sizes
from reference import Layer, make_layer, run
from test_numpy import numpy_layer
from within_pass import Within

SIZES = Sizes(tokens=12)
BUSY = "expected an SftMoe that no other call is using, got one in use by another thread"


def inputs(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return layer.x, layer.expert_ids, layer.routing_weights


def set_base(op: SftMoe, layer: Layer) -> None:
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)


@contextmanager
def meeting(op: SftMoe, function: Callable[[], object]) -> Iterator[Within]:
    """``function`` is called by another thread within each range of the operator's passes."""
    with ThreadPoolExecutor(1) as other:
        within = op._core.ranges = Within(lambda: other.submit(function).result())
        yield within
    op._core.ranges = None


CALLS: dict[str, Callable[[SftMoe, Layer], object]] = {
    "set_base": set_base,
    "set_base of another dtype": lambda op, layer: set_base(op, layer.to(torch.float32)),
    "set_lora": lambda op, layer: op.set_lora(**layer.factors),
    "set_lora without factors": lambda op, layer: op.set_lora(),
    "forward_sft": lambda op, layer: op.forward_sft(*inputs(layer)),
    "forward_sft of no tokens": lambda op, layer: op.forward_sft(*[each[:0] for each in inputs(layer)], False),
    "backward": lambda op, layer: op.backward(layer.grad_y),
    "clear": lambda op, layer: op.clear(),
    "saved_depth": lambda op, layer: op.saved_depth,
    "last_forward_times": lambda op, layer: op.last_forward_times(),
    "last_backward_times": lambda op, layer: op.last_backward_times(),
    "dump_times": lambda op, layer: op.dump_times(),
    "dump_times in json": lambda op, layer: op.dump_times("json"),
    "memory": lambda op, layer: op.memory(),
}


@pytest.mark.parametrize("saved", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_second_thread_is_refused(call: str, saved: int) -> None:
    """By every call whose docstring says so; those that are under way and their state do not change."""
    layer, other = make_layer(SIZES), make_layer(SIZES, seed=1)
    op = SIZES.operator(num_threads=2, cache_depth=3)
    expected = run(op, layer)
    for _ in range(saved):
        op.forward_sft(*inputs(layer))
    with meeting(op, lambda: CALLS[call](op, other)) as within:
        y = op.forward_sft(*inputs(layer), saved > 0)
        found = op.backward(layer.grad_y).as_dict() if saved else {}
    [error] = within.errors
    assert error.endswith(BUSY)
    assert op.saved_depth == saved
    assert op.weight_dtype == "bfloat16"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ({"y": y} | found).items())
    assert torch.equal(op.forward_sft(*inputs(layer), False), expected["y"])


@pytest.mark.parametrize("call", ["forward_sft", "backward", "memory"])
def test_a_second_thread_in_the_workspace_is_refused(call: str) -> None:
    layer, workspace = make_layer(SIZES), Workspace()
    op, other = (SIZES.operator(workspace=workspace) for _ in range(2))
    expected = run(op, layer)
    run(other, layer)
    for each in (op, other):
        each.forward_sft(*inputs(layer))
    with meeting(op, lambda: CALLS[call](other, layer)) as within:
        found = op.backward(layer.grad_y).as_dict()
    [error] = within.errors
    assert "workspace" in error
    for each in (found, other.backward(layer.grad_y).as_dict()):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in each.items())


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_other_threads_run_during_a_pass(step: str) -> None:
    """They have to wait for the GIL until somebody lets go of it, which nothing but a pass does here: torch
    would too."""
    sizes = Sizes(experts=8, hidden=256, intermediate=256, tokens=256)
    layer = numpy_layer(make_layer(sizes, dtype=torch.float32))
    op = sizes.operator(num_threads=1)
    run(op, layer)
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(1e-4):
            ticks += 1

    def ticked(function: Callable[..., Any], *arguments: Any) -> bool:
        before = ticks
        function(*arguments)
        return ticks > before

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    try:
        sys.setswitchinterval(1000)
        thread.start()
        found = []
        while len(found) < 1000 and not any(found):  # on a busy machine it may miss some
            forward = ticked(op.forward_sft, *inputs(layer))
            backward = ticked(op.backward, layer.grad_y)
            found.append(forward if step == "forward" else backward)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert any(found)
