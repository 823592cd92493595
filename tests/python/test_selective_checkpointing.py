"""Selective activation checkpointing counts operations: what a layer does once must not be among them."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from families import family_model, token_batch, with_lora
from reference import assert_close, one_thread

_aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def backward_elsewhere(loss: Tensor) -> None:
    """In another thread, as that of a device's gradients is: with scratch memory of its own."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def gradients(model: nn.Module, kept: Any, elsewhere: bool) -> dict[str, Tensor]:
    context = functools.partial(create_selective_checkpoint_contexts, [kept])
    model.train().gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    loss = model(**token_batch(), use_cache=False).loss
    if elsewhere:
        backward_elsewhere(loss)
    else:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("family", "kept"),
    [
        # Shared experts multiply after the routed ones' gate was looked at.
        ("deepseek_v3", _aten.mul.Tensor),
        # Biases and factors are split after the weights were laid out and split.
        ("gpt_oss", _aten.unbind.int),
        ("qwen3_moe", _aten.mm.default),
    ],
)
def test_gradients(family: str, kept: Any, lora: bool, elsewhere: bool, calls: list[Tensor]) -> None:
    found = []
    for implementation in ("amx_sft_moe", "eager"):
        model = family_model(family, implementation)
        found.append(gradients(with_lora(model) if lora else model, kept, elsewhere))
    assert len(calls) == (2 if family == "deepseek_v3" else 4)  # a layer twice, and the first one is dense
    assert_close(*found, 1e-4)
