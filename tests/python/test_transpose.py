"""The operator's transpose, and the rooms in which factors with the expert last are turned."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from amx_sft_moe import _core
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.layer import Rooms, rooms
from cases import Sizes
from reference import FACTORS, make_layer
from test_nn import call, frozen, leaves_of

SIZES = [(1, 1), (1, 7), (7, 1), (16, 16), (32, 64), (31, 33), (255, 257), (600, 3), (3, 600), (513, 300)]


def operator(threads: int = 2) -> _core.SftMoe:
    return frozen(make_layer(Sizes()), num_threads=threads).operator()


def numbers(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * 1000 + cols)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_transpose(size: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    source = numbers(*size, dtype)
    target = torch.full((size[1], size[0]), float("nan"), dtype=dtype)
    operator(threads).transpose(source, target)
    assert torch.equal(target, source.t())


def test_rows_apart() -> None:
    """What lies between and behind rows is neither read into the result nor written."""
    source = torch.full((70, 90), float("nan"))
    source[:65, :33] = numbers(65, 33, torch.float32)
    target = torch.full((40, 80), -1.0)
    operator().transpose(source[:65, :33], target[:33, :65])
    assert torch.equal(target[:33, :65], source[:65, :33].t())
    assert (target[33:] == -1).all()
    assert (target[:, 65:] == -1).all()


def test_payloads_of_nan_and_signs_of_zero_stay() -> None:
    bits = torch.tensor([[0x7FC00001, -0x80000000, 1], [-0x3FFFFF, 0x7F800001, 0]], dtype=torch.int32)
    target = torch.empty(3, 2)
    operator().transpose(bits.view(torch.float32), target)
    assert torch.equal(target.view(torch.int32), bits.t())


def test_nothing_to_turn() -> None:
    operator().transpose(torch.empty(0, 5), torch.empty(5, 0))


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4), ArgumentError, r"target: expected shape \[4, 3\], got \[3, 4\]"),
        (torch.zeros(12), torch.zeros(4, 3), ArgumentError, "source: expected "),
        (torch.zeros(3, 4), torch.zeros(4, 3).bfloat16(), TypeError, "target: expected .*, got bfloat16"),
        (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(4, 3), TypeError, "source: expected .*, got int32"),
        (torch.zeros(4, 3).t(), torch.zeros(4, 3), ArgumentError, "source: expected adjacent elements"),
        (torch.zeros(3, 4), torch.zeros(3, 4).t(), ArgumentError, "target: expected adjacent elements"),
        (torch.zeros(3, 4), torch.zeros(1, 3).expand(4, 3), ArgumentError, "target: expected rows that do not"),
    ],
)
def test_refused(source: Tensor, target: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operator().transpose(source, target)


def test_rooms_are_kept_and_grow() -> None:
    made = Rooms()
    first = made.tensor(0, (3, 5), torch.float32)
    first.fill_(1.0)
    assert made.tensor(0, (2, 2), torch.bfloat16).data_ptr() == first.data_ptr()
    assert made.tensor(1, (3, 5), torch.float32).data_ptr() != first.data_ptr()
    assert made.tensor(2, (3, 5), torch.bfloat16).shape == (3, 5), "an odd number of halves"
    larger = made.tensor(0, (30, 50), torch.float32)
    assert larger.shape == (30, 50)
    assert larger.is_contiguous()
    assert torch.equal(first, torch.ones(3, 5)), "who still has the smaller one keeps it"


def test_a_call_within_a_call_has_its_own_rooms() -> None:
    with rooms() as outer, rooms() as inner:
        assert outer is not inner
    with rooms() as again:
        assert again is outer


def expert_last(layer: Any) -> dict[str, Tensor]:
    return {
        name: leaf.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
        if name in FACTORS
        else leaf
        for name, leaf in leaves_of(layer).items()
    }


def test_layers_of_other_sizes_take_turns_in_the_rooms() -> None:
    """Forwards of all, then backwards of all: what one layer left in the rooms is not taken for another's."""
    sizes = [Sizes(experts=5, ranks=(3, 3, 1)), Sizes(experts=4, hidden=64, ranks=(8, 8, 8)), Sizes(experts=3)]
    layers = [make_layer(size) for size in sizes]
    expected = [
        torch.autograd.grad(call(frozen(layer), layer, leaves), leaves.values(), layer.grad_y)
        for layer in layers
        for leaves in [leaves_of(layer)]
    ]
    stored = [expert_last(layer) for layer in layers]
    outputs = [call(frozen(layer), layer, leaves) for layer, leaves in zip(layers, stored, strict=True)]
    gc.collect()
    found = [
        torch.autograd.grad(y, leaves.values(), layer.grad_y)
        for y, leaves, layer in zip(outputs, stored, layers, strict=True)
    ]
    for mine, theirs in zip(found, expected, strict=True):
        for grad, wanted in zip(mine, theirs, strict=True):
            assert torch.equal(grad, wanted)


def test_rooms_made_in_inference_mode() -> None:
    layer = make_layer(Sizes(experts=5, tokens=9))
    leaves = expert_last(layer)
    experts = frozen(layer)
    with rooms() as taken:
        taken._memory.clear()
    with torch.inference_mode():
        expected = call(experts, layer, leaves).clone()
    y = call(experts, layer, leaves)
    assert torch.equal(y, expected)
    y.backward(layer.grad_y)


def test_factors_of_other_types_are_refused_by_name() -> None:
    layer = make_layer(Sizes(experts=5))
    leaves = expert_last(layer)
    half = leaves["gate_lora_b"].detach().half()
    with pytest.raises(TypeError, match=r"gate_lora_b: expected .*, got float16"):
        call(frozen(layer), layer, leaves | {"gate_lora_b": half})
