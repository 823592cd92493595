"""Every family that the plug-in promises, against transformers' eager experts and PEFT's own W + BA."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from families import FAMILIES, family_model, token_batch, train, with_lora
from models import loss_and_gradients
from reference import assert_close, largest, one_thread

OURS = "amx_sft_moe"
STEPS = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


@cache
def exact_losses(family: str) -> list[float]:
    return train(with_lora(family_model(family, "eager")), STEPS)


def largest_apart(found: list[float], expected: list[float]) -> float:
    return largest(abs(a - b) for a, b in zip(found, expected, strict=True))


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
    assert largest_apart(found, expected) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_training_in_bf16(family: str, calls: list[torch.Tensor]) -> None:
    exact = exact_losses(family)
    eager, ours = (
        train(with_lora(family_model(family, implementation, torch.bfloat16)), STEPS)
        for implementation in ("eager", OURS)
    )
    assert all(x.dtype == torch.bfloat16 for x in calls)
    assert largest_apart(ours, exact) < 2 * largest_apart(eager, exact) + 0.02


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


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made since it was entered that are alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._storages.values()))
        return out


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_checkpointing_frees_activations(family: str) -> None:
    types = {"layer_types": ["full_attention"] * 6} if family == "gpt_oss" else {}
    model = with_lora(family_model(family, OURS, num_hidden_layers=6, **types), rank=1).train()
    model.config.use_cache = False
    model.enable_input_require_grads()
    batch = token_batch(rows=1, length=60)
    model(**batch).loss.backward()  # gradients exist from here on

    def most_alive() -> int:
        with LiveBytes() as live:
            model(**batch).loss.backward()
        return live.most

    without = most_alive()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert most_alive() < 0.5 * without, f"reentrant: {reentrant}"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("x", [torch.bfloat16, torch.float32])
def test_mixed_dtypes(family: str, weights: torch.dtype, x: torch.dtype, calls: list[torch.Tensor]) -> None:
    """As under autocast, and where models were cast in part: y has the dtype of x, each gradient that of what
    it is of."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 32, generator=random)
    ids = torch.rand(11, 5, generator=random).argsort(1)[:, :2]
    routing = torch.rand(11, 2, generator=random)
    found = []
    for implementation, dtypes in (("eager", (torch.float32,) * 2), (OURS, (weights, x))):
        model = family_model(family, implementation, dtypes[0])
        experts = next(module for module in model.modules() if hasattr(module, "_apply_gate"))
        leaves = [hidden.to(dtypes[1]).requires_grad_(), routing.to(dtypes[1]).requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=implementation == OURS):
            y = experts(leaves[0], ids, leaves[1])
        assert y.dtype == dtypes[1]
        grads = torch.autograd.grad(y.float().square().sum(), leaves)
        assert all(grad.dtype == dtypes[1] for grad in grads)
        found.append({"y": y.detach(), "x": grads[0], "routing": grads[1]})
    assert len(calls) == 1
    assert_close(found[1], found[0], 1e-5 if weights == x == torch.float32 else 3e-2)


def test_float16_is_left_alone(calls: list[torch.Tensor]) -> None:
    model = family_model("gpt_oss", OURS, torch.float16)
    with torch.no_grad():
        assert torch.isfinite(model(**token_batch()).loss)
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
def test_full_training(family: str, calls: list[torch.Tensor]) -> None:
    """Base weights of the experts, and biases where there are some, train as they do in eager mode."""
    found, losses = [], []
    for implementation in ("eager", OURS):
        model = family_model(family, implementation).requires_grad_()
        loss, grads = loss_and_gradients(model, **token_batch())
        model.zero_grad()
        found.append({"loss": loss} | grads)
        losses.append(train(model, STEPS, lr=1e-3))
    assert len(calls) == (1 + STEPS) * layers_with_experts(model)
    of_experts = [name for name in found[1] if name.endswith(("gate_up_proj", "down_proj"))]
    assert len([name for name in of_experts if "shared" not in name]) >= 2 * layers_with_experts(model)
    assert_close(found[1], found[0], 1e-5)
    assert largest_apart(*losses) < 1e-4
