"""`keep_experts_on_cpu`: a model is moved, its experts and their adapters are not. "meta" is the other device
where there is no GPU."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

import amx_sft_moe
from amx_sft_moe import ArgumentError, StateError
from amx_sft_moe.integrations.mapped_experts import MappedStack
from amx_sft_moe.nn import SftMoeExperts
from cases import Sizes
from checkpoint_folders import write
from families import family_model, with_lora
from reference import make_layer

OURS = "amx_sft_moe"
amx_sft_moe.register()


def devices(model: nn.Module) -> dict[bool, set[str]]:
    """Device types of the parameters, within experts (True) and elsewhere."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, parameter in model.named_parameters():
        found[".experts." in name].add(parameter.device.type)
    return found


APART = {True: {"cpu"}, False: {"meta"}}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("adapted", ["before", "after", "between"])
def test_experts_and_their_adapters_stay(family: str, adapted: str) -> None:
    model: Any = family_model(family, OURS)
    if adapted == "before":
        model = with_lora(model)
    amx_sft_moe.keep_experts_on_cpu(model)
    if adapted == "after":  # wrapped by then by what had no part in the call
        model = with_lora(model)
    before = {name: parameter for name, parameter in model.named_parameters() if ".experts." in name}
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    model.to("meta")
    if adapted == "between":  # PEFT puts an adapter where its weight is
        model = with_lora(model)
        model.to("meta")
        before, values = {}, {}
    assert devices(model) == APART
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert len([name for name in after if ".experts." in name]) >= 4


def test_conversions_go_on() -> None:
    model = with_lora(family_model("qwen3_moe", OURS))
    amx_sft_moe.keep_experts_on_cpu(model)
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model.to("meta", torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert devices(model) == APART
    model = family_model("qwen3_moe", OURS)
    amx_sft_moe.keep_experts_on_cpu(model)
    assert all(parameter.is_shared() for parameter in model.share_memory().parameters())
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    for parameter in experts:
        parameter.grad = torch.ones_like(parameter)
    model.to("meta")
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in experts)


def test_experts_that_are_elsewhere_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("qwen3_moe", OURS)
    asked: list[Any] = []
    to = nn.Module.to
    monkeypatch.setattr(
        nn.Module, "to", lambda self, *args: (asked.append((type(self), args)), to(self, *args))[1]
    )
    amx_sft_moe.keep_experts_on_cpu(model)
    assert [args for _, args in asked] == [("cpu",)] * 2


def test_once_more_is_the_same() -> None:
    model = with_lora(family_model("qwen3_moe", OURS))
    for _ in range(3):
        amx_sft_moe.keep_experts_on_cpu(model)
    blocks = [module for module in model.modules() if "_apply" in module.__dict__]
    assert len(blocks) == 2
    assert all(type(block).__name__ == "Qwen3MoeSparseMoeBlock" for block in blocks)
    model.to("meta")
    assert devices(model) == APART


def test_copies_and_pickles_keep_theirs() -> None:
    model = family_model("qwen3_moe", OURS)
    amx_sft_moe.keep_experts_on_cpu(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gone = [weakref.ref(block) for block in model.modules()]
        assert devices(copied.to("meta")) == APART
        assert devices(model) == {True: {"cpu"}, False: {"cpu"}}  # the copy moved itself
        assert all(block() is not None for block in gone)


def test_the_experts_die_with_their_model() -> None:
    model = family_model("qwen3_moe", OURS)
    amx_sft_moe.keep_experts_on_cpu(model)
    [block, _] = [module for module in model.modules() if "_apply" in module.__dict__]
    alone = copy.deepcopy(block)
    weights = weakref.ref(alone.experts.gate_up_proj)
    gc.disable()
    try:
        del alone
        assert weights() is None
    finally:
        gc.enable()


def test_modules_of_ours() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = make_layer(Sizes())
            projections = {name: getattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj")}
            self.mixture = SftMoeExperts(2, **projections, lora_rank=2)
            self.norm = nn.LayerNorm(4)

    block = Block()
    amx_sft_moe.keep_experts_on_cpu(block)
    block.to("meta")
    assert {parameter.device.type for parameter in block.mixture.parameters()} == {"cpu"}
    assert block.norm.weight.device.type == "meta"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2), "expected a model with routed experts in it, got a Linear with none"),
        (
            lambda: family_model("qwen3_moe", "eager"),
            r"model\.layers\.0\.mlp\.experts: expected experts_implementation='amx_sft_moe', or another name "
            r"given to register\(\), got Qwen3MoeExperts with 'eager'",
        ),
        (
            lambda: family_model("qwen3_moe", OURS, torch.float16),
            r"model\.layers\.0\.mlp\.experts: expected gate_up_proj in bfloat16 or float32, got torch.float16",
        ),
    ],
)
def test_refusals_change_nothing(make: Any, reason: str) -> None:
    model = make()
    with pytest.raises(ArgumentError, match=f"^keep_experts_on_cpu: {reason}$"):
        amx_sft_moe.keep_experts_on_cpu(model)
    assert not any("_apply" in module.__dict__ for module in model.modules())


def test_adapters_that_went_away_are_named() -> None:
    model: Any = with_lora(family_model("qwen3_moe", OURS))
    wrappers = [module for module in model.modules() if hasattr(module, "parameter_name")]
    wrappers[0].lora_A.to("meta")
    inputs = torch.empty(7, 32), torch.zeros(7, 2, dtype=torch.long), torch.ones(7, 2)
    with pytest.raises(
        StateError, match=r"LoRA factors .* on meta; other implementations .*keep_experts_on_cpu"
    ):
        wrappers[0](*[tensor.to("meta") for tensor in inputs])


def test_mapped_experts_and_their_adapters(tmp_path: Path) -> None:
    model: Any = amx_sft_moe.load_model(write(tmp_path, "qwen3_moe", torch.bfloat16), progress=False)
    model = with_lora(model)
    amx_sft_moe.keep_experts_on_cpu(model)
    experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    kinds = {type(parameter) for parameter in experts.values()}
    assert MappedStack in kinds
    assert len(kinds) == 2
    model.to("meta")
    assert devices(model) == APART
    assert all(type(p) in kinds for name, p in model.named_parameters() if ".experts." in name)
    with pytest.raises(
        StateError, match=r"expected to stay in torch.bfloat16 as in its files, got torch.float32"
    ):
        model.float()


def test_what_peft_does_afterwards(tmp_path: Path) -> None:
    """Adapters that are added, loaded and taken off lie where their experts do."""
    model: Any = with_lora(family_model("qwen3_moe", OURS))
    model.save_pretrained(tmp_path)
    base = family_model("qwen3_moe", OURS)
    amx_sft_moe.keep_experts_on_cpu(base)
    loaded: Any = PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True)
    loaded.add_adapter("second", loaded.peft_config["default"])
    loaded.delete_adapter("default")
    loaded.to("meta")
    assert devices(loaded) == APART
    for name, parameter in model.named_parameters():
        if ".experts." in name and "lora_" not in name:
            assert torch.equal(dict(loaded.named_parameters())[name], parameter)
    bare = loaded.unload()
    assert not any("lora_" in name for name, _ in bare.named_parameters())
    assert devices(bare.to("meta")) == APART
