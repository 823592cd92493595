"""The operator's transpose, and the memory in which factors with the expert last are turned."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amx_sft_moe import _core
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.layer import Scratch, thread_scratch
from cases import Sizes
from reference import FACTORS, make_layer
from test_nn import call, frozen, leaves_of

# Of a square's side (16 fp32, 32 bf16) and a task's (256) less, as much, more, a multiple.
SIZES = [(1, 1), (1, 7), (7, 1), (16, 16), (32, 64), (31, 33), (255, 257), (600, 3), (3, 600), (513, 300)]
SIZES += [(300, 12), (300, 24), (24, 300), (64, 60), (60, 64)]


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
    bits = torch.arange(40 * 36, dtype=torch.int32).view(40, 36)
    bits[::3] += 0x7F800001  # quiet and signalling NaN
    bits[1::3] -= 0x80000000
    target = torch.empty(36, 40)
    operator().transpose(bits.view(torch.float32), target)
    assert torch.equal(target.view(torch.int32), bits.t())


def test_many_threads_with_one_operator() -> None:
    shared, source = operator(), numbers(600, 300, torch.float32)
    targets = [torch.empty(300, 600) for _ in range(8)]
    threads = [threading.Thread(target=shared.transpose, args=(source, target)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(target, source.t()) for target in targets)


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


def test_memory_is_kept_and_grows() -> None:
    made = Scratch()
    first = made.tensor(0, (3, 5), torch.float32)
    first.fill_(1.0)
    assert made.tensor(0, (2, 2), torch.bfloat16).data_ptr() == first.data_ptr()
    assert made.tensor(1, (3, 5), torch.float32).data_ptr() != first.data_ptr()
    assert made.tensor(2, (3, 5), torch.bfloat16).shape == (3, 5), "an odd number of halves"
    larger = made.tensor(0, (30, 50), torch.float32)
    assert larger.shape == (30, 50)
    assert larger.is_contiguous()
    assert torch.equal(first, torch.ones(3, 5)), "who still has the smaller one keeps it"


def test_a_call_within_a_call_has_its_own_memory() -> None:
    with thread_scratch() as outer, thread_scratch() as inner:
        assert outer is not inner
    with thread_scratch() as again:
        assert again is outer
    with pytest.raises(RuntimeError, match="of the call"), thread_scratch():
        raise RuntimeError("of the call")
    with thread_scratch() as again:
        assert again is outer, "it comes back after an exception"


def expert_last(layer: Any) -> dict[str, Tensor]:
    return {
        name: leaf.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
        if name in FACTORS
        else leaf
        for name, leaf in leaves_of(layer).items()
    }


def poison() -> None:
    """What a call left behind becomes NaN."""
    with thread_scratch() as scratch:
        for memory in scratch._memory.values():
            memory.fill_(float("nan"))


def expected_of(layer: Any) -> tuple[Tensor, ...]:
    leaves = leaves_of(layer)
    return torch.autograd.grad(call(frozen(layer), layer, leaves), leaves.values(), layer.grad_y)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for grad, wanted in zip(found, expected, strict=True):
        assert torch.equal(grad, wanted)


def test_layers_of_other_sizes_take_turns() -> None:
    """Forwards of all, then backwards of all: what one layer left is not taken for another's, nor for the
    gradient of an expert without tokens, nor where there are none."""
    sizes = [
        Sizes(experts=5, ranks=(3, 3, 1)),
        Sizes(experts=4, hidden=64, ranks=(8, 8, 8)),
        Sizes(experts=16, tokens=2),
        Sizes(experts=3, tokens=0),
    ]
    layers = [make_layer(size) for size in sizes]
    expected = [expected_of(layer) for layer in layers]
    stored = [expert_last(layer) for layer in layers]
    outputs = []
    for layer, leaves in zip(layers, stored, strict=True):
        outputs.append(call(frozen(layer), layer, leaves))
        poison()
    for y, leaves, layer, wanted in zip(outputs, stored, layers, expected, strict=True):
        found = torch.autograd.grad(y, leaves.values(), layer.grad_y)
        poison()
        assert_same(found, wanted)


def test_memory_of_inference_mode() -> None:
    layer = make_layer(Sizes(experts=5, tokens=9))
    leaves, experts = expert_last(layer), frozen(layer)
    with thread_scratch() as scratch:
        scratch._memory.clear()
    y = call(experts, layer, leaves)
    with thread_scratch() as scratch:
        scratch._memory.clear()
    with torch.inference_mode():
        assert torch.equal(call(experts, layer, leaves), y)
        for slot in range(12):  # those of gradients too
            with thread_scratch() as scratch:
                scratch.tensor(slot, (5, 5000), torch.float32)
    assert_same(torch.autograd.grad(y, leaves.values(), layer.grad_y), expected_of(layer))


def test_what_a_mode_of_torch_makes_is_not_kept() -> None:
    """A call under FakeTensorMode fails; the next one outside of it does not."""
    layer = make_layer(Sizes(experts=5))
    leaves, experts = expert_last(layer), frozen(layer)
    with thread_scratch() as scratch:
        scratch._memory.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ArgumentError):
        call(experts, layer, leaves)
    y = call(experts, layer, leaves)
    assert_same(torch.autograd.grad(y, leaves.values(), layer.grad_y), expected_of(layer))


def test_one_a_of_gate_and_up_is_turned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(Sizes(experts=5))
    leaves, experts = expert_last(layer), frozen(layer)
    slots: list[int] = []
    tensor = Scratch.tensor
    monkeypatch.setattr(
        Scratch, "tensor", lambda self, slot, *rest: slots.append(slot) or tensor(self, slot, *rest)
    )
    y = call(experts, layer, leaves | {"up_lora_a": leaves["gate_lora_a"]})
    assert slots == [0, 1, 3, 4, 5]
    del slots[:]
    y.sum().backward()
    assert slots == [0, 1, 3, 4, 5, 6, 7, 9, 10, 11], "factors, then their gradients"


def test_a_negative_factor_is_refused_by_name() -> None:
    layer = make_layer(Sizes(experts=5))
    leaves = expert_last(layer)
    negative = torch._neg_view(leaves["gate_lora_b"].detach())
    with pytest.raises(ArgumentError, match="gate_lora_b: expected a tensor without the negative bit"):
        call(frozen(layer), layer, leaves | {"gate_lora_b": negative})


def test_factors_of_other_types_are_refused_by_name() -> None:
    layer = make_layer(Sizes(experts=5))
    leaves = expert_last(layer)
    half = leaves["gate_lora_b"].detach().half()
    with pytest.raises(TypeError, match=r"gate_lora_b: expected .*, got float16"):
        call(frozen(layer), layer, leaves | {"gate_lora_b": half})
