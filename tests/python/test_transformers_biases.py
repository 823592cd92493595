"""The transformers hook on experts with GELU (Gemma 4 among them) and on experts with biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel
from transformers.activations import ACT2FN

from amx_sft_moe.integrations import experts_hook
from models import EXPERTS, add_lora, base_model, batch, loss_and_gradients
from reference import assert_close

OURS = "amx_sft_moe"


def freeze_weights(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    return model


ACTIVATIONS = {
    "gelu": lambda: ACT2FN["gelu"],
    "gelu_python": lambda: ACT2FN["gelu_python"],
    "gelu_pytorch_tanh": lambda: ACT2FN["gelu_pytorch_tanh"],
    "gelu_new": lambda: ACT2FN["gelu_new"],
    "gelu_fast": lambda: ACT2FN["gelu_fast"],
    "silu": lambda: ACT2FN["silu"],
    "nn.GELU": nn.GELU,
    "nn.GELU of tanh": lambda: nn.GELU("tanh"),
    "F.gelu": lambda: nn.functional.gelu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, calls: list[torch.Tensor]) -> None:
    found = []
    for implementation in ("grouped_mm", OURS):
        model = freeze_weights(base_model(implementation))
        for layer in model.model.layers:
            del layer.mlp.experts.act_fn  # a function is no module
            layer.mlp.experts.act_fn = ACTIVATIONS[name]()
        loss, grads = loss_and_gradients(model)
        found.append({"loss": loss} | grads)
    assert len(calls) == 3
    assert_close(found[1], found[0], 1e-5)


def test_activation_may_be_replaced() -> None:
    models = [base_model(implementation) for implementation in ("grouped_mm", OURS)]
    for name in ("silu", "gelu", "gelu_pytorch_tanh"):
        for model in models:
            for layer in model.model.layers:
                layer.mlp.experts.act_fn = ACT2FN[name]
        with torch.no_grad():
            expected, found = (model(**batch()).logits for model in models)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def gemma(implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = Gemma4ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=0.2)
    model.set_experts_implementation(implementation)
    return model


def test_gemma(calls: list[torch.Tensor]) -> None:
    found = []
    for implementation in ("grouped_mm", OURS):
        loss, grads = loss_and_gradients(freeze_weights(gemma(implementation)))
        found.append({"loss": loss} | grads)
    assert len(calls) == 2
    assert_close(found[1], found[0], 1e-4)


def add_biases(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    random = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.has_bias = True
        for name, length in (("gate_up_proj_bias", 48), ("down_proj_bias", 32)):
            bias = (0.3 * torch.randn(6, length, generator=random)).to(dtype)
            experts.register_parameter(name, nn.Parameter(bias))
    return model


@pytest.mark.parametrize("trained", [False, True])
def test_biases(trained: bool, calls: list[torch.Tensor]) -> None:
    found = []
    for implementation in ("grouped_mm", OURS):
        model = freeze_weights(add_biases(base_model(implementation), torch.float32))
        for name, parameter in model.named_parameters():
            if name.endswith("_proj_bias"):
                parameter.requires_grad_(trained)
        loss, grads = loss_and_gradients(model)
        found.append({"loss": loss} | grads)
    assert len(calls) == 3
    assert sum(name.endswith("_proj_bias") for name in found[1]) == (6 if trained else 0)
    assert_close(found[1], found[0], 1e-5)


def test_biases_beside_lora(calls: list[torch.Tensor]) -> None:
    found = []
    for implementation in ("grouped_mm", OURS):
        model = add_lora(add_biases(base_model(implementation), torch.float32))
        loss, grads = loss_and_gradients(model)
        assert any("experts" in name and "lora_A" in name for name in grads)
        found.append({"loss": loss} | grads)
    assert len(calls) == 3
    assert_close(found[1], found[0], 1e-5)


def test_an_adapted_bias_is_not_read_as_stored(calls: list[torch.Tensor]) -> None:
    found = []
    for implementation in ("grouped_mm", OURS):
        model = add_biases(base_model(implementation), torch.float32)
        model = add_lora(model, target_parameters=[*EXPERTS, "mlp.experts.down_proj_bias"])
        loss, grads = loss_and_gradients(model)
        found.append({"loss": loss} | grads)
    assert not calls, "these experts run through the default implementation"
    assert_close(found[1], found[0], 1e-6)


def test_biases_may_be_replaced(calls: list[torch.Tensor]) -> None:
    model = add_biases(base_model(OURS), torch.float32)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        first = model(**batch()).logits
        experts.down_proj_bias.data = experts.down_proj_bias.data.clone()
        assert torch.equal(model(**batch()).logits, first)
        experts.down_proj_bias = nn.Parameter(experts.down_proj_bias + 1)
        second = model(**batch()).logits
        assert not torch.equal(second, first)
        model.set_experts_implementation("grouped_mm")
        torch.testing.assert_close(second, model(**batch()).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 9


def remove(experts: nn.Module) -> None:
    experts.down_proj_bias = None


def half(experts: nn.Module) -> None:
    experts.down_proj_bias.data = experts.down_proj_bias.data.half()


def shorten(experts: nn.Module) -> None:
    experts.gate_up_proj_bias.data = experts.gate_up_proj_bias.data[:, :1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove, "expected a parameter down_proj_bias, got none"),
        (half, "down_proj_bias.*float16"),
        (shorten, r"gate_up_proj_bias \[6, 48\], got \[6, 1\]"),
    ],
)
def test_other_biases_are_left_alone(change: Any, words: str) -> None:
    model = add_biases(base_model(OURS), torch.float32)
    experts = model.model.layers[0].mlp.experts
    change(experts)
    hook = experts_hook._hooks[OURS]
    inputs = torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    with torch.no_grad(), pytest.raises(experts_hook.NotUnderstoodError, match=words):
        hook._layer(experts, *inputs)
