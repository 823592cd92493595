"""A of gate and A of up in the same memory: what is one factor, and what only begins at the same address."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amx_sft_moe.nn import ExpertWeights, LoraFactors, sft_moe
from cases import Sizes
from reference import FACTORS, WEIGHTS, Layer, make_layer, run

SIZES = Sizes(experts=3, hidden=16, ranks=(16, 16, 4), tokens=12)
E, R, H = SIZES.experts, SIZES.ranks[0], SIZES.hidden
# Gate's A and up's A, of 16 x 16 an expert, as views of [E, 2 r, H].
NEAR_MISSES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "one expert for all": lambda a: (a[:, :R], a[:1, :R].expand(E, R, H)),
    "one row for all": lambda a: (a[:, :R], a[:, :1].expand(E, R, H)),
    "one column for all": lambda a: (a[:, :R, :1].expand(E, R, H), a[:, :R]),
    "every second row": lambda a: (a[:, :R], a[:, ::2]),
    "transposed": lambda a: (a[:, :R], a[:, :R].transpose(1, 2)),
    "the next experts sooner": lambda a: (a[:, :R], a.flatten()[: E * R * H].view(E, R, H)),
    "of a smaller rank": lambda a: (a[:, :R], a[:, : R // 2]),
}


def layer_of(pair: tuple[Tensor, Tensor], dtype: torch.dtype = torch.bfloat16) -> Layer:
    layer = make_layer(SIZES, dtype=dtype)
    layer.factors["gate_lora_a"], layer.factors["up_lora_a"] = pair
    layer.factors["up_lora_b"] = layer.factors["up_lora_b"][:, :, : pair[1].shape[1]]
    return layer


def both_a(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(E, 2 * R, H, generator=torch.Generator().manual_seed(1)).div(4).to(dtype)


@pytest.mark.emulated
@pytest.mark.parametrize("near", NEAR_MISSES)
def test_two_factors_at_one_address(bf16_kernel: str, near: str) -> None:
    pair = NEAR_MISSES[near](both_a())
    assert pair[0].data_ptr() == pair[1].data_ptr()
    copies = run(SIZES.operator(kernel=bf16_kernel), layer_of((pair[0].clone(), pair[1].contiguous().clone())))
    found = run(SIZES.operator(kernel=bf16_kernel), layer_of(pair))
    assert found.keys() == copies.keys() >= {"gate_lora_a", "up_lora_a"}
    assert all(torch.equal(found[name], copies[name]) for name in copies)


@pytest.mark.emulated
def test_one_factor_as_two_views(bf16_kernel: str) -> None:
    a = both_a()[:, :R]
    one = run(SIZES.operator(kernel=bf16_kernel), layer_of((a, a)))
    views = run(SIZES.operator(kernel=bf16_kernel), layer_of((a[:], a.view(a.shape))))
    assert "up_lora_a" not in one
    assert views.keys() == one.keys()
    assert all(torch.equal(views[name], one[name]) for name in one)


IN_A_GRAPH = [(near, False) for near in NEAR_MISSES]
IN_A_GRAPH += [(near, True) for near in NEAR_MISSES if near != "the next experts sooner"]  # a copy


@pytest.mark.parametrize(("near", "last"), IN_A_GRAPH)
def test_two_factors_at_one_address_of_a_graph(near: str, last: bool) -> None:
    """Both views give their part of the gradient to the tensor that they are of; ``last``: one with the expert
    as its last dimension, as in PEFT."""
    results = []
    for copied in (False, True):
        leaf = both_a().permute(1, 2, 0).contiguous().permute(2, 0, 1) if last else both_a()
        leaf.requires_grad_()
        pair = NEAR_MISSES[near](leaf)
        assert pair[0].data_ptr() == pair[1].data_ptr()
        layer = layer_of((pair[0].clone(), pair[1].clone()) if copied else pair)
        experts = ExpertWeights(top_k=SIZES.top_k, **{name: getattr(layer, name) for name in WEIGHTS})
        lora = LoraFactors(tuple(layer.factors[name] for name in FACTORS))
        inputs = layer.x, layer.expert_ids, layer.routing_weights
        y = sft_moe(experts, *inputs, lora)
        y.backward(layer.grad_y)
        with torch.no_grad():
            assert torch.equal(sft_moe(experts, *inputs, lora), y)
        results.append((y, leaf.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
