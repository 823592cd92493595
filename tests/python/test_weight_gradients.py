"""Gradients of the base weights: of the operator against float64, in every form of the weights, and as inputs
of the autograd function and parameters of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amx_sft_moe
from amx_sft_moe import ArgumentError
from amx_sft_moe.nn import ExpertBiases, ExpertWeights, LoraFactors, SftMoeExperts, sft_moe
from cases import SHAPES, Sizes
from reference import BIASES, FACTORS, WEIGHTS, Layer, assert_close, gelu_glu, gpt_oss, gradients, make_layer

SIZES = Sizes(tokens=12)
MANY_TOKENS = Sizes(experts=2, top_k=1, hidden=19, intermediate=23, ranks=(3, 3, 3), tokens=1200)
BF16, FP32 = 2e-2, 2e-5


def inputs(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    return layer.x, layer.expert_ids, layer.routing_weights


def weights_of(layer: Layer) -> dict[str, Tensor]:
    return {name: getattr(layer, name) for name in WEIGHTS}


def run(op: amx_sft_moe.SftMoe, layer: Layer, **options: Any) -> dict[str, Tensor]:
    op.set_base(**weights_of(layer), **layer.biases)
    op.set_lora(**layer.factors)
    y = op.forward_sft(*inputs(layer))
    wanted = {"bias_gradients": True, "weight_gradients": True} | options
    return {"y": y} | op.backward(layer.grad_y, **wanted).as_dict()


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_bf16_matches_float64(bf16_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes, biases=True)
    found = run(sizes.operator(kernel=bf16_kernel), layer)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert_close(found, gradients(layer.to(torch.float64), weights=True), BF16)


@pytest.mark.parametrize("sizes", [*SHAPES, MANY_TOKENS], ids=str)
def test_fp32_matches_float64(fp32_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes, dtype=torch.float32)
    found = run(sizes.operator(kernel=fp32_kernel), layer)
    assert_close(found, gradients(layer.to(torch.float64), weights=True), FP32)


def test_every_form_of_the_weights(bf16_kernel: str) -> None:
    layer = make_layer(SIZES)
    expected = run(SIZES.operator(kernel=bf16_kernel), layer)
    both = torch.cat([layer.gate_proj, layer.up_proj], 1)
    expected["gate_up_proj"] = torch.cat([expected["gate_proj"], expected["up_proj"]], 1)
    for weights in (
        {"gate_up_proj": both, "down_proj": layer.down_proj},
        {"gate_up_proj": list(both), "down_proj": layer.down_proj},
        {name: list(weight) for name, weight in weights_of(layer).items()},
    ):
        op = SIZES.operator(kernel=bf16_kernel)
        op.set_base(**weights)
        op.set_lora(**layer.factors)
        for out in ({}, {name: torch.empty(expected[name].shape) for name in weights}):
            op.forward_sft(*inputs(layer))
            found = op.backward(layer.grad_y, out=out, weight_gradients=not out).as_dict()
            assert set(found) & {*WEIGHTS, "gate_up_proj"} == set(weights)
            assert all(found[name] is tensor for name, tensor in out.items())
            assert all(torch.equal(tensor.bfloat16(), expected[name]) for name, tensor in found.items())


def test_only_where_asked_for() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    everything = {"weight_gradients": True}
    for options, names in (
        ({}, set()),
        (everything, set(WEIGHTS)),
        (everything | {"skip": ["up_proj", "grad_x", "down_lora_b"]}, {"gate_proj", "down_proj"}),
        ({"out": {"up_proj": torch.full((4, 24, 32), torch.nan)}}, {"up_proj"}),
        ({"skip": [*FACTORS, "grad_x", "grad_routing_weights"]} | everything, set(WEIGHTS)),
    ):
        op.forward_sft(*inputs(layer))
        found = op.backward(layer.grad_y, **options).as_dict()
        assert set(found) & set(WEIGHTS) == names
        assert all(torch.equal(tensor.bfloat16(), expected[name]) for name, tensor in found.items())


def test_accumulate_scale_and_idle_experts(fp32_kernel: str) -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    layer.expert_ids = layer.expert_ids % 3  # the last one idles
    op = SIZES.operator(kernel=fp32_kernel)
    once = run(op, layer)
    assert all(not once[name][3].any() and once[name][:3].any() for name in WEIGHTS)
    out = {name: torch.ones_like(once[name]) for name in WEIGHTS}
    op.forward_sft(*inputs(layer))
    op.backward(layer.grad_y, True, -0.5, out, skip=FACTORS)
    for name, tensor in out.items():
        torch.testing.assert_close(tensor, 1 - 0.5 * once[name])
        assert (tensor[3] == 1).all()


SHAPE = (4, 24, 32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"out": {"gate_proj": torch.zeros(4, 24, 31)}}, ArgumentError, ["out.gate_proj", "[4, 24, 32]", "31"]),
        ({"out": {"down_proj": torch.zeros(4, 32, 24).half()}}, TypeError, ["out.down_proj", "float16"]),
        ({"out": {"up_proj": torch.zeros(1, 24, 32).expand(SHAPE)}}, ArgumentError, ["out.up_proj", "overlap"]),
        ({"out": {"gate_up_proj": torch.zeros(4, 48, 32)}}, ArgumentError, ["out", "gate_up_proj"]),
        ({"out": {"gate_proj": [torch.zeros(24, 32)] * 4}}, TypeError, ["out.gate_proj", "tensor", "list"]),
        ({"accumulate": True, "skip": FACTORS, "weight_gradients": True}, ArgumentError, ["gate_proj", "none"]),
        ({"skip": ["gate_projs"]}, ArgumentError, ["skip", "gate_proj", "gate_projs"]),
    ],
)
def test_misuse_of_backward(arguments: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    op.forward_sft(*inputs(layer))
    with pytest.raises(error) as caught:
        op.backward(layer.grad_y, **arguments)
    assert all(word in str(caught.value) for word in words), caught.value
    assert op.saved_depth == 1, "a refused backward keeps its entry"
    found = op.backward(layer.grad_y, weight_gradients=True).as_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_memory_that_something_else_has() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    run(op, layer)
    one = torch.zeros(SHAPE)
    flat = torch.zeros(4 * 24 * 32 + 12 * 32)
    for out, words in (
        ({"gate_proj": layer.gate_proj}, "^out.gate_proj:.*memory of its own.*that gate_proj "),
        ({"gate_proj": layer.up_proj}, "^out.gate_proj:.*that up_proj "),
        ({"gate_proj": one, "up_proj": one}, "^out.gate_proj:.*that out.up_proj "),
        (
            {"up_proj": flat[-one.numel() :].view(SHAPE), "grad_x": flat[: 12 * 32 + 1][1:].view(12, 32)},
            "out.grad_x",
        ),
        ({"down_proj": layer.x.new_zeros(1)}, "shape"),
    ):
        before = [weight.clone() for weight in weights_of(layer).values()]
        op.forward_sft(*inputs(layer))
        with pytest.raises(ArgumentError, match=words):
            op.backward(layer.grad_y, out=out)
        assert all(map(torch.equal, weights_of(layer).values(), before))
        op.clear()
    op.forward_sft(*inputs(layer))
    found = op.backward(
        layer.grad_y, out={"up_proj": flat[-one.numel() :].view(SHAPE), "grad_x": flat[: 12 * 32].view(12, 32)}
    )
    assert found.up_proj.any()


# As inputs of the autograd function.


def leaves_of(layer: Layer) -> dict[str, Tensor]:
    found = {"grad_x": layer.x, "grad_routing_weights": layer.routing_weights}
    found |= {name: factor for name, factor in layer.factors.items() if factor is not None}
    found |= layer.biases | weights_of(layer)
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in found.items()}


def call(layer: Layer, leaves: dict[str, Tensor], **options: Any) -> Tensor:
    weights = {name: leaves[name] for name in WEIGHTS}
    experts = ExpertWeights(top_k=layer.expert_ids.shape[1], **weights, **options)
    lora = LoraFactors(tuple(leaves.get(name) for name in FACTORS))
    biases = ExpertBiases(*[leaves.get(name) for name in BIASES])
    return sft_moe(experts, leaves["grad_x"], layer.expert_ids, leaves["grad_routing_weights"], lora, biases)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_gradients_of_the_function(bf16_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes, biases=True)
    leaves = leaves_of(layer)
    y = call(layer, leaves, kernel=bf16_kernel, activation="gelu")
    y.backward(layer.grad_y)
    found = {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
    assert_close(found, gradients(layer.to(torch.float64), weights=True, activation=gelu_glu), BF16)


@pytest.mark.filterwarnings("ignore:.*double precision")
def test_gradcheck(fp32_kernel: str) -> None:
    sizes = Sizes(experts=3, hidden=5, intermediate=4, ranks=(2, 0, 2), tokens=3)
    layer = make_layer(sizes, dtype=torch.float32, biases=True)
    leaves = leaves_of(layer)

    def function(*values: Tensor) -> Tensor:
        return call(layer, dict(zip(leaves, values, strict=True)), num_threads=1, kernel=fp32_kernel)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()), eps=1e-2, atol=5e-3, rtol=2e-2)


def test_only_what_is_needed() -> None:
    layer = make_layer(SIZES)
    all_leaves = leaves_of(layer)
    expected = torch.autograd.grad(call(layer, all_leaves).sum(), all_leaves.values())
    for name, grad in zip(all_leaves, expected, strict=True):
        leaves = {other: leaf.detach().clone() for other, leaf in all_leaves.items()}
        leaves[name].requires_grad_()
        call(layer, leaves).sum().backward()
        assert all((leaf.grad is not None) == (other == name) for other, leaf in leaves.items())
        assert torch.equal(leaves[name].grad, grad), name


@pytest.mark.parametrize("trained", [True, False])
def test_change_between_forward_and_backward_is_noticed(trained: bool) -> None:
    layer = make_layer(SIZES)
    leaves = leaves_of(layer)
    leaves["down_proj"].requires_grad_(trained)
    y = call(layer, leaves)
    with torch.no_grad():
        leaves["down_proj"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.grad_y)


def test_views_of_a_parameter_as_the_weights_of_a_call() -> None:
    """A parameter in a layout of its own [E, 2I + 1, H + 3] of which weights are views; its gradient is one."""
    layer = make_layer(SIZES, dtype=torch.float32)
    stored = nn.Parameter(torch.zeros(4, 49, 35))
    down = nn.Parameter(layer.down_proj.flatten())
    with torch.no_grad():
        stored[:, :48, :32] = torch.cat([layer.gate_proj, layer.up_proj], 1)
    views = [
        {"gate_up_proj": part[:, :48, :32], "down_proj": of_down.view(4, 32, 24)}
        for part, of_down in ((stored.detach(), down.detach()), (stored, down))
    ]
    experts = ExpertWeights(top_k=2, **views[0])
    lora = LoraFactors(tuple(layer.factors[name] for name in FACTORS))
    y = sft_moe(experts, *inputs(layer), lora, weights=views[1])
    assert torch.equal(y, sft_moe(experts, *inputs(layer), lora))
    assert not sft_moe(experts, *inputs(layer), lora).requires_grad
    y.backward(layer.grad_y)
    exact = gradients(layer.to(torch.float64), weights=True)
    assert_close(
        {"gate_up": stored.grad[:, :48, :32], "down": down.grad.view(4, 32, 24)},
        {"gate_up": torch.cat([exact["gate_proj"], exact["up_proj"]], 1), "down": exact["down_proj"]},
        FP32,
    )
    assert not stored.grad[:, 48:].any()
    assert not stored.grad[..., 32:].any()


def test_weights_of_a_call_that_are_others() -> None:
    layer = make_layer(SIZES)
    experts = ExpertWeights(top_k=2, **weights_of(layer))
    own = experts.weights
    for weights, words in (
        ({"down_proj": own["down_proj"]}, r"weights: expected.*gate_proj.*got \['down_proj'\]"),
        (own | {"down_proj": own["down_proj"].clone()}, r"weights\['down_proj'\]: expected the memory"),
        (own | {"gate_proj": own["up_proj"]}, r"weights\['gate_proj'\]: expected the memory"),
        (
            own | {"gate_proj": own["gate_proj"].view(4, 32, 24)},
            r"weights\['gate_proj'\].*\(4, 24, 32\).*\(4, 32",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            sft_moe(experts, *inputs(layer), weights=weights)


@pytest.mark.parametrize("mode", ["none", "reentrant", "not reentrant"])
def test_module(mode: str) -> None:
    """Weights, biases and factors of a module trained at once, gpt-oss's activation, checkpointed or not."""
    layer = make_layer(SIZES, dtype=torch.float32, biases=True)
    both = torch.cat([layer.gate_proj, layer.up_proj], 1)
    experts = SftMoeExperts(
        2,
        gate_up_proj=nn.Parameter(both),
        down_proj=layer.down_proj.clone().requires_grad_(),
        lora_rank=4,
        activation={"limit": 1.0, "alpha": 1.702},
        **{name: nn.Parameter(bias) for name, bias in layer.biases.items()},
    )
    with torch.no_grad():
        for name, factor in layer.factors.items():
            getattr(experts, name).copy_(factor)
    x = layer.x.clone().requires_grad_()
    arguments = (x, layer.expert_ids, layer.routing_weights)
    y = experts(*arguments) if mode == "none" else checkpoint(experts, *arguments, use_reentrant=mode[0] == "r")
    y.backward(layer.grad_y)
    exact = gradients(layer.to(torch.float64), weights=True, activation=lambda g, u: gpt_oss(g, u, 1.0))
    del exact["grad_routing_weights"]
    exact["gate_up_proj"] = torch.cat([exact.pop("gate_proj"), exact.pop("up_proj")], 1)
    found = {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert_close({"y": y.detach(), "grad_x": x.grad} | found, exact, FP32)


def test_weights_of_a_module_that_are_cut_off() -> None:
    layer = make_layer(SIZES)
    weights = weights_of(layer) | {"up_proj": layer.up_proj.requires_grad_() * 2}
    with pytest.raises(ArgumentError, match=r"up_proj.*leaf"):
        SftMoeExperts(2, **weights)
    frozen = SftMoeExperts(2, **weights_of(make_layer(SIZES)))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    frozen.down_proj.requires_grad_()  # from now on trained
    frozen(*inputs(layer)).sum().backward()
    assert frozen.down_proj.grad.any()
    assert frozen.gate_proj.grad is None


def test_training_steps() -> None:
    layer = make_layer(SIZES)
    experts = SftMoeExperts(2, **{name: nn.Parameter(weight) for name, weight in weights_of(layer).items()})
    optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        y = experts(*inputs(layer))
        loss = (y.float() - layer.grad_y.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
