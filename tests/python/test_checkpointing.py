"""Gradient checkpointing of both kinds: the same gradients, and activations that really die."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amx_sft_moe.nn import SftMoeExperts
from cases import Sizes
from reference import make_layer

LAYERS = 4
SIZES = Sizes(tokens=20)


class Model(nn.Module):
    """A chain of experts with a norm between them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.layers = nn.ModuleList()
        self.routing: list[tuple[Tensor, Tensor]] = []
        for seed in range(LAYERS):
            layer = make_layer(SIZES, seed, dtype=torch.float32)
            experts = SftMoeExperts(
                2,
                gate_proj=layer.gate_proj,
                up_proj=layer.up_proj,
                down_proj=layer.down_proj,
                lora_rank=4,
            )
            for name, factor in layer.factors.items():
                getattr(experts, name).data.copy_(factor)
            self.layers.append(experts)
            self.routing.append((layer.expert_ids, layer.routing_weights))

    def forward(self, x: Tensor) -> Tensor:
        for experts, routing in zip(self.layers, self.routing, strict=True):
            normed = nn.functional.layer_norm(x, x.shape[-1:])
            if self.mode == "none":
                x = x + experts(normed, *routing)
            else:
                x = x + checkpoint(experts, normed, *routing, use_reentrant=self.mode == "reentrant")
        return x


class SavedActivations(TorchDispatchMode):
    """Watches the flat tensors that forwards save, by weak references to their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []
        self.most_alive = 0

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        # Only saved activations are made one-dimensional by torch.empty here.
        if function is torch.ops.aten.empty.memory_format and out.dim() == 1 and out.numel() > 1000:
            self.storages.append(StorageWeakRef(out.untyped_storage()))
            self.most_alive = max(self.most_alive, self.alive())
        return out


def leaves(model: Model, x: Tensor) -> list[Tensor]:
    return [x, *(p for p in model.parameters() if p.requires_grad)]


@contextlib.contextmanager
def watched() -> Iterator[SavedActivations]:
    with SavedActivations() as saved:
        yield saved


@pytest.mark.parametrize("mode", ["none", "reentrant", "not reentrant"])
def test_activations_die(mode: str) -> None:
    model = Model(mode)
    x = make_layer(SIZES, 9, dtype=torch.float32).x.requires_grad_()
    with watched() as saved:
        y = model(x)
        if mode == "none":
            assert saved.alive() == len(saved.storages) == LAYERS
        else:
            assert saved.alive() == 0, "saved activations outlive their checkpointed layer"
        forwards = len(saved.storages)
        y.sum().backward()
        assert saved.alive() == 0
        if mode != "none":
            assert len(saved.storages) == forwards + LAYERS, "each layer runs once more"
            assert saved.most_alive == 1
    del y


@pytest.mark.parametrize("mode", ["reentrant", "not reentrant"])
def test_same_gradients(mode: str) -> None:
    found = []
    for kind in ("none", mode):
        model = Model(kind)
        x = make_layer(SIZES, 9, dtype=torch.float32).x.requires_grad_()
        y = model(x)
        y.square().sum().backward()
        found.append([y.detach(), *(leaf.grad for leaf in leaves(model, x))])
    assert len(found[0]) == 2 + 6 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mode", ["none", "not reentrant"])
def test_gradients_accumulate_over_batches(mode: str) -> None:
    model = Model(mode)
    batches = [make_layer(SIZES, seed, dtype=torch.float32).x for seed in (20, 21)]
    for batch in batches:
        model(batch).square().sum().backward()
    together = [leaf.grad.clone() for leaf in leaves(model, batches[0])[1:]]
    apart = [torch.zeros_like(grad) for grad in together]
    for batch in batches:
        model.zero_grad()
        model(batch).square().sum().backward()
        for total, leaf in zip(apart, leaves(model, batch)[1:], strict=True):
            total += leaf.grad
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b)


def test_forwards_before_backwards() -> None:
    model = Model("none")
    batches = [make_layer(SIZES, seed, dtype=torch.float32).x.requires_grad_() for seed in (20, 21, 22)]
    expected = [torch.autograd.grad(model(batch).square().sum(), leaves(model, batch)) for batch in batches]
    losses = [model(batch).square().sum() for batch in batches]
    for i in (1, 0, 2):  # a pipeline need not go back in the order in which it came
        found = torch.autograd.grad(losses[i], leaves(model, batches[i]))
        assert all(torch.equal(a, b) for a, b in zip(found, expected[i], strict=True))
