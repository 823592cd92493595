"""Biases as inputs of the autograd function and as parameters of the module: frozen ones are read, trained
ones receive gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amx_sft_moe import ArgumentError
from amx_sft_moe.nn import ExpertBiases, ExpertWeights, LoraFactors, SftMoeExperts, sft_moe
from cases import SHAPES, Sizes
from reference import BIASES, FACTORS, Layer, assert_close, gelu_glu, gpt_oss, gradients, make_layer

SIZES = Sizes(tokens=12)


def frozen(layer: Layer, **options: Any) -> ExpertWeights:
    return ExpertWeights(
        top_k=layer.expert_ids.shape[1],
        gate_proj=layer.gate_proj,
        up_proj=layer.up_proj,
        down_proj=layer.down_proj,
        **options,
    )


def leaves_of(layer: Layer) -> dict[str, Tensor]:
    found = {"grad_x": layer.x, "grad_routing_weights": layer.routing_weights}
    found |= {name: factor for name, factor in layer.factors.items() if factor is not None}
    found |= layer.biases
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in found.items()}


def call(experts: ExpertWeights, layer: Layer, leaves: dict[str, Tensor]) -> Tensor:
    lora = LoraFactors(tuple(leaves.get(name) for name in FACTORS))
    biases = ExpertBiases(*[leaves.get(name) for name in BIASES])
    return sft_moe(experts, leaves["grad_x"], layer.expert_ids, leaves["grad_routing_weights"], lora, biases)


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_gradients(bf16_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes, biases=True)
    leaves = leaves_of(layer)
    y = call(frozen(layer, kernel=bf16_kernel, activation="gelu"), layer, leaves)
    y.backward(layer.grad_y)
    found = {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
    assert_close(found, gradients(layer.to(torch.float64), activation=gelu_glu), 2e-2)


@pytest.mark.filterwarnings("ignore:.*double precision")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gradcheck(fp32_kernel: str, activation: str) -> None:
    sizes = Sizes(experts=3, hidden=5, intermediate=4, ranks=(2, 1, 2), tokens=3)
    layer = make_layer(sizes, dtype=torch.float32, biases=True)
    experts = frozen(layer, num_threads=1, kernel=fp32_kernel, activation=activation)
    leaves = leaves_of(layer)

    def function(*values: Tensor) -> Tensor:
        return call(experts, layer, dict(zip(leaves, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()), eps=1e-2, atol=5e-3, rtol=2e-2)


def test_gpt_oss(fp32_kernel: str) -> None:
    """Clamped activation, the interleaved bias as one leaf behind two views, and one A for gate and up."""
    sizes = Sizes(experts=5, hidden=67, intermediate=43, ranks=(7, 7, 7), tokens=30)
    layer = make_layer(sizes, dtype=torch.float32, biases=True)
    layer.factors["up_lora_a"] = layer.factors["gate_lora_a"]
    leaf = torch.stack([layer.biases["gate_bias"], layer.biases["up_bias"]], dim=2).flatten(1).requires_grad_()
    down = layer.biases["down_bias"].clone().requires_grad_()
    a, gate_b, _, up_b, *rest = (layer.factors[name].clone().requires_grad_() for name in FACTORS)
    lora = LoraFactors((a, torch.cat([gate_b, up_b], 1), None, None, *rest), shared_a=True)
    experts = frozen(layer, kernel=fp32_kernel, activation={"limit": 1.0, "alpha": 1.702})
    biases = ExpertBiases(gate_bias=leaf[:, ::2], up_bias=leaf[:, 1::2], down_bias=down)
    y = sft_moe(experts, layer.x, layer.expert_ids, layer.routing_weights, lora, biases)
    y.backward(layer.grad_y)
    exact = gradients(layer.to(torch.float64), activation=lambda g, u: gpt_oss(g, u, 1.0))
    exact["gate_lora_a"] = exact["gate_lora_a"] + exact.pop("up_lora_a")
    del exact["grad_x"], exact["grad_routing_weights"]
    found = {"y": y.detach(), "gate_bias": leaf.grad[:, ::2], "up_bias": leaf.grad[:, 1::2]}
    found |= {"down_bias": down.grad, "gate_lora_a": a.grad, "gate_lora_b": gate_b.grad, "up_lora_b": up_b.grad}
    found |= {"down_lora_a": rest[0].grad, "down_lora_b": rest[1].grad}
    assert_close(found, exact, 2e-5)


def test_gate_up_bias_receives_one_gradient(bf16_kernel: str) -> None:
    layer = make_layer(SIZES, biases=True)
    experts, leaves = frozen(layer, kernel=bf16_kernel), leaves_of(layer)
    lora = LoraFactors(tuple(leaves[name] for name in FACTORS))
    expected = call(experts, layer, leaves)
    halves = torch.autograd.grad(expected, (leaves["gate_bias"], leaves["up_bias"]), layer.grad_y)
    wide = torch.cat([layer.biases["gate_bias"], layer.biases["up_bias"]], 1)
    stored = wide.float().t().contiguous().requires_grad_()  # strided, and of a dtype of its own
    biases = ExpertBiases(gate_up_bias=stored.t(), down_bias=layer.biases["down_bias"])
    y = sft_moe(experts, layer.x, layer.expert_ids, layer.routing_weights, lora, biases)
    assert torch.equal(y, expected)
    y.backward(layer.grad_y)
    assert stored.grad.dtype == torch.float32
    assert torch.equal(stored.grad.t().bfloat16(), torch.cat(halves, 1))


def test_only_what_is_needed() -> None:
    layer = make_layer(SIZES, biases=True)
    experts = frozen(layer)
    all_leaves = leaves_of(layer)
    expected = torch.autograd.grad(call(experts, layer, all_leaves).sum(), all_leaves.values())
    for name, grad in zip(all_leaves, expected, strict=True):
        leaves = {other: leaf.detach().clone() for other, leaf in all_leaves.items()}
        leaves[name].requires_grad_()
        call(experts, layer, leaves).sum().backward()
        assert all((leaf.grad is not None) == (other == name) for other, leaf in leaves.items())
        assert torch.equal(leaves[name].grad, grad), name


def test_biases_of_frozen_experts() -> None:
    layer = make_layer(SIZES, biases=True)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    plain = frozen(layer)
    biases = ExpertBiases(**layer.biases)
    experts = frozen(layer, biases=biases)
    expected = sft_moe(plain, *inputs, biases=biases)
    assert torch.equal(sft_moe(experts, *inputs), expected)
    assert not torch.equal(sft_moe(plain, *inputs), expected)
    assert torch.equal(sft_moe(experts, *inputs, biases=ExpertBiases()), sft_moe(plain, *inputs))
    layer.biases["up_bias"].requires_grad_()  # of the experts' own: computed, as of any other
    sft_moe(experts, *inputs).backward(layer.grad_y)
    assert layer.biases["up_bias"].grad.any()
    assert layer.biases["gate_bias"].grad is None


def test_change_between_forward_and_backward_is_noticed() -> None:
    layer = make_layer(SIZES, biases=True)
    leaves = leaves_of(layer)
    y = call(frozen(layer), layer, leaves)
    with torch.no_grad():
        leaves["down_bias"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.grad_y)


def module(layer: Layer, **options: Any) -> SftMoeExperts:
    made = SftMoeExperts(
        layer.expert_ids.shape[1],
        gate_up_proj=torch.cat([layer.gate_proj, layer.up_proj], 1),
        down_proj=layer.down_proj,
        lora_rank=4,
        **options,
    )
    random = torch.Generator().manual_seed(5)
    for name in made.lora_names():
        getattr(made, name).data.normal_(generator=random, std=0.2)
    return made


def with_biases(layer: Layer, **options: Any) -> SftMoeExperts:
    """gate_up_bias trained, down_bias frozen."""
    wide = torch.cat([layer.biases["gate_bias"], layer.biases["up_bias"]], 1)
    down = layer.biases["down_bias"].clone()
    return module(layer, gate_up_bias=nn.Parameter(wide), down_bias=down, **options)


@pytest.mark.parametrize("mode", ["none", "reentrant", "not reentrant"])
def test_module(mode: str) -> None:
    layer = make_layer(SIZES, dtype=torch.float32, biases=True)
    experts = with_biases(layer, activation="gelu")
    trained = {name for name, p in experts.named_parameters() if p.requires_grad}
    assert trained == {*experts.lora_names(), "gate_up_bias"}
    x = layer.x.clone().requires_grad_()
    inputs = (x, layer.expert_ids, layer.routing_weights)
    y = experts(*inputs) if mode == "none" else checkpoint(experts, *inputs, use_reentrant=mode == "reentrant")
    y.backward(layer.grad_y)
    layer.factors = {name: getattr(experts, name).detach() for name in FACTORS}
    exact = gradients(layer.to(torch.float64), activation=gelu_glu)
    exact["gate_up_bias"] = torch.cat([exact.pop("gate_bias"), exact.pop("up_bias")], 1)
    del exact["grad_routing_weights"], exact["down_bias"]
    found = {"y": y.detach(), "grad_x": x.grad} | {name: getattr(experts, name).grad for name in trained}
    assert_close(found, exact, 2e-5)
    assert experts.down_bias.grad is None


def test_training_step_and_clipping() -> None:
    layer = make_layer(SIZES, biases=True)
    experts = with_biases(layer)
    optimizer = torch.optim.AdamW([p for p in experts.parameters() if p.requires_grad], lr=1e-2)
    seen: list[int] = []
    experts.gate_up_bias.register_hook(lambda grad: seen.append(len(grad)))
    start = experts.gate_up_bias.detach().clone(), experts.down_bias.clone()
    losses = []
    for _ in range(8):
        y = experts(layer.x, layer.expert_ids, layer.routing_weights)
        loss = (y.float() - layer.grad_y.float()).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(experts.parameters(), 0.5)
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert seen == [4] * 8
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(experts.gate_up_bias, start[0])
    assert torch.equal(experts.down_bias, start[1])


def test_copies_moves_and_replaced_biases() -> None:
    layer = make_layer(SIZES, biases=True)
    experts = with_biases(layer)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    y = experts(*inputs)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(other(*inputs), y)
        other.down_bias.data.zero_()
        assert not torch.equal(other(*inputs), y), "a copy has biases of its own"
    assert torch.equal(experts(*inputs), y)
    for parameter in experts.parameters():
        old = parameter.data
        parameter.data = old.clone()
        old.zero_()
    assert torch.equal(experts(*inputs), y)
    experts.down_bias = None
    without = experts(*inputs)
    assert not torch.equal(without, y)
    experts.down_bias = nn.Parameter(layer.biases["down_bias"], requires_grad=False)
    assert torch.equal(experts(*inputs), y)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gate_bias": torch.zeros(4, 23)}, ArgumentError, r"gate_bias.*\[4, 24\].*\[4, 23\]"),
        ({"down_bias": torch.zeros(32)}, ArgumentError, r"down_bias.*\[4, 32\].*\[32\]"),
        ({"up_bias": torch.zeros(4, 24).half()}, TypeError, "up_bias.*bfloat16 or float32.*float16"),
        ({"up_bias": [0.0]}, TypeError, "up_bias.*Tensor.*list"),
        ({"gate_up_bias": torch.zeros(4, 48), "up_bias": torch.zeros(4, 24)}, TypeError, "gate_up_bias.*both"),
        ({"up_bias": torch.zeros(4, 24, requires_grad=True) * 2}, ArgumentError, "up_bias.*leaf"),
    ],
)
def test_misuse(options: dict[str, Any], error: type[Exception], words: str) -> None:
    weights = {"gate_up_proj": torch.zeros(4, 48, 32), "down_proj": torch.zeros(4, 32, 24)}
    with pytest.raises(error, match=words):
        SftMoeExperts(2, **weights, **options)
    with pytest.raises(TypeError, match=r"biases.*ExpertBiases.*dict"):
        ExpertWeights(top_k=2, **weights, biases={})
