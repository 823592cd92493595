"""Every family that the plug-in promises, against transformers' eager experts and PEFT's own W + BA."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES, family_model, token_batch, train, with_lora
from models import loss_and_gradients
from reference import assert_close, one_thread

OURS = "amx_sft_moe"
STEPS = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


@cache
def exact_losses(family: str) -> list[float]:
    return train(with_lora(family_model(family, "eager")), STEPS)


def layers_with_experts(model: torch.nn.Module) -> int:
    return sum(hasattr(module, "_apply_gate") for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient(family: str, calls: list[torch.Tensor]) -> None:
    found = {}
    for implementation in ("eager", OURS):
        model = with_lora(family_model(family, implementation))
        loss, grads = loss_and_gradients(model, **token_batch())
        found[implementation] = {"loss": loss} | grads
    assert len(calls) == layers_with_experts(model) > 0
    of_experts = [name for name in found[OURS] if ".experts." in name and "lora_" in name]
    assert len(of_experts) == 4 * len(calls)
    assert all(found[OURS][name].norm() > 0 for name in of_experts)
    assert_close(found[OURS], found["eager"], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_training(family: str, calls: list[torch.Tensor]) -> None:
    expected = exact_losses(family)
    model = with_lora(family_model(family, OURS))
    found = train(model, STEPS)
    assert len(calls) == STEPS * layers_with_experts(model)
    assert expected[-1] < expected[0] - 0.05, "it learns"
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_training_in_bf16(family: str, calls: list[torch.Tensor]) -> None:
    exact = exact_losses(family)
    eager, ours = (
        train(with_lora(family_model(family, implementation, torch.bfloat16)), STEPS)
        for implementation in ("eager", OURS)
    )
    assert all(x.dtype == torch.bfloat16 for x in calls)
    noise = max(abs(a - b) for a, b in zip(eager, exact, strict=True))
    error = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    assert error < 2 * noise + 0.02


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing(family: str, reentrant: bool, calls: list[torch.Tensor]) -> None:
    found = []
    for checkpointing in (False, True):
        model = with_lora(family_model(family, OURS)).train()
        model.config.use_cache = False
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss, grads = loss_and_gradients(model, **token_batch())
        found.append({"loss": loss} | grads)
    assert len(calls) == 3 * layers_with_experts(model)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_saves_nothing(family: str, calls: list[torch.Tensor]) -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise AssertionError("generate() saves activations")

    texts = []
    for implementation in ("eager", OURS):
        model = with_lora(family_model(family, implementation)).eval()
        ids = token_batch()["input_ids"][:, :4]
        with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
            texts.append(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
    assert len(calls) == 4 * layers_with_experts(model)
    assert torch.equal(texts[0], texts[1])
