"""SftMoe against float64 autograd: shapes, layouts, ranks, skipped routes, activations, scalings."""

from __future__ import annotations

import pytest
import torch

import amx_sft_moe
from cases import SHAPES, Sizes
from reference import FACTORS, assert_close, gpt_oss, gradients, make_layer, run

# Rounding of bf16 results and of bf16 activations between the GEMMs; fp32 kernels only sum in another order.
BF16, FP32 = 2e-2, 2e-5


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_bf16_matches_float64(bf16_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes)
    expected = gradients(layer.to(torch.float64))
    found = run(sizes.operator(kernel=bf16_kernel), layer)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert_close(found, expected, BF16)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_fp32_matches_float64(fp32_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes, dtype=torch.float32)
    found = run(sizes.operator(kernel=fp32_kernel), layer)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert_close(found, gradients(layer.to(torch.float64)), FP32)


def test_central_differences(fp32_kernel: str) -> None:
    sizes = Sizes(experts=3, top_k=2, hidden=6, intermediate=5, ranks=(2, 2, 2), tokens=4)
    layer = make_layer(sizes, dtype=torch.float32)
    op = sizes.operator(kernel=fp32_kernel)
    grads = run(op, layer)
    leaves = {"grad_x": layer.x, "grad_routing_weights": layer.routing_weights, **layer.factors}
    step = 1e-2
    for name, leaf in leaves.items():
        flat, analytic = leaf.view(-1), grads[name].view(-1)
        for i in range(0, len(flat), max(1, len(flat) // 7)):
            value = flat[i].item()
            losses = []
            for moved in (value + step, value - step):
                flat[i] = moved
                y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False)
                losses.append((y.double() * layer.grad_y.double()).sum().item())
            flat[i] = value
            assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(analytic[i].item(), rel=2e-2, abs=2e-3)


@pytest.mark.emulated
def test_skipped_and_duplicate_routes(bf16_kernel: str) -> None:
    sizes = Sizes(experts=4, top_k=3, tokens=8)
    layer = make_layer(sizes)
    layer.expert_ids = torch.tensor(
        [
            [0, 0, 0],
            [1, -1, 1],
            [-1, -1, -1],
            [3, 4, 99],
            [-(2**40), 2**40, 2],
            [0, 1, 0],
            [3, 3, -5],
            [0, 0, 1],
        ]
    )
    found = run(sizes.operator(kernel=bf16_kernel), layer)
    expected = gradients(layer.to(torch.float64))
    assert_close(found, expected, BF16)
    skipped = (layer.expert_ids < 0) | (layer.expert_ids >= sizes.experts)
    assert not found["grad_routing_weights"][skipped].any()
    assert not found["y"][2].any()
    assert not found["grad_x"][2].any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_and_idle_experts(bf16_kernel: str, tokens: int) -> None:
    sizes = Sizes(experts=8, top_k=2, tokens=tokens)
    layer = make_layer(sizes)
    found = run(sizes.operator(kernel=bf16_kernel), layer)
    assert_close(found, gradients(layer.to(torch.float64)), BF16)
    idle = [e for e in range(sizes.experts) if e not in layer.expert_ids]
    assert idle
    for name in FACTORS:
        assert not found[name][idle].any(), name


def test_all_tokens_on_one_expert(bf16_kernel: str) -> None:
    sizes = Sizes(tokens=37, top_k=1)
    layer = make_layer(sizes)
    layer.expert_ids = torch.full((37, 1), 2)
    assert_close(run(sizes.operator(kernel=bf16_kernel), layer), gradients(layer.to(torch.float64)), BF16)


@pytest.mark.emulated
@pytest.mark.parametrize("shared", [False, True])
def test_scaling(bf16_kernel: str, shared: bool) -> None:
    sizes = Sizes()
    layer = make_layer(sizes)
    op = sizes.operator(kernel=bf16_kernel, lora_alpha=6.0)
    if shared:
        layer.factors["up_lora_a"] = layer.factors["gate_lora_a"]
    by_alpha = run(op, layer)
    by_hand = run(sizes.operator(kernel=bf16_kernel), layer, gate_scaling=1.5, up_scaling=1.5, down_scaling=1.5)
    assert all(torch.equal(by_alpha[name], by_hand[name]) for name in by_alpha)
    different = run(op, layer, gate_scaling=0.5, up_scaling=-2.0, down_scaling=0.25)
    expected = gradients(layer.to(torch.float64), scaling=(0.5, -2.0, 0.25))
    if shared:  # one tensor, one gradient: the sum
        expected["gate_lora_a"] = expected["gate_lora_a"] + expected.pop("up_lora_a")
    assert_close(different, expected, BF16)


@pytest.mark.emulated
def test_shared_a(bf16_kernel: str) -> None:
    sizes = Sizes(experts=5, hidden=67, intermediate=43, ranks=(7, 7, 7))
    layer = make_layer(sizes)
    layer.factors["up_lora_a"] = layer.factors["gate_lora_a"]
    expected = gradients(layer.to(torch.float64))
    op = sizes.operator(kernel=bf16_kernel)
    op.set_base(gate_up_proj=torch.cat([layer.gate_proj, layer.up_proj], 1), down_proj=layer.down_proj)
    op.set_lora(
        gate_up_lora_a=layer.factors["gate_lora_a"],
        gate_up_lora_b=torch.cat([layer.factors["gate_lora_b"], layer.factors["up_lora_b"]], 1),
        down_lora_a=layer.factors["down_lora_a"],
        down_lora_b=layer.factors["down_lora_b"],
    )
    y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    found = {"y": y} | op.backward(layer.grad_y).as_dict()
    expected["gate_up_lora_a"] = expected.pop("gate_lora_a") + expected.pop("up_lora_a")
    expected["gate_up_lora_b"] = torch.cat([expected.pop("gate_lora_b"), expected.pop("up_lora_b")], 1)
    assert_close(found, expected, BF16)


@pytest.mark.parametrize(
    ("activation", "limit", "alpha"),
    [("gpt_oss", 7.0, 1.702), ({"limit": 0.6, "alpha": 1.1}, 0.6, 1.1), ({"name": "gpt_oss"}, 7.0, 1.702)],
)
def test_gpt_oss_activation(fp32_kernel: str, activation: object, limit: float, alpha: float) -> None:
    sizes = Sizes(tokens=21)
    layer = make_layer(sizes, dtype=torch.float32)
    found = run(sizes.operator(kernel=fp32_kernel, activation=activation), layer)
    expected = gradients(layer.to(torch.float64), activation=lambda g, u: gpt_oss(g, u, limit, alpha))
    assert_close(found, expected, FP32)


def test_base_layouts_agree(bf16_kernel: str) -> None:
    sizes = Sizes(experts=5, hidden=67, intermediate=43)
    layer = make_layer(sizes)
    expected = run(sizes.operator(kernel=bf16_kernel), layer)
    fused = torch.cat([layer.gate_proj, layer.up_proj], 1)
    wide = torch.zeros(5, 2 * 43 + 3, 67 + 5, dtype=torch.bfloat16)[:, 1 : 2 * 43 + 1, 2 : 67 + 2]
    wide.copy_(fused)

    def apart(weight: torch.Tensor) -> list[torch.Tensor]:
        return [matrix.clone() for matrix in weight]

    for base in (
        {"gate_up_proj": fused, "down_proj": layer.down_proj},
        {"gate_up_proj": wide, "down_proj": layer.down_proj},
        {"gate_up_proj": apart(fused), "down_proj": tuple(apart(layer.down_proj))},
        {"gate_proj": apart(layer.gate_proj), "up_proj": layer.up_proj, "down_proj": apart(layer.down_proj)},
    ):
        op = sizes.operator(kernel=bf16_kernel)
        op.set_base(**base)
        op.set_lora(**layer.factors)
        y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
        found = {"y": y} | op.backward(layer.grad_y).as_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_strided_inputs_agree(bf16_kernel: str) -> None:
    sizes = Sizes(experts=3, tokens=11)
    layer = make_layer(sizes)
    expected = run(sizes.operator(kernel=bf16_kernel), layer)

    def rows_apart(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full((tensor.shape[0], tensor.shape[1] + 3), 77, dtype=tensor.dtype)
        wide[:, 2:-1] = tensor
        return wide[:, 2:-1]

    layer.x, layer.grad_y = rows_apart(layer.x), rows_apart(layer.grad_y)
    layer.routing_weights = rows_apart(layer.routing_weights)
    layer.expert_ids = layer.expert_ids.to(torch.int32).t().contiguous().t()
    layer.factors = {
        name: factor.permute(2, 0, 1).contiguous().permute(1, 2, 0) for name, factor in layer.factors.items()
    }
    found = run(sizes.operator(kernel=bf16_kernel), layer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routing_of_any_strides(bf16_kernel: str, dtype: torch.dtype) -> None:
    layer = make_layer(Sizes(tokens=11))
    layer.routing_weights = layer.routing_weights.to(dtype)
    op = Sizes().operator(kernel=bf16_kernel)
    expected = run(op, layer)
    ids, weights = layer.expert_ids, layer.routing_weights
    for change in (lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 1)[:, ::2]):
        layer.expert_ids, layer.routing_weights = change(ids), change(weights)
        assert layer.routing_weights.stride(1) != 1
        found = run(op, layer)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
        out = {"grad_routing_weights": change(torch.full_like(weights, 9.0))}
        assert op.backward(layer.grad_y, out=out).grad_routing_weights is out["grad_routing_weights"]
        assert torch.equal(out["grad_routing_weights"], expected["grad_routing_weights"])


def test_results_over_their_inputs(bf16_kernel: str) -> None:
    layer = make_layer(Sizes(tokens=11))
    op = Sizes().operator(kernel=bf16_kernel)
    expected = run(op, layer)
    y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, out=layer.x)
    found = {"y": y} | op.backward(layer.grad_y, out={"grad_x": layer.grad_y}).as_dict()
    assert y is layer.x
    assert found["grad_x"] is layer.grad_y
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_tensor_for_two_gradients(bf16_kernel: str) -> None:
    layer = make_layer(Sizes(tokens=11))
    op = Sizes().operator(kernel=bf16_kernel)
    expected = run(op, layer)
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    both = torch.full_like(layer.factors["gate_lora_b"], 7.0)
    with pytest.raises(amx_sft_moe.ArgumentError, match="memory of its own"):
        op.backward(layer.grad_y, out={"gate_lora_b": both, "up_lora_b": both})
    assert bool((both == 7.0).all())
    found = op.backward(layer.grad_y).as_dict()
    assert torch.equal(found["up_lora_b"], expected["up_lora_b"])


def test_mixed_dtypes(bf16_kernel: str) -> None:
    sizes = Sizes(tokens=17)
    layer = make_layer(sizes)
    expected = gradients(layer.to(torch.float64))
    layer.x, layer.grad_y = layer.x.float(), layer.grad_y.float()
    layer.routing_weights = layer.routing_weights.float()
    layer.factors = {
        name: factor.float() if name.startswith("up") else factor for name, factor in layer.factors.items()
    }
    found = run(sizes.operator(kernel=bf16_kernel), layer)
    for name, tensor in found.items():
        wants_bf16 = name.startswith(("gate", "down"))
        assert tensor.dtype == (torch.bfloat16 if wants_bf16 else torch.float32), name
    assert_close(found, expected, BF16)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_bits(bf16_kernel: str, threads: int) -> None:
    sizes = Sizes(experts=7, hidden=96, intermediate=80, ranks=(8, 8, 8), tokens=64)
    layer = make_layer(sizes)
    one = run(sizes.operator(kernel=bf16_kernel, num_threads=1), layer)
    more = run(sizes.operator(kernel=bf16_kernel, num_threads=threads), layer)
    assert all(torch.equal(more[name], one[name]) for name in one)


def test_lora_is_optional(bf16_kernel: str) -> None:
    sizes = Sizes(ranks=(0, 0, 0))
    layer = make_layer(sizes)
    found = run(sizes.operator(kernel=bf16_kernel, lora_rank=8, lora_alpha=16), layer)
    assert set(found) == {"y", "grad_x", "grad_routing_weights"}
    assert_close(found, gradients(layer.to(torch.float64)), BF16)


def test_rank_zero_factors(bf16_kernel: str) -> None:
    sizes = Sizes(ranks=(0, 0, 0))
    layer = make_layer(sizes)
    op = sizes.operator(kernel=bf16_kernel)
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
    op.set_lora(gate_lora_a=torch.empty(4, 0, 32), gate_lora_b=torch.empty(4, 24, 0))
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    grads = op.backward(layer.grad_y)
    assert grads.gate_lora_a.shape == (4, 0, 32)
    assert grads.gate_lora_b.shape == (4, 24, 0)
    assert grads.up_lora_a is None


def test_parameters_are_read_anew(bf16_kernel: str) -> None:
    sizes = Sizes()
    layer = make_layer(sizes)
    op = sizes.operator(kernel=bf16_kernel)
    run(op, layer)
    parameter = torch.nn.Parameter(layer.factors["gate_lora_b"])
    op.set_lora(**(layer.factors | {"gate_lora_b": parameter}))
    with torch.no_grad():
        parameter.mul_(-2)  # an optimiser's step
    inputs = (layer.x, layer.expert_ids, layer.routing_weights, False)
    layer.factors["gate_lora_b"] = parameter.detach().clone()
    expected = run(sizes.operator(kernel=bf16_kernel), layer)["y"]
    assert torch.equal(op.forward_sft(*inputs), expected)
    parameter.data = parameter.data.clone()  # its memory moves, as FSDP does it
    parameter.data.mul_(0.5)
    layer.factors["gate_lora_b"] = parameter.detach()
    expected = run(sizes.operator(kernel=bf16_kernel), layer)["y"]
    assert torch.equal(op.forward_sft(*inputs), expected)


def test_repr_and_properties() -> None:
    sizes = Sizes()
    op = sizes.operator(kernel="portable")
    assert (op.kernel, op.weight_dtype, op.saved_depth) == ("portable", None, 0)
    run(op, make_layer(sizes))
    assert (op.kernel, op.weight_dtype) == ("portable", "bfloat16")
    assert repr(op) == (
        "SftMoe(num_experts=4, top_k=2, hidden_size=32, intermediate_size=24, kernel='portable', "
        "weight_dtype='bfloat16')"
    )
    assert "grad_x=[2, 3]" in repr(amx_sft_moe.Gradients(grad_x=torch.zeros(2, 3)))
