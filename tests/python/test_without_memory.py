"""First calls of a layer with tensors that have no memory: fake ones are left to transformers, those of
torch.func are refused in words of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amx_sft_moe import StateError
from families import _COMMON, FAMILIES, family_model, token_batch
from reference import one_thread

OURS = "amx_sft_moe"
BOTH = ("qwen3_moe", "gpt_oss")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def fake_model(family: str) -> nn.Module:
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(_COMMON | sizes), dtype="bfloat16")
    # torch's grouped_mm has a form without memory in bfloat16 alone.
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    model.set_experts_implementation(OURS)
    return model


@pytest.mark.parametrize("family", BOTH)
def test_fake_models(family: str, warned: Callable[[], list[str]]) -> None:
    with FakeTensorMode():
        model = fake_model(family)
        found = model(torch.zeros(2, 9, dtype=torch.long)).logits
    assert isinstance(found, FakeTensor)
    assert found.shape == (2, 9, 61)
    assert [message.partition("Experts: ")[2].partition(";")[0] for message in warned()] == [
        "expected hidden_states as a plain tensor, got FakeTensor"
    ]


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("after_a_call", [False, True])
def test_fake_inputs(
    after_a_call: bool, family: str, calls: list[Tensor], warned: Callable[[], list[str]]
) -> None:
    model = family_model(family, OURS, torch.bfloat16)
    if after_a_call:
        model(**token_batch())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(model(torch.zeros(2, 9, dtype=torch.long)).logits, FakeTensor)
    assert len(warned()) == 1
    found = model(**token_batch()).loss
    assert type(found) is Tensor
    expected = family_model(family, "eager", torch.bfloat16)(**token_batch()).loss
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.0)
    assert len(calls) == 2 + 2 * after_a_call


def experts_of(family: str) -> nn.Module:
    return family_model(family, OURS).model.layers[-1].mlp.experts


X, IDS, WEIGHTS = torch.ones(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)


def by_input(experts: nn.Module) -> Any:
    return torch.func.grad(lambda x: experts(x, IDS, WEIGHTS).sum())(X)


def by_weights(experts: nn.Module) -> Any:
    weights = {name: parameter.detach() for name, parameter in experts.named_parameters()}
    return torch.func.grad(
        lambda weights: torch.func.functional_call(experts, weights, (X, IDS, WEIGHTS)).sum()
    )(weights)


def batched(experts: nn.Module) -> Any:
    return torch.func.vmap(lambda x: experts(x, IDS, WEIGHTS))(X[None])


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("transformed", [by_input, by_weights, batched])
def test_first_calls_within_transforms(transformed: Callable[[nn.Module], Any], family: str) -> None:
    experts = experts_of(family)
    strides = experts.down_proj.stride()
    for _ in range(2):
        with pytest.raises(StateError, match=r"^torch.func: expected calls outside of its transforms"):
            transformed(experts)
    assert experts.down_proj.stride() == strides, "laid out for a call that was refused"


def test_transforms_of_what_is_left_to_transformers(warned: Callable[[], list[str]]) -> None:
    experts = experts_of("qwen3_moe")
    experts.act_fn = nn.ReLU()
    x = X.clone().requires_grad_()
    experts(x, IDS, WEIGHTS).sum().backward()
    again = experts_of("qwen3_moe")
    again.act_fn = nn.ReLU()
    torch.testing.assert_close(by_input(again), x.grad)
    assert len(warned()) == 1
