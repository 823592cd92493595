"""What the library refuses is named as the caller named it, whatever form weights and factors have: never as
the C++ library names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from amx_sft_moe import ArgumentError, SftMoe
from cases import Sizes
from reference import Layer, make_layer

SIZES = Sizes(tokens=12)
OF_THE_LIBRARY = ("routing.", "grads.", "lora.", "weights.", "biases.", "saved.")


def apart(layer: Layer) -> dict[str, dict[str, torch.Tensor]]:
    """Arguments of set_base and set_lora, gate and up by themselves."""
    weights = {name: getattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj")}
    return {"base": weights | layer.biases, "lora": layer.factors}


def together(layer: Layer) -> dict[str, dict[str, torch.Tensor]]:
    """Arguments of set_base and set_lora, gate and up in one tensor with one A."""
    factors, biases = layer.factors, layer.biases
    base = {
        "gate_up_proj": torch.cat([layer.gate_proj, layer.up_proj], 1),
        "gate_up_bias": torch.cat([biases["gate_bias"], biases["up_bias"]], 1),
    }
    lora = {
        "gate_up_lora_a": factors["gate_lora_a"],
        "gate_up_lora_b": torch.cat([factors["gate_lora_b"], factors["up_lora_b"]], 1),
    }
    return {
        "base": base | {"down_proj": layer.down_proj, "down_bias": biases["down_bias"]},
        "lora": lora | {name: factors[name] for name in ("down_lora_a", "down_lora_b")},
    }


def as_lists(layer: Layer) -> dict[str, dict[str, Any]]:
    """The same as :func:`apart`, base weights as one matrix per expert."""
    found: dict[str, dict[str, Any]] = dict(apart(layer))
    found["base"] = {n: t if n.endswith("_bias") else list(t) for n, t in found["base"].items()}
    return found


def operator(layer: Layer, form: Callable) -> tuple[SftMoe, dict[str, torch.Tensor]]:
    op, tensors = SIZES.operator(), form(layer)
    op.set_base(**tensors["base"])
    op.set_lora(**tensors["lora"])
    return op, tensors["base"] | tensors["lora"]


def refusal(op: SftMoe, layer: Layer, **arguments: object) -> str:
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    with pytest.raises(ArgumentError) as caught:
        op.backward(layer.grad_y, **arguments)
    op.clear()
    assert not any(name in str(caught.value) for name in OF_THE_LIBRARY), caught.value
    return str(caught.value)


@pytest.mark.parametrize("form", [apart, together])
def test_parameters_in_place_of_their_gradients(form: Callable) -> None:
    layer = make_layer(SIZES, biases=True)
    op, tensors = operator(layer, form)
    for name, parameter in tensors.items():
        words = refusal(op, layer, out={name: parameter})
        assert words == f"out.{name}: expected memory of its own, got memory that {name} has too"


@pytest.mark.parametrize("form", [apart, together])
def test_gradients_of_one_memory(form: Callable) -> None:
    layer = make_layer(SIZES, biases=True)
    op, tensors = operator(layer, form)
    for name, parameter in tensors.items():
        taken = torch.zeros(parameter.numel() + layer.x.numel(), dtype=torch.bfloat16)
        out = {name: taken[: parameter.numel()].view(parameter.shape)}
        words = refusal(op, layer, out=out | {"grad_x": taken[: layer.x.numel()].view(layer.x.shape)})
        assert words == f"out.{name}: expected memory of its own, got memory that out.grad_x has too"


def test_results_of_a_forward() -> None:
    layer = make_layer(SIZES)
    op, tensors = operator(layer, apart)
    taken = torch.full([layer.x.numel()], 0.5, dtype=torch.bfloat16)
    routing = taken[: layer.routing_weights.numel()].view(layer.routing_weights.shape)
    for name, memory in {"down_proj": tensors["down_proj"], "routing_weights": taken}.items():
        y = memory.view(-1)[: layer.x.numel()].view(layer.x.shape)
        with pytest.raises(ArgumentError) as caught:
            op.forward_sft(layer.x, layer.expert_ids, routing, out=y)
        assert str(caught.value) == f"out: expected memory of its own, got memory that {name} has too"


def test_more_tokens_than_the_operator_takes() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(max_tokens=11)
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
    with pytest.raises(ArgumentError, match=r"^x.shape\[0\]: expected at most max_tokens = 11, got 12$"):
        op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)


def test_scale() -> None:
    layer = make_layer(SIZES)
    op, _ = operator(layer, apart)
    assert refusal(op, layer, scale=float("inf")).startswith("scale: expected a finite number, got inf")


@pytest.mark.parametrize("form", [apart, together, as_lists])
def test_base_weights_whose_rows_overlap(form: Callable) -> None:
    layer = make_layer(SIZES, biases=True)
    base = form(layer)["base"]
    op, good = SIZES.operator(), dict(base)
    for name, weight in base.items():
        if name.endswith("_bias"):
            continue
        rows = (
            weight[0][:1].expand(weight[0].shape)
            if isinstance(weight, list)
            else weight[:, :1].expand(weight.shape)
        )
        bad = [rows, *weight[1:]] if isinstance(weight, list) else rows
        where = re.escape(f"{name}[0]" if isinstance(weight, list) else name)
        cols = rows.shape[-1]
        with pytest.raises(
            ArgumentError, match=rf"^{where}: expected rows at least {cols} elements apart, got stride 0$"
        ):
            op.set_base(**(base | {name: bad}))
    op.set_base(**good)


def test_base_weights_upside_down() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    base = {name: weight.numpy() for name, weight in apart(layer)["base"].items()}
    with pytest.raises(
        ArgumentError, match=r"^down_proj: expected rows at least \d+ elements apart, got stride -"
    ):
        SIZES.operator().set_base(**(base | {"down_proj": base["down_proj"][:, ::-1]}))
