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
from transformers import InternVLConfig, InternVLForConditionalGeneration
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import amx_sft_moe
from amx_sft_moe import ArgumentError, StateError
from amx_sft_moe.integrations import placement
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


def kept(model: nn.Module) -> list[nn.Module]:
    """Blocks whose experts stay."""
    return [module for module in model.modules() if isinstance(module, placement._KeepsChildren)]


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


def test_once_more_is_the_same() -> None:
    model = with_lora(family_model("qwen3_moe", OURS))
    for _ in range(3):
        amx_sft_moe.keep_experts_on_cpu(model)
    blocks = kept(model)
    assert len(blocks) == 2
    assert all(type(block).__name__ == "Qwen3MoeSparseMoeBlock" for block in blocks)
    assert all(type(block).__mro__[2] is Qwen3MoeSparseMoeBlock for block in blocks)
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
    [block, _] = kept(model)
    alone = copy.deepcopy(block)
    weights = weakref.ref(alone.experts.gate_up_proj)
    gc.disable()
    try:
        del alone
        assert weights() is None
    finally:
        gc.enable()


def experts_of_ours(sizes: Sizes | None = None) -> SftMoeExperts:
    layer = make_layer(Sizes() if sizes is None else sizes)
    projections = {name: getattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj")}
    return SftMoeExperts(layer.expert_ids.shape[1], **projections, lora_rank=2)


class Block(nn.Module):
    """Two experts modules, and what goes elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.second = experts_of_ours(), experts_of_ours()
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))

    def moved(self) -> dict[str, str]:
        """Device types of what lies in the block."""
        own = {"scale": self.scale, "shift": self.get_buffer("shift"), "norm": self.norm.weight}
        experts = {name: getattr(self, name).down_proj for name in ("mixture", "second")}
        return {name: tensor.device.type for name, tensor in (own | experts).items()}


ALL_BUT_EXPERTS = {"scale": "meta", "shift": "meta", "norm": "meta", "mixture": "cpu", "second": "cpu"}


def test_modules_of_ours() -> None:
    block = Block()
    amx_sft_moe.keep_experts_on_cpu(block)
    assert block.to("meta").moved() == ALL_BUT_EXPERTS
    assert {parameter.device.type for parameter in block.mixture.parameters()} == {"cpu"}


def test_a_layer_with_one_expert() -> None:
    block = Block()
    block.mixture = experts_of_ours(Sizes(experts=1, top_k=1))
    amx_sft_moe.keep_experts_on_cpu(block)
    assert block.to("meta").moved() == ALL_BUT_EXPERTS


def test_moves_without_children() -> None:
    block = Block()
    amx_sft_moe.keep_experts_on_cpu(block)
    block.to_empty(device="meta", recurse=False)
    assert block.moved() == ALL_BUT_EXPERTS | {"norm": "cpu"}


def test_copies_of_a_block_move_themselves() -> None:
    block = Block()
    amx_sft_moe.keep_experts_on_cpu(block)
    for copied in (copy.copy(block), copy.deepcopy(block)):
        assert type(copied) is type(block)
        assert copied._apply(lambda tensor: tensor) is copied
    assert copy.deepcopy(block).to("meta").moved() == ALL_BUT_EXPERTS
    assert set(block.moved().values()) == {"cpu"}


def test_what_a_block_does_with_moves_is_still_done() -> None:
    block = Block()
    seen: list[Any] = []

    def watched(fn: Any, recurse: bool = True) -> nn.Module:
        seen.append(fn)
        return type(block)._apply(block, fn, recurse)

    block._apply = watched  # type: ignore[method-assign]
    amx_sft_moe.keep_experts_on_cpu(block)
    assert block.to("meta").moved() == ALL_BUT_EXPERTS
    assert len(seen) == 1


def test_experts_that_two_modules_have() -> None:
    model: Any = family_model("qwen3_moe", OURS)
    model.all_experts = nn.ModuleList([layer.mlp.experts for layer in model.model.layers])
    amx_sft_moe.keep_experts_on_cpu(model)
    assert len(kept(model)) == 3
    assert devices(model.to("meta")) == APART


def test_experts_without_memory_get_it_on_the_cpu() -> None:
    with torch.device("meta"):
        model = family_model("qwen3_moe", OURS)
    amx_sft_moe.keep_experts_on_cpu(model)
    assert len(kept(model)) == 2
    assert devices(model) == {True: {"meta"}, False: {"meta"}}
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model.to("cpu")
    model.to_empty(device="cpu")
    assert devices(model.to("meta")) == APART


def test_a_default_device_changes_nothing() -> None:
    model = family_model("qwen3_moe", OURS)
    amx_sft_moe.keep_experts_on_cpu(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.device("meta"), torch.no_grad():
        model._apply(lambda tensor: tensor * 2)
        model.cpu()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, 2 * before[name]), name


def test_image_encoders_are_no_experts() -> None:
    """Some have two parameters [1, ..., ...] of their own."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": [28, 28],
        "patch_size": [14, 14],
    }
    text = family_model("qwen3_moe", OURS).config.to_dict()
    config = InternVLConfig(text_config=text, vision_config=vision)
    model: Any = InternVLForConditionalGeneration(config)
    model.set_experts_implementation(OURS)
    assert len([p for p in model.model.vision_tower.embeddings._parameters.values() if p is not None]) >= 2
    amx_sft_moe.keep_experts_on_cpu(model)
    assert len(kept(model)) == 2
    assert devices(model.to("meta")) == APART


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2), "expected a model with routed experts in it, got a Linear, which has none"),
        (
            lambda: experts_of_ours(),
            "expected a model with routed experts in it, got a SftMoeExperts, which is one layer's experts "
            "itself",
        ),
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
    assert kept(model) == []


def test_adapters_that_went_away_are_named() -> None:
    model: Any = with_lora(family_model("qwen3_moe", OURS))
    wrappers = [module for module in model.modules() if hasattr(module, "parameter_name")]
    wrappers[0].lora_A.to("meta")
    inputs = torch.empty(7, 32), torch.zeros(7, 2, dtype=torch.long), torch.ones(7, 2)
    with pytest.raises(StateError, match=r"LoRA factors .* on meta \(amx_sft_moe.keep_experts_on_cpu.*; other"):
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
