"""Experts in CPU memory while the rest of a model is elsewhere: activations come and go, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import amx_sft_moe
from amx_sft_moe.integrations import experts_hook
from amx_sft_moe.integrations.adapters_in_use import NotUnderstoodError
from amx_sft_moe.nn import SftMoeExperts
from cases import Sizes
from families import family_model, token_batch, with_lora
from models import loss_and_gradients
from reference import assert_close, make_layer, one_thread, run

OURS = "amx_sft_moe"
amx_sft_moe.register()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


class Elsewhere(Tensor):
    """A tensor that says it is on another device, for machines that have none, and keeps its values in CPU
    memory."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device="meta"
        )

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def there(value: Any) -> Any:
            return value.memory if isinstance(value, Elsewhere) else value

        def back(value: Any) -> Any:
            return Elsewhere(value) if isinstance(value, Tensor) else value

        args, kwargs = tree_map(there, args), tree_map(there, kwargs or {})
        return tree_map(back, function(*args, **kwargs))


class ToElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return Elsewhere(tensor.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.memory


class FromElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.memory.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Elsewhere(grad)


def experts_of(family: str) -> nn.Module:
    model = family_model(family, OURS)
    return next(module for module in model.modules() if hasattr(module, "_apply_gate"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_activations_come_and_go(family: str, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of(family)
    to = Tensor.to

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = torch.device(args[0]).type if args and not isinstance(args[0], torch.dtype) else None
        if device == "cpu" and isinstance(tensor, Elsewhere):
            return FromElsewhere.apply(tensor)
        if device == "meta" and not isinstance(tensor, Elsewhere):
            return ToElsewhere.apply(tensor)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", moved)
    x, weights = torch.randn(7, 32, requires_grad=True), torch.rand(7, 2, requires_grad=True)
    ids = torch.rand(7, 5).argsort(1)[:, :2]
    expected = experts(x, ids, weights)
    expected_grads = torch.autograd.grad(expected.sum(), (x, weights))
    far = [Elsewhere(tensor.detach().clone()) for tensor in (x, ids, weights)]
    far[0].requires_grad_()
    far[2].requires_grad_()
    y = experts(*far)
    assert isinstance(y, Elsewhere)
    assert torch.equal(y.detach().memory, expected)
    grads = torch.autograd.grad(y, (far[0], far[2]), Elsewhere(torch.ones(7, 32)))
    assert all(isinstance(grad, Elsewhere) for grad in grads)
    assert all(torch.equal(a.memory, b) for a, b in zip(grads, expected_grads, strict=True))
    assert all(seen.device.type == "cpu" for seen in calls)
    assert len(calls) == 2


def test_weights_elsewhere_are_left_alone() -> None:
    experts = experts_of("qwen3_moe").to("meta")
    inputs = torch.empty(7, 32), torch.zeros(7, 2, dtype=torch.long), torch.ones(7, 2)
    with pytest.raises(NotUnderstoodError, match=r"gate_up_proj in bfloat16 or float32 on cpu, got .* on meta"):
        experts_hook._hooks[OURS]._layer(experts, *inputs)


@needs_gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_model_on_a_gpu_with_experts_on_the_cpu(family: str, calls: list[Tensor]) -> None:
    found = []
    with one_thread():
        for device in ("cpu", "cuda"):
            model = with_lora(family_model(family, OURS)).to(device)
            for module in model.modules():
                if hasattr(module, "_apply_gate"):
                    module.to("cpu")
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    parameter.data = parameter.data.cpu()
            inputs = {name: ids.to(device) for name, ids in token_batch().items()}
            loss, grads = loss_and_gradients(model, **inputs)
            found.append({name: value.cpu() for name, value in ({"loss": loss} | grads).items()})
    assert len(calls) == 4
    assert_close(found[1], found[0], 1e-4)


def test_a_default_device_of_torch() -> None:
    """Results are in CPU memory, wherever torch makes its tensors otherwise."""
    layer = make_layer(Sizes())
    op = Sizes().operator()
    expected = run(op, layer)
    experts = SftMoeExperts(2, gate_proj=layer.gate_proj, up_proj=layer.up_proj, down_proj=layer.down_proj)
    with torch.device("meta"):
        found = run(op, layer)
        y = experts(layer.x.requires_grad_(), layer.expert_ids, layer.routing_weights)
        (grad_x,) = torch.autograd.grad(y, layer.x, layer.grad_y)
    assert {tensor.device.type for tensor in (*found.values(), y, grad_x)} == {"cpu"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
