"""Hooks on an activation: called with the model's values, whenever they come, and never with a probe's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families import family_model, token_batch
from reference import one_thread

OURS = "amx_sft_moe"
Attach = Callable[[nn.Module, list[str]], Callable[[], None]]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def one_layer(implementation: str) -> nn.Module:
    model = family_model("qwen3_moe", implementation, num_hidden_layers=1)
    model.model.layers[0].mlp.experts.act_fn = nn.Sequential(nn.SiLU())
    return model.requires_grad_()


def act_fn_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp.experts.act_fn


def step(model: nn.Module) -> Tensor:
    loss = model(**token_batch()).loss
    loss.backward()
    return loss.detach()


def forward_hook(act_fn: nn.Module, seen: list[str]) -> Callable[[], None]:
    def halved(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen.append(str(output.dtype))
        return output / 2

    return act_fn.register_forward_hook(halved).remove


def forward_pre_hook(act_fn: nn.Module, seen: list[str]) -> Callable[[], None]:
    def halved(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(str(inputs[0].dtype))
        return (inputs[0] / 2,)

    return act_fn.register_forward_pre_hook(halved).remove


def backward_hook(act_fn: nn.Module, seen: list[str]) -> Callable[[], None]:
    def noted(module: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        seen.append(str(grad_output[0].dtype))

    return act_fn.register_full_backward_hook(noted).remove


def backward_pre_hook(act_fn: nn.Module, seen: list[str]) -> Callable[[], None]:
    def noted(module: nn.Module, grad_output: tuple[Tensor, ...]) -> None:
        seen.append(str(grad_output[0].dtype))

    return act_fn.register_full_backward_pre_hook(noted).remove


def own_forward(act_fn: nn.Module, seen: list[str]) -> Callable[[], None]:
    def halved(gate: Tensor) -> Tensor:
        seen.append(str(gate.dtype))
        return F.silu(gate) / 2

    act_fn.forward = halved
    return lambda: delattr(act_fn, "forward")


def on_a_part(act_fn: nn.Module, seen: list[str]) -> Callable[[], None]:
    return forward_hook(act_fn[0], seen)


ATTACHED = [forward_hook, forward_pre_hook, backward_hook, backward_pre_hook, own_forward, on_a_part]


@pytest.mark.parametrize("attach", ATTACHED)
@pytest.mark.parametrize("first", [False, True], ids=["after a call", "before any"])
def test_hooks_are_called(
    first: bool, attach: Attach, calls: list[Tensor], warned: Callable[[], list[str]]
) -> None:
    model, eager = one_layer(OURS), one_layer("eager")
    without = step(eager)
    if not first:
        torch.testing.assert_close(step(model), without)
        assert len(calls) == 1
    calls.clear()
    seen: dict[nn.Module, list[str]] = {model: [], eager: []}
    remove = [attach(act_fn_of(one), seen[one]) for one in (model, eager)]
    torch.testing.assert_close(step(model), step(eager))
    # As often as tokens are split: the default implementation's business. float64 would be a probe's.
    assert set(seen[model]) == set(seen[eager]) == {"torch.float32"}
    assert not calls
    assert len(warned()) == 1
    assert warned()[0].startswith("Qwen3MoeExperts: expected act_fn")
    for each in remove:
        each()
    torch.testing.assert_close(step(model), without)
    assert len(calls) == 1, "the operator is back"


def test_hooks_of_the_experts_module_itself_are_no_reason(calls: list[Tensor]) -> None:
    model = one_layer(OURS)
    seen: list[torch.Size] = []
    model.model.layers[0].mlp.experts.register_forward_hook(lambda m, i, y: seen.append(y.shape))
    step(model)
    assert len(calls) == len(seen) == 1


def test_the_classs_own_forward_on_the_instance_is_no_reason(calls: list[Tensor]) -> None:
    """As kernelize leaves activations that it has no kernel for."""
    model = one_layer(OURS)
    act_fn_of(model)[0].forward = MethodType(nn.SiLU.forward, act_fn_of(model)[0])
    step(model)
    assert len(calls) == 1


def test_hooks_on_a_compiled_graphs_activation_are_noticed() -> None:
    from amx_sft_moe import StateError

    model = one_layer(OURS)
    compiled = torch.compile(model.model.layers[0].mlp.experts, backend="eager")
    x, ids, weights = torch.ones(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    compiled(x, ids, weights)
    act_fn_of(model).register_forward_hook(lambda m, i, y: y / 2)
    with pytest.raises(StateError, match="changed since it was compiled: expected act_fn without hooks"):
        compiled(x, ids, weights)


def written_out(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate)


class WrittenOut(nn.Module):
    """torch compiles no module of its own alone."""

    def forward(self, gate: Tensor) -> Tensor:
        return written_out(gate)


def compiled_module(experts: nn.Module) -> None:
    experts.act_fn = torch.compile(WrittenOut(), backend="eager")


def compiled_in_place(experts: nn.Module) -> None:
    experts.act_fn = WrittenOut()
    experts.act_fn.compile(backend="eager")


def compiled_function(experts: nn.Module) -> None:
    del experts.act_fn
    experts.act_fn = torch.compile(written_out, backend="eager")


@pytest.mark.parametrize("make", [compiled_module, compiled_in_place, compiled_function])
@pytest.mark.parametrize("whole", [False, True], ids=["eager model", "compiled model"])
def test_compiled_activations_are_no_reason(
    whole: bool, make: Callable[[nn.Module], None], warned: Callable[[], list[str]]
) -> None:
    """Nor does the probe, in its thread, wait for the compilation of the whole, which waits for the probe."""
    torch.compiler.reset()  # what is compiled already asks for no lock
    model, ids = one_layer(OURS), token_batch()["input_ids"]
    with torch.no_grad():
        wanted = model(ids).logits
    model = one_layer(OURS)
    make(model.model.layers[0].mlp.experts)
    called = torch.compile(model, backend="eager") if whole else model
    found: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.append(called(ids).logits)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "no answer in a minute"
    torch.testing.assert_close(found[0], wanted)
    assert not warned()
