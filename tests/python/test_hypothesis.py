"""Property tests: operators of any sizes on tensors of any dtypes, strides and forms against float64, and the
autograd function against the operator. AMX_SFT_MOE_HYPOTHESIS=full tries 50 times more.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amx_sft_moe import ArgumentError, SftMoe
from amx_sft_moe.nn import ExpertBiases, ExpertWeights, LoraFactors, sft_moe
from amx_sft_moe.sft_moe import GRADIENT_NAMES
from problems import (
    BIAS_NAMES,
    DTYPES,
    KERNELS,
    PROJECTIONS,
    Extents,
    bases,
    calls,
    examples,
    expected,
    extents,
    formulas,
    layouts,
    loras,
    normals,
    parameters,
)

SCALINGS = ("gate_scaling", "up_scaling", "down_scaling")
SHARED_FACTORS = ("gate_up_lora_a", "gate_up_lora_b", None, None, "down_lora_a", "down_lora_b")


@examples(120)
@given(data=st.data(), sizes=extents(), kernel=KERNELS, alpha=st.sampled_from([None, 6.0]))
def test_operator_matches_float64(
    data: st.DataObject, sizes: Extents, kernel: tuple[str, torch.dtype], alpha: float | None
) -> None:
    name, dtype = kernel
    activation, formula = data.draw(formulas(dtype))
    base, lora = data.draw(bases(sizes, dtype)), data.draw(loras(sizes, alpha))
    call, normal = data.draw(calls(sizes)), data.draw(normals())
    grad_y = data.draw(layouts(2, adjacent=True)).store(normal(*call.x.shape, dtype=data.draw(DTYPES)))
    threads = data.draw(st.sampled_from([1, 1, 1, 2]))
    op = sizes.operator(lora_alpha=alpha, activation=activation, kernel=name, num_threads=threads)
    op.set_base(**base.arguments)
    op.set_lora(**lora.arguments)
    y = op.forward_sft(*call.inputs())
    found = op.backward(grad_y, bias_gradients=True, weight_gradients=True).as_dict()
    owners = {"grad_x": call.x, "grad_routing_weights": call.routing_weights} | parameters(base, lora)
    assert y.dtype == call.x.dtype
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in owners.items()
    }
    right = expected(base, lora, call, grad_y, formula)
    assert right.values.keys() == found.keys() | {"y"}
    for result, tensor in ({"y": y} | found).items():
        right.check(result, tensor)


@examples(60)
@given(data=st.data(), sizes=extents(), kernel=KERNELS)
def test_autograd_equals_the_operator(
    data: st.DataObject, sizes: Extents, kernel: tuple[str, torch.dtype]
) -> None:
    name, dtype = kernel
    activation, _ = data.draw(formulas(dtype))
    base, lora = data.draw(bases(sizes, dtype, stacked=True)), data.draw(loras(sizes, None))
    # The operator's stack holds x in the kernel's dtype, the graph x itself: same bits only where x is exact.
    call, normal = data.draw(calls(sizes, adjacent=False, exact=dtype)), data.draw(normals())
    leaves = {"grad_x": call.x, "grad_routing_weights": call.routing_weights} | parameters(base, lora)
    needed = data.draw(st.sets(st.sampled_from(sorted(leaves))))
    for leaf in needed:
        leaves[leaf].requires_grad_()
    names = SHARED_FACTORS if "gate_up_lora_a" in leaves else tuple(lora.factors)
    factors = [None if factor is None else lora.arguments.get(factor) for factor in names]
    biases = ExpertBiases(*[base.arguments.get(bias) for bias in BIAS_NAMES])
    weights = {key: value for key, value in base.arguments.items() if key.endswith("_proj")}
    options = {"activation": activation, "kernel": name, "num_threads": 1}
    experts = ExpertWeights(top_k=sizes.top_k, **weights, **options)
    y = sft_moe(experts, *call.inputs(), LoraFactors(factors, names is SHARED_FACTORS, lora.scaling), biases)
    assert y.requires_grad == bool(needed)
    grad_y = normal(*y.shape, dtype=y.dtype)
    if data.draw(st.booleans()):
        grad_y = grad_y[:1, :1].expand_as(y) if len(y) else grad_y

    op = sizes.operator(**options)
    op.set_base(**base.arguments)
    adapted = [lora.factors[f"{projection}_lora_b"] is not None for projection in PROJECTIONS]
    scalings = dict(compress(zip(SCALINGS, lora.scaling, strict=True), adapted))
    op.set_lora(**(lora.arguments | scalings))
    x, ids, routing_weights = call.x.detach().contiguous(), call.expert_ids, call.routing_weights.detach()
    assert torch.equal(y, op.forward_sft(x, ids, routing_weights.contiguous()))
    skip = set(GRADIENT_NAMES) - needed
    gradients = op.backward(grad_y.contiguous(), skip=skip, bias_gradients=True, weight_gradients=True)
    found = gradients.as_dict()
    assert found.keys() == needed
    if needed:
        y.backward(grad_y)
    for leaf, tensor in leaves.items():
        assert (tensor.grad is not None) == (leaf in needed), leaf
        if leaf in needed:
            assert tensor.grad.dtype == tensor.dtype
            assert torch.equal(tensor.grad, found[leaf]), leaf


@examples(40)
@given(
    sizes=st.lists(
        st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63, 2.5, "3", None])),
        min_size=4,
        max_size=4,
    ),
    option=st.sampled_from(["max_tokens", "cache_depth", "num_threads", "lora_rank"]),
    value=st.one_of(st.integers(-3, 3), st.sampled_from([0.5, "1", 4096, 4097, 2**63 - 1, 2**63])),
)
def test_construction(sizes: list[Any], option: str, value: Any) -> None:
    lowest = 0 if option in ("max_tokens", "lora_rank") else 1
    highest = 4096 if option == "num_threads" else 2**63 - 1
    fits = isinstance(value, int) and lowest <= value <= highest
    if fits and all(isinstance(n, int) and 1 <= n < 2**63 for n in sizes):
        assert SftMoe(*sizes, **{option: value}).saved_depth == 0
    else:
        with pytest.raises((ArgumentError, TypeError)):
            SftMoe(*sizes, **{option: value})
