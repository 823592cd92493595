"""Biases of gate, up and down, and all activations, against float64 autograd: layouts, results, misuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import amx_sft_moe
from amx_sft_moe import ArgumentError, StateError
from cases import SHAPES, Sizes
from reference import (
    BIASES,
    FACTORS,
    Layer,
    assert_close,
    gelu_glu,
    gelu_tanh_glu,
    gpt_oss,
    gradients,
    make_layer,
    relative_error,
    run,
    silu_glu,
)

BF16, FP32 = 2e-2, 2e-5
SIZES = Sizes(tokens=12)
ACTIVATIONS = {
    "silu": silu_glu,
    "gelu": gelu_glu,
    "gelu_tanh": gelu_tanh_glu,
    "gelu_pytorch_tanh": gelu_tanh_glu,
    "gpt_oss": gpt_oss,
}


def inputs(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    return layer.x, layer.expert_ids, layer.routing_weights


def set_all(op: amx_sft_moe.SftMoe, layer: Layer, **biases: Any) -> amx_sft_moe.SftMoe:
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj, **biases)
    op.set_lora(**layer.factors)
    return op


def assert_close_beside_a_clamp(
    found: dict[str, Tensor], exact: dict[str, Tensor], eager: dict[str, Tensor]
) -> None:
    """bf16 rounds values over the bound, on whose sides gradients differ: torch's eager bf16 sets the measure
    there."""
    assert set(found) == set(exact)
    for name, value in exact.items():
        tolerance = max(BF16, 1.2 * relative_error(eager[name], value))
        assert relative_error(found[name], value) <= tolerance, name


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_bf16_matches_float64(bf16_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes, biases=True)
    found = run(sizes.operator(kernel=bf16_kernel), layer)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert_close(found, gradients(layer.to(torch.float64)), BF16)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_fp32_matches_float64(fp32_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes, dtype=torch.float32, biases=True)
    assert_close(run(sizes.operator(kernel=fp32_kernel), layer), gradients(layer.to(torch.float64)), FP32)


@pytest.mark.emulated
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biases", [False, True])
def test_activations_in_bf16(bf16_kernel: str, activation: str, biases: bool) -> None:
    sizes = Sizes(tokens=24)
    layer = make_layer(sizes, biases=biases)
    layer.x = layer.x * 4  # where the activations bend
    found = run(sizes.operator(kernel=bf16_kernel, activation=activation), layer)
    expected = gradients(layer.to(torch.float64), activation=ACTIVATIONS[activation])
    if activation == "gpt_oss":
        assert_close_beside_a_clamp(found, expected, gradients(layer, activation=gpt_oss))
    else:
        assert_close(found, expected, BF16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_in_fp32(fp32_kernel: str, activation: str) -> None:
    sizes = Sizes(tokens=24)
    layer = make_layer(sizes, dtype=torch.float32, biases=True)
    layer.x = layer.x * 4
    found = run(sizes.operator(kernel=fp32_kernel, activation=activation), layer)
    assert_close(found, gradients(layer.to(torch.float64), activation=ACTIVATIONS[activation]), FP32)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_far_out_stays_finite(fp32_kernel: str, activation: str) -> None:
    sizes = Sizes(tokens=8)
    layer = make_layer(sizes, dtype=torch.float32)
    layer.x = layer.x * 1e6
    found = run(sizes.operator(kernel=fp32_kernel, activation=activation), layer)
    assert_close(found, gradients(layer.to(torch.float64), activation=ACTIVATIONS[activation]), 1e-4)


@pytest.mark.emulated
@pytest.mark.parametrize("given", [("gate_bias",), ("up_bias",), ("down_bias",), ("up_bias", "down_bias")])
def test_some_biases(bf16_kernel: str, given: tuple[str, ...]) -> None:
    layer = make_layer(SIZES, biases=True)
    layer.biases = {name: layer.biases[name] for name in given}
    found = run(SIZES.operator(kernel=bf16_kernel), layer)
    assert set(BIASES) & set(found) == set(given), "absent biases have no gradient"
    assert_close(found, gradients(layer.to(torch.float64)), BF16)


@pytest.mark.emulated
def test_gpt_oss(bf16_kernel: str) -> None:
    """Its clamped activation, its interleaved bias as two views, fp32 biases on bf16 weights, and one A that
    gate and up share."""
    sizes = Sizes(experts=5, hidden=67, intermediate=43, ranks=(7, 7, 7), tokens=30)
    layer = make_layer(sizes, biases=True)
    layer.factors["up_lora_a"] = layer.factors["gate_lora_a"]
    layer.biases = {name: 4 * bias.float() for name, bias in layer.biases.items()}
    interleaved = torch.stack([layer.biases["gate_bias"], layer.biases["up_bias"]], dim=2).flatten(1)
    op = sizes.operator(kernel=bf16_kernel, activation={"limit": 2.0, "alpha": 1.5})
    op.set_base(
        layer.gate_proj,
        layer.up_proj,
        layer.down_proj,
        gate_bias=interleaved[:, ::2],
        up_bias=interleaved[:, 1::2],
        down_bias=layer.biases["down_bias"],
    )
    b = torch.cat([layer.factors["gate_lora_b"], layer.factors["up_lora_b"]], 1)
    op.set_lora(
        gate_up_lora_a=layer.factors["gate_lora_a"],
        gate_up_lora_b=b,
        down_lora_a=layer.factors["down_lora_a"],
        down_lora_b=layer.factors["down_lora_b"],
    )
    y = op.forward_sft(*inputs(layer))
    grads = torch.full_like(interleaved, torch.nan)
    out = {"gate_bias": grads[:, ::2], "up_bias": grads[:, 1::2]}
    found = {"y": y} | op.backward(layer.grad_y, out=out, bias_gradients=True).as_dict()
    assert found["down_bias"].dtype == torch.float32
    references = []
    for dtype in (torch.float64, torch.bfloat16):
        one = gradients(layer.to(dtype), activation=lambda g, u: gpt_oss(g, u, 2.0, 1.5))
        one["gate_up_lora_a"] = one.pop("gate_lora_a") + one.pop("up_lora_a")
        one["gate_up_lora_b"] = torch.cat([one.pop("gate_lora_b"), one.pop("up_lora_b")], 1)
        references.append(one)
    assert_close_beside_a_clamp(found, *references)


@pytest.mark.parametrize("fused_weights", [False, True])
def test_gate_up_bias_goes_with_either_form_of_the_weights(bf16_kernel: str, fused_weights: bool) -> None:
    layer = make_layer(SIZES, biases=True)
    expected = run(SIZES.operator(kernel=bf16_kernel), layer)
    op = SIZES.operator(kernel=bf16_kernel)
    if fused_weights:
        weights = {"gate_up_proj": torch.cat([layer.gate_proj, layer.up_proj], 1)}
    else:
        weights = {"gate_proj": layer.gate_proj, "up_proj": layer.up_proj}
    op.set_base(
        **weights,
        down_proj=layer.down_proj,
        gate_up_bias=torch.cat([layer.biases["gate_bias"], layer.biases["up_bias"]], 1),
        down_bias=layer.biases["down_bias"],
    )
    op.set_lora(**layer.factors)
    y = op.forward_sft(*inputs(layer))
    found = {"y": y} | op.backward(layer.grad_y, bias_gradients=True).as_dict()
    expected["gate_up_bias"] = torch.cat([expected.pop("gate_bias"), expected.pop("up_bias")], 1)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_any_strides_and_dtypes(bf16_kernel: str) -> None:
    layer = make_layer(SIZES, biases=True)
    expected = run(SIZES.operator(kernel=bf16_kernel), layer)
    gate, up, down = layer.biases.values()
    given = {
        "gate_bias": gate.t().contiguous().t().float(),
        "up_bias": torch.nn.functional.pad(up[:, :, None], (3, 2), value=torch.nan)[:, :, 3],
        "down_bias": down.float().flip(1).numpy()[:, ::-1],
    }
    assert given["down_bias"].strides[1] < 0
    op = set_all(SIZES.operator(kernel=bf16_kernel), layer, **given)
    assert torch.equal(op.forward_sft(*inputs(layer)), expected["y"])
    found = op.backward(layer.grad_y, bias_gradients=True)
    assert found.gate_bias.dtype == torch.float32
    assert found.down_bias.dtype == torch.float32
    for name, tensor in found.as_dict().items():
        assert torch.equal(tensor.bfloat16(), expected[name]), name
    one = torch.full((1, 24), 0.5).expand(4, 24)  # all experts read one row
    alike = {"gate_bias": one, "up_bias": torch.zeros(()).expand(4, 24), "down_bias": down}
    y = set_all(op, layer, **alike).forward_sft(*inputs(layer), False)
    layer.biases = {name: bias.contiguous() for name, bias in alike.items()}
    assert torch.equal(y, run(op, layer)["y"])


def test_threads_do_not_change_bits(bf16_kernel: str) -> None:
    sizes = Sizes(experts=7, hidden=96, intermediate=80, ranks=(8, 8, 8), tokens=64)
    layer = make_layer(sizes, biases=True)
    one = run(sizes.operator(kernel=bf16_kernel, num_threads=1, activation="gelu"), layer)
    more = run(sizes.operator(kernel=bf16_kernel, num_threads=3, activation="gelu"), layer)
    assert all(torch.equal(more[name], one[name]) for name in one)


def test_central_differences(fp32_kernel: str) -> None:
    sizes = Sizes(experts=3, top_k=2, hidden=6, intermediate=5, ranks=(2, 2, 2), tokens=4)
    layer = make_layer(sizes, dtype=torch.float32, biases=True)
    op = sizes.operator(kernel=fp32_kernel, activation="gelu_tanh")
    grads = run(op, layer)
    step = 1e-2
    leaves = {"grad_x": layer.x, "grad_routing_weights": layer.routing_weights, **layer.biases}
    for name, leaf in leaves.items():
        flat, analytic = leaf.view(-1), grads[name].view(-1)
        for i in range(len(flat)):
            value = flat[i].item()
            losses = []
            for moved in (value + step, value - step):
                flat[i] = moved  # biases are read anew in each call
                y = op.forward_sft(*inputs(layer), False)
                losses.append((y.double() * layer.grad_y.double()).sum().item())
            flat[i] = value
            assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(analytic[i].item(), rel=2e-2, abs=2e-3)


@pytest.mark.emulated
def test_gradients_only_where_asked_for(bf16_kernel: str) -> None:
    layer = make_layer(SIZES, biases=True)
    expected = run(SIZES.operator(kernel=bf16_kernel), layer)
    op = set_all(SIZES.operator(kernel=bf16_kernel), layer, **layer.biases)
    everything = {"bias_gradients": True}
    for options, names in (
        ({}, set()),
        (everything, set(BIASES)),
        (everything | {"skip": ["up_bias", "grad_x", "down_lora_b"]}, {"gate_bias", "down_bias"}),
        ({"out": {"up_bias": torch.full((4, 24), torch.nan)}}, {"up_bias"}),
        ({"skip": [*FACTORS, "grad_x", "grad_routing_weights"]} | everything, set(BIASES)),
    ):
        op.forward_sft(*inputs(layer))
        found = op.backward(layer.grad_y, **options).as_dict()
        assert set(found) & set(BIASES) == names
        assert not set(found) & set(options.get("skip", ()))
        assert all(torch.equal(tensor.bfloat16(), expected[name]) for name, tensor in found.items())
        assert all(found[name] is tensor for name, tensor in options.get("out", {}).items())


def test_accumulate_and_scale(fp32_kernel: str) -> None:
    layer = make_layer(SIZES, dtype=torch.float32, biases=True)
    op = SIZES.operator(kernel=fp32_kernel)
    once = run(op, layer)
    out = {name: torch.ones_like(layer.factors[name]) for name in FACTORS}
    out |= {name: torch.ones_like(layer.biases[name]) for name in BIASES}
    for scale in (0.5, -2.0):
        op.forward_sft(*inputs(layer))
        found = op.backward(layer.grad_y, accumulate=True, scale=scale, out=out)
        assert torch.equal(found.grad_x, once["grad_x"])
    for name, tensor in out.items():
        assert relative_error(tensor, 1 - 1.5 * once[name].double()) < 1e-6, name
    op.forward_sft(*inputs(layer))
    op.backward(layer.grad_y, scale=3.0, out=out)
    for name, tensor in out.items():
        assert relative_error(tensor, 3 * once[name].double()) < 1e-6, name


def test_idle_experts(bf16_kernel: str) -> None:
    sizes = Sizes(experts=6, top_k=1, tokens=3)
    layer = make_layer(sizes, biases=True)
    op = set_all(sizes.operator(kernel=bf16_kernel), layer, **layer.biases)
    idle = [e for e in range(6) if e not in layer.expert_ids]
    out = {name: torch.full_like(layer.biases[name], torch.nan) for name in BIASES}
    for ids in (layer.expert_ids, torch.full_like(layer.expert_ids, -1)):
        op.forward_sft(layer.x, ids, layer.routing_weights)
        op.backward(layer.grad_y, out=out)
        assert all(tensor[idle].eq(0).all() for tensor in out.values()), "exact zeros on overwrite"
    assert not any(tensor.any() for tensor in out.values())
    out = {name: torch.full_like(tensor, 5.0) for name, tensor in out.items()}
    op.forward_sft(*inputs(layer))
    op.backward(layer.grad_y, accumulate=True, out=out, skip=FACTORS)
    assert all(tensor[idle].eq(5).all() for tensor in out.values())


def test_read_anew_kept_alive_and_removed() -> None:
    layer = make_layer(SIZES, biases=True)
    plain = make_layer(SIZES)
    without = run(SIZES.operator(), plain)["y"]
    expected = run(SIZES.operator(), layer)["y"]
    parameter = torch.nn.Parameter(layer.biases["down_bias"].clone())
    alive = weakref.ref(parameter)
    op = set_all(SIZES.operator(), layer, **(layer.biases | {"down_bias": parameter}))
    assert torch.equal(op.forward_sft(*inputs(layer), False), expected)
    with torch.no_grad():
        parameter.zero_()
    assert not torch.equal(op.forward_sft(*inputs(layer), False), expected)
    parameter.data = layer.biases["down_bias"].clone()  # its memory moves
    assert torch.equal(op.forward_sft(*inputs(layer), False), expected)
    del parameter
    gc.collect()
    assert alive() is not None
    assert torch.equal(op.forward_sft(*inputs(layer), False), expected)
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
    gc.collect()
    assert alive() is None
    assert torch.equal(op.forward_sft(*inputs(layer), False), without)


WIDE = torch.zeros(4, 48)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"gate_bias": torch.zeros(4, 23)}, ArgumentError, ["gate_bias", "[4, 24]", "[4, 23]"]),
        ({"up_bias": torch.zeros(24)}, ArgumentError, ["up_bias", "[4, 24]", "[24]"]),
        ({"down_bias": torch.zeros(4, 24)}, ArgumentError, ["down_bias", "[4, 32]", "[4, 24]"]),
        ({"down_bias": torch.zeros(3, 32)}, ArgumentError, ["down_bias", "[4, 32]", "[3, 32]"]),
        ({"gate_bias": WIDE.half()[:, :24]}, TypeError, ["gate_bias", "bfloat16 or float32", "float16"]),
        (
            {"up_bias": [WIDE[0]] * 4},
            TypeError,
            ["up_bias", "one tensor [4, 24]", "list of 4", "stack"],
        ),
        ({"down_bias": 0.5}, TypeError, ["down_bias", "tensor", "float"]),
        ({"down_bias": torch.zeros(4, 32, device="meta")}, ArgumentError, ["down_bias", "cpu", "meta"]),
        ({"gate_up_bias": WIDE}, TypeError, ["gate_up_bias", "gate_bias", "both"]),
        ({"gate_up_bias": WIDE, "gate_bias": None}, TypeError, ["gate_up_bias", "up_bias", "both"]),
        (
            {"gate_up_bias": WIDE[:, 1:], "gate_bias": None, "up_bias": None},
            ArgumentError,
            ["gate_up_bias", "[4, 48]", "[4, 47]"],
        ),
    ],
)
def test_misuse_of_set_base(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    layer = make_layer(SIZES, biases=True)
    op = SIZES.operator()
    expected = run(op, layer)["y"]
    with pytest.raises(error) as caught:
        op.set_base(layer.up_proj, layer.gate_proj, layer.down_proj, **(layer.biases | changes))
    assert all(word in str(caught.value) for word in words), caught.value
    y = op.forward_sft(*inputs(layer), False)
    assert torch.equal(y, expected), "the refused call left something behind"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"out": {"gate_bias": torch.zeros(4, 23)}}, ArgumentError, ["out.gate_bias", "[4, 24]", "[4, 23]"]),
        ({"out": {"down_bias": torch.zeros(4, 32).half()}}, TypeError, ["out.down_bias", "float16"]),
        (
            {"out": {"up_bias": WIDE[:1, :24].expand(4, 24)}},
            ArgumentError,
            ["out.up_bias", "overlap", "(0, 1)"],
        ),
        (
            {"out": {"gate_bias": torch.zeros(100).as_strided((4, 24), (2, 2))}},
            ArgumentError,
            ["out.gate_bias", "overlap", "(2, 2)", "[4, 24]"],
        ),
        ({"out": {"gate_up_bias": WIDE}}, ArgumentError, ["out", "gate_up_bias"]),
        ({"accumulate": True, "skip": FACTORS, "bias_gradients": True}, ArgumentError, ["gate_bias", "none"]),
        ({"skip": ["gate_biases"]}, ArgumentError, ["skip", "gate_bias", "gate_biases"]),
    ],
)
def test_misuse_of_backward(arguments: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    layer = make_layer(SIZES, biases=True)
    op = SIZES.operator()
    expected = run(op, layer)
    op.forward_sft(*inputs(layer))
    with pytest.raises(error) as caught:
        op.backward(layer.grad_y, **arguments)
    assert all(word in str(caught.value) for word in words), caught.value
    assert op.saved_depth == 1, "a refused backward keeps its entry"
    found = op.backward(layer.grad_y, bias_gradients=True).as_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_absent_biases_have_no_gradient() -> None:
    layer = make_layer(SIZES)
    op = set_all(SIZES.operator(), layer)
    op.forward_sft(*inputs(layer))
    with pytest.raises(ArgumentError, match=r"out.*gate_bias"):
        op.backward(layer.grad_y, out={"gate_bias": torch.zeros(4, 24)})
    found = op.backward(layer.grad_y, bias_gradients=True)
    assert not set(found.as_dict()) & set(BIASES)
    with pytest.raises(StateError):
        op.backward(layer.grad_y)
