"""Experts in CPU memory while the rest of a model is elsewhere: activations come and go, gradients too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Trainer, TrainingArguments, default_data_collator

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

# What graphs hold is no constant to dynamo before.
traces = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="expected torch 2.13, which the package asks for"
)


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


def ours_in_place_of(experts: nn.Module) -> SftMoeExperts:
    gate_up, down = (getattr(experts, f"{name}_proj").detach() for name in ("gate_up", "down"))
    return SftMoeExperts(2, gate_up_proj=gate_up, down_proj=down, lora_rank=2, lora_dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "ours"])
def test_activations_come_and_go(family: str, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    experts = ours_in_place_of(experts_of("qwen3_moe")) if family == "ours" else experts_of(family)
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
    assert len(calls) == (0 if family == "ours" else 2)


def test_weights_elsewhere_are_left_alone() -> None:
    experts = experts_of("qwen3_moe").to("meta")
    inputs = torch.empty(7, 32), torch.zeros(7, 2, dtype=torch.long), torch.ones(7, 2)
    with pytest.raises(NotUnderstoodError, match=r"gate_up_proj in bfloat16 or float32 on cpu, got .* on meta"):
        experts_hook._hooks[OURS]._layer(experts, *inputs)


def on_gpu(model: nn.Module) -> nn.Module:
    """The model there, its experts here."""
    amx_sft_moe.keep_experts_on_cpu(model)
    return model.to("cuda")


def inputs_on(device: str) -> dict[str, Tensor]:
    return {name: ids.to(device) for name, ids in token_batch().items()}


@needs_gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("way", ["eager", "checkpoint", "reentrant", pytest.param("compiled", marks=traces)])
def test_model_on_a_gpu_with_experts_on_the_cpu(family: str, way: str, calls: list[Tensor]) -> None:
    found = []
    with one_thread():
        for device in ("cpu", "cuda"):
            model: Any = with_lora(family_model(family, OURS))
            if device == "cuda":
                on_gpu(model)
                if way in ("checkpoint", "reentrant"):
                    model.enable_input_require_grads()
                    model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
                    model.train()
                elif way == "compiled":
                    model = torch.compile(model, backend="aot_eager")
            loss, grads = loss_and_gradients(model, **inputs_on(device))
            grads = {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}
            for name, grad in grads.items():
                assert grad.device.type == ("cpu" if ".experts." in name else device)
            found.append({name: value.cpu() for name, value in ({"loss": loss} | grads).items()})
    assert way == "compiled" or len(calls) == {"eager": 4, "checkpoint": 6, "reentrant": 6}[way]
    assert_close(found[1], found[0], 1e-4)


@needs_gpu
def test_the_trainer_with_its_own_optimizer(tmp_path: Path) -> None:
    """Moves the model itself, clips by norms of gradients on two devices, steps by fused AdamW."""
    losses = []
    for device in ("cpu", "cuda"):
        model = with_lora(family_model("qwen3_moe", OURS))
        if device == "cuda":
            amx_sft_moe.keep_experts_on_cpu(model)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=4,
            logging_steps=1,
            use_cpu=device == "cpu",
            report_to="none",
            save_strategy="no",
        )
        rows = [{name: ids[0] for name, ids in token_batch(seed=seed).items()} for seed in range(32)]
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
        trainer.train()
        assert next(model.parameters()).device.type == device
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][0] != losses[0][-1]


@needs_gpu
@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=traces)])
def test_a_module_of_ours_on_a_gpu(way: str) -> None:
    layer = make_layer(Sizes(), dtype=torch.float32)
    experts: Any = SftMoeExperts(2, gate_proj=layer.gate_proj, up_proj=layer.up_proj, down_proj=layer.down_proj)
    found = []
    for device in ("cpu", "cuda"):
        called = torch.compile(experts, backend="aot_eager") if way == "compiled" else experts
        x = layer.x.detach().to(device).requires_grad_()
        y = called(x, layer.expert_ids.to(device), layer.routing_weights.to(device))
        (grad,) = torch.autograd.grad(y, x, layer.grad_y.to(device))
        assert y.device.type == grad.device.type == device
        found.append((y.detach().cpu(), grad.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_gpu
def test_experts_come_back_from_a_gpu() -> None:
    with torch.device("meta"):
        made: Any = family_model("qwen3_moe", OURS)
    amx_sft_moe.keep_experts_on_cpu(made)
    made.to_empty(device="cuda")
    moved = with_lora(family_model("qwen3_moe", OURS)).to("cuda")
    amx_sft_moe.keep_experts_on_cpu(moved)
    for model in (made, moved):
        for name, parameter in model.named_parameters():
            assert parameter.device.type == ("cpu" if ".experts." in name else "cuda")


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
