"""A NaN in a weight comes out wherever torch's would: no kernel's comparisons turn it into a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import Sizes
from reference import gelu_glu, gelu_tanh_glu, gpt_oss, gradients, make_layer, run, silu_glu

ACTIVATIONS = {"silu": silu_glu, "gelu": gelu_glu, "gelu_tanh": gelu_tanh_glu, "gpt_oss": gpt_oss}


@pytest.mark.emulated
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_in_a_weight(bf16_kernel: str, activation: str, projection: str) -> None:
    _check(bf16_kernel, ACTIVATIONS[activation], activation, projection, torch.bfloat16)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_in_an_fp32_weight(fp32_kernel: str, activation: str, projection: str) -> None:
    _check(fp32_kernel, ACTIVATIONS[activation], activation, projection, torch.float32)


def _check(
    kernel: str,
    form: Callable[[Tensor, Tensor], Tensor],
    activation: str,
    projection: str,
    dtype: torch.dtype,
) -> None:
    sizes = Sizes(experts=3, top_k=1, hidden=40, intermediate=37, tokens=21)
    layer = make_layer(sizes, dtype=dtype)
    getattr(layer, projection)[1, 5, 7] = float("nan")
    found = run(sizes.operator(kernel=kernel, activation=activation), layer)
    expected = gradients(layer.to(torch.float64), activation=form)
    for name in ("y", "grad_x", "grad_routing_weights"):
        assert torch.equal(found[name].isnan(), expected[name].isnan()), name
