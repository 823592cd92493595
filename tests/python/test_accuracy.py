"""The accuracy contract: against float64 on the same bf16 inputs, no tensor is less accurate than torch's
eager bf16 autograd. Errors are pooled over seeds, so that chance does not decide on small tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from cases import Sizes
from reference import Layer, gelu_glu, gelu_tanh_glu, gpt_oss, gradients, largest, make_layer, run, silu_glu

SEEDS = 8
SHAPES = [
    Sizes(experts=4, top_k=2, hidden=64, intermediate=48, ranks=(8, 8, 8), tokens=48),
    Sizes(experts=5, top_k=2, hidden=67, intermediate=43, ranks=(7, 7, 7), tokens=37),
    Sizes(experts=8, top_k=4, hidden=128, intermediate=96, ranks=(16, 16, 16), tokens=64),
    Sizes(experts=3, top_k=3, hidden=31, intermediate=129, ranks=(1, 1, 1), tokens=29),
    Sizes(experts=2, top_k=1, hidden=256, intermediate=33, ranks=(64, 4, 3), tokens=70),
]
SMALL = [
    Sizes(experts=3, top_k=2, hidden=32, intermediate=32, ranks=(4, 4, 4), tokens=12),
    Sizes(experts=2, top_k=1, hidden=33, intermediate=17, ranks=(3, 3, 3), tokens=17),
    Sizes(experts=4, top_k=2, hidden=19, intermediate=48, ranks=(8, 8, 8), tokens=9),
    Sizes(experts=2, top_k=2, hidden=48, intermediate=23, ranks=(1, 1, 1), tokens=21),
]


def compare(
    kernel: str,
    sizes: Sizes,
    activation: tuple[str, Callable[..., torch.Tensor]] = ("silu", silu_glu),
    biases: bool = False,
    weights: bool = False,
    change: Callable[[Layer], None] = lambda _: None,
) -> None:
    errors: dict[str, list[float]] = {}
    formula = activation[1]
    op = sizes.operator(kernel=kernel, activation=activation[0])
    for seed in range(SEEDS):
        layer = make_layer(sizes, seed, biases=biases)
        change(layer)
        exact = gradients(layer.to(torch.float64), weights, activation=formula)
        eager = gradients(layer, weights, activation=formula)
        ours = run(op, layer, weights)
        for name, value in exact.items():
            sums = errors.setdefault(name, [0.0, 0.0, 0.0])
            for i, tensor in enumerate((ours[name].double() - value, eager[name].double() - value, value)):
                sums[i] += tensor.square().sum().item()
    assert len(errors) == 3 + 2 * sum(rank > 0 for rank in sizes.ranks) + 3 * biases + 3 * weights
    worse = less_accurate(errors)
    assert not worse, "; ".join(worse)


def less_accurate(errors: dict[str, list[float]]) -> list[str]:
    """Of the tensors with their squared norms of our error, eager's and the tensor itself, those not as good as
    eager; one with a NaN is not."""
    return [
        f"{name}: {math.sqrt(ours / norm):.2e} ours, {math.sqrt(eager / norm):.2e} eager"
        for name, (ours, eager, norm) in errors.items()
        if not ours <= eager
    ]


@pytest.mark.parametrize(
    ("ours", "eager", "good"),
    [(1, 2, True), (2, 2, True), (3, 2, False), (math.nan, 2, False), (1, math.nan, False)],
)
def test_what_is_less_accurate(ours: float, eager: float, good: bool) -> None:
    worse = less_accurate({"y": [1, 1, 1], "grad_x": [ours, eager, 8]})
    assert [line.partition(":")[0] for line in worse] == ([] if good else ["grad_x"])


@pytest.mark.parametrize("values", [(math.nan, 1.0, 2.0), (1.0, math.nan, 2.0), (1.0, 2.0, math.nan)])
def test_no_largest_of_what_is_no_number(values: tuple[float, ...]) -> None:
    assert math.isnan(largest(values))
    assert largest(value for value in values if not math.isnan(value)) == 2
    with pytest.raises(RuntimeError):
        largest([])


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_no_tensor_is_less_accurate_than_eager_bf16(bf16_kernel: str, sizes: Sizes) -> None:
    compare(bf16_kernel, sizes)


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_no_tensor_is_less_accurate_on_small_shapes(bf16_kernel: str, sizes: Sizes) -> None:
    compare(bf16_kernel, sizes)


@pytest.mark.emulated
@pytest.mark.parametrize("activation", [("gelu", gelu_glu), ("gelu_tanh", gelu_tanh_glu)], ids=lambda a: a[0])
def test_no_tensor_is_less_accurate_with_gelu_and_biases(
    bf16_kernel: str, activation: tuple[str, Callable[..., torch.Tensor]]
) -> None:
    for sizes in SMALL:
        compare(bf16_kernel, sizes, activation, biases=True)


def beyond_the_clamps(layer: Layer) -> None:
    """Every third gate and every second up far beyond a limit of 7, the others far below: a gradient is 0
    beyond it, and of values that come close to it rounding alone would decide."""
    layer.biases["gate_bias"][:, ::3] += 16
    layer.biases["up_bias"][:, 1::4] += 16
    layer.biases["up_bias"][:, 3::4] -= 16


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_no_tensor_is_less_accurate_with_gpt_oss_and_trained_weights(bf16_kernel: str, sizes: Sizes) -> None:
    compare(bf16_kernel, sizes, ("gpt_oss", gpt_oss), biases=True, weights=True, change=beyond_the_clamps)


@pytest.mark.parametrize("sizes", SHAPES[1::3], ids=str)
def test_no_tensor_is_less_accurate_with_trained_weights(bf16_kernel: str, sizes: Sizes) -> None:
    compare(bf16_kernel, sizes, weights=True)
