"""Fully trained experts of a tiny Qwen3-MoE through the transformers hook, beside the eager implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amx_sft_moe
from amx_sft_moe.integrations import experts_hook
from cases import kernels
from models import add_lora, base_model, batch, loss_and_gradients
from reference import assert_close, relative_error

OURS = "amx_sft_moe"
BOTH = ("eager", OURS)


def train_only(model: nn.Module, *parts: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    return model


@pytest.mark.parametrize("kernel", kernels("float32"))
def test_every_gradient(kernel: str, calls: list[torch.Tensor]) -> None:
    amx_sft_moe.register(f"trained_{kernel}", kernel=kernel)
    found = {}
    for implementation in ("eager", f"trained_{kernel}"):
        loss, grads = loss_and_gradients(base_model(implementation))
        found[implementation] = {"loss": loss} | grads
    assert len(calls) == 3
    eager, ours = found.values()
    assert sum(".experts." in name for name in ours) == 6
    assert_close(ours, eager, 1e-5)


def test_bf16_is_as_near_to_the_truth_as_eager(calls: list[torch.Tensor]) -> None:
    changes = {"num_experts_per_tok": 6}  # all experts take part: rounding then decides about no route
    found = {}
    for implementation in BOTH:
        loss, grads = loss_and_gradients(base_model(implementation, torch.bfloat16, **changes))
        found[implementation] = {"loss": loss} | grads
    exact_loss, grads = loss_and_gradients(base_model("eager", torch.bfloat16, **changes).double())
    exact = {"loss": exact_loss} | grads
    assert len(calls) == 3
    assert found[OURS].keys() == exact.keys()
    for name, value in exact.items():
        ours, eager = (relative_error(found[kind][name], value) for kind in (OURS, "eager"))
        assert ours <= 1.5 * eager + 1e-3, name


def losses(model: nn.Module, steps: int = 6, batches: int = 1) -> list[float]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    found = []
    for step in range(steps):
        for part in range(batches):
            loss = model(**batch(seed=10 * step + part)).loss / batches
            loss.backward()
            found.append(loss.item())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("parts", "batches"),
    [(("",), 1), (("experts",), 2), (("down_proj",), 1)],
    ids=["all", "accumulate", "down"],
)
def test_steps_of_adamw(parts: tuple[str, ...], batches: int, calls: list[torch.Tensor]) -> None:
    eager, ours = (losses(train_only(base_model(kind), *parts), batches=batches) for kind in BOTH)
    assert len(calls) == 3 * 6 * batches
    assert ours == pytest.approx(eager, abs=1e-4)
    assert len(set(ours)) == len(ours)


def test_only_down_is_trained() -> None:
    model = train_only(base_model(OURS), "experts.down_proj")
    _, grads = loss_and_gradients(model)
    assert sorted(grads) == [f"model.layers.{i}.mlp.experts.down_proj" for i in range(3)]
    _, eager = loss_and_gradients(train_only(base_model("eager"), "experts.down_proj"))
    assert_close(grads, eager, 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: list[torch.Tensor]) -> None:
    found = []
    for checkpointing in (False, True):
        model = base_model(OURS).train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss, grads = loss_and_gradients(model)
        found.append({"loss": loss} | grads)
    assert len(calls) == 3 + 6
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("parts", [("lora_", ".experts."), ("lora_", "gate_up_proj")], ids=["all", "gate_up"])
def test_lora_and_base_at_once(parts: tuple[str, ...], calls: list[torch.Tensor]) -> None:
    found = []
    for implementation in BOTH:
        model = train_only(add_lora(base_model(implementation)), *parts)
        loss, grads = loss_and_gradients(model)
        found.append({"loss": loss} | grads)
    assert len(calls) == 3
    assert any("lora_" in name for name in found[1])
    assert any("lora_" not in name and ".experts." in name for name in found[1])
    assert_close(found[1], found[0], 1e-5)


def test_nothing_is_said_and_nothing_is_cut(caplog: pytest.LogCaptureFixture, calls: list[Any]) -> None:
    for hook in experts_hook._hooks.values():
        hook._warned.clear()
    model = base_model(OURS)
    loss = model(**batch()).loss
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert not caplog.records
    assert len(calls) == 3
