"""Transposed experts that train, and whoever counts on their strides since before the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from families import family_model, token_batch
from reference import one_thread

OURS = "amx_sft_moe"
NAMES = ("gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def gpt_oss(implementation: str) -> nn.Module:
    model = family_model("gpt_oss", implementation, num_hidden_layers=1, layer_types=["full_attention"])
    return model.requires_grad_()


def experts_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp.experts


def is_by_rows(model: nn.Module) -> bool:
    return all(getattr(experts_of(model), name).stride(1) == 1 for name in NAMES)


def losses(model: nn.Module, called: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found = []
    for _ in range(steps):
        loss = called(**token_batch(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def in_parallel(model: nn.Module, **options: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedDataParallel(model, **options)


@pytest.mark.parametrize("first", ["parallel", "module"])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("as_view", [False, True])
def test_first_call_within_data_parallel(
    as_view: bool,
    unused: bool,
    first: str,
    one_process: None,
    calls: list[Tensor],
    warned: Callable[[], list[str]],
) -> None:
    """Its buckets have the strides of before: gradients would be other elements' in the first step, and in all
    where the buckets are not made anew."""
    found = []
    for implementation in (OURS, "eager"):
        model = gpt_oss(implementation)
        parallel = in_parallel(model, gradient_as_bucket_view=as_view, find_unused_parameters=unused)
        if first == "module":
            with torch.no_grad():
                model(**token_batch())
        found.append(losses(model, parallel))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert not calls
    assert warned() == [
        "GptOssExperts: expected a first call with gate_up_proj, which trains and is transposed, before "
        "DistributedDataParallel around it, got one after that; these experts run through transformers' "
        "default implementation"
    ]


@pytest.mark.parametrize("as_view", [False, True])
def test_first_call_before_data_parallel_and_optimizer(
    as_view: bool, one_process: None, calls: list[Tensor], warned: Callable[[], list[str]]
) -> None:
    """As docs/troubleshooting.md says to do it."""
    found = []
    for implementation in (OURS, "eager"):
        model = gpt_oss(implementation)
        with torch.no_grad():
            model(**token_batch())
        parallel = in_parallel(model, gradient_as_bucket_view=as_view, find_unused_parameters=as_view)
        found.append(losses(model, parallel))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert len(calls) == 5
    assert not warned()


def test_flat_gradient_buffers_are_left_to_transformers(
    calls: list[Tensor], warned: Callable[[], list[str]]
) -> None:
    model = gpt_oss(OURS)
    weights = [getattr(experts_of(model), name) for name in NAMES]
    flat = torch.zeros(sum(weight.numel() for weight in weights))
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)
    model(**token_batch()).loss.backward()
    eager = gpt_oss("eager")
    eager(**token_batch()).loss.backward()
    expected = torch.cat([getattr(experts_of(eager), name).grad.flatten() for name in NAMES])
    torch.testing.assert_close(flat, expected)
    assert not calls
    assert not is_by_rows(model)
    assert [message.partition(";")[0] for message in warned()] == [
        "GptOssExperts: expected the gradient of gate_up_proj, which trains and is transposed, in memory of "
        "its own at the first call, got memory that is shared or seen through other tensors"
    ]


def test_a_gradient_stays_the_tensor_that_it_was(calls: list[Tensor]) -> None:
    """Who clips or clears gradients may have asked for them once."""
    model, eager = gpt_oss(OURS), gpt_oss("eager")
    for one in (model, eager):
        for name in NAMES:
            weight = getattr(experts_of(one), name)
            weight.grad = torch.full_like(weight, 0.25)
    held = [getattr(experts_of(model), name).grad for name in NAMES]
    for one in (model, eager):
        one(**token_batch()).loss.backward()
    for name, grad in zip(NAMES, held, strict=True):
        assert getattr(experts_of(model), name).grad is grad
        assert grad.stride() == getattr(experts_of(model), name).stride()
        torch.testing.assert_close(grad, getattr(experts_of(eager), name).grad, rtol=1e-3, atol=1e-5)
    assert len(calls) == 1


def test_a_process_group_alone_is_no_reason(one_process: None, calls: list[Tensor]) -> None:
    model = gpt_oss(OURS)
    losses(model, model, steps=2)
    assert is_by_rows(model)
    assert len(calls) == 2
