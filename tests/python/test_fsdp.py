"""FSDP of one process around layers whose experts run in the operator: gradients as with eager experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from families import family_model
from models import base_model, batch
from reference import assert_close


def gpt_oss(implementation: str) -> nn.Module:
    """Its experts are transposed and have biases."""
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "vocab_size": 64}
    return family_model("gpt_oss", implementation, **layers).requires_grad_()


def gradients(model: nn.Module, original_parameters: bool, reentrant: bool | None) -> dict[str, torch.Tensor]:
    model.train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process there is nothing to shard
        sharded = FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=original_parameters,
            auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        )
    sharded(**batch(), use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in sharded.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("original_parameters", [False, True])
def test_gradients(
    original_parameters: bool, reentrant: bool | None, one_process: None, calls: list[torch.Tensor]
) -> None:
    found = gradients(base_model("amx_sft_moe"), original_parameters, reentrant)
    assert len(calls) == (3 if reentrant is None else 6), "some layers ran elsewhere"
    expected = gradients(base_model("eager"), original_parameters, reentrant)
    assert found
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_biases_that_are_no_parameters_are_left_to_transformers(
    reentrant: bool | None, one_process: None, calls: list[torch.Tensor]
) -> None:
    found = gradients(gpt_oss("amx_sft_moe"), True, reentrant)
    assert not calls
    assert_close(found, gradients(gpt_oss("eager"), True, reentrant), 1e-5)


def losses_of_steps(model: nn.Module, sharded: bool) -> list[float]:
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model.train()(**batch(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [base_model, gpt_oss], ids=["qwen3", "gpt_oss"])
def test_steps_of_the_second_kind(
    make: Callable[[str], nn.Module], one_process: None, calls: list[torch.Tensor]
) -> None:
    """Whose parameters are views of what each layer's call gathers anew; gpt-oss's would be laid out apart from
    that, and are left to transformers."""
    found = losses_of_steps(make("amx_sft_moe").requires_grad_(), sharded=True)
    assert len(calls) == (9 if make is base_model else 0)
    expected = losses_of_steps(make("eager").requires_grad_(), sharded=False)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0]
