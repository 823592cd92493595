"""What somebody who tried to break the package broke, each once."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import amx_sft_moe
from adapter_cases import (
    checkpoint,
    config_of,
    largest_difference,
    model_of,
    stock_adapter,
    stock_merge,
    write_config,
)
from amx_sft_moe.adapters import convert_adapter, inspect_adapter, merge_adapter, save_per_expert
from amx_sft_moe.checkpoints import load_model
from amx_sft_moe.errors import ArgumentError, StateError
from families import family_model, token_batch

ROUTER = json.dumps(
    {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        "alpha_pattern": {"mlp.gate.weight": 64},
    }
)


def gpt_oss(implementation: str = "amx_sft_moe") -> nn.Module:
    return family_model("gpt_oss", implementation, num_hidden_layers=1, layer_types=["full_attention"])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(token_batch()["input_ids"]).logits


def test_an_interrupt_leaves_no_expert_half_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt_oss().eval()
    expected = logits(copy.deepcopy(model))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    copy_, calls = torch.Tensor.copy_, []

    def copy_and_interrupt(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(self)
        if len(calls) == 2:  # one expert is turned; the handler runs in the main thread
            signal.raise_signal(signal.SIGALRM)
        return copy_(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_and_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            logits(model)
    finally:
        signal.signal(signal.SIGALRM, before)
    monkeypatch.undo()
    assert len(calls) > 2
    torch.testing.assert_close(logits(model), expected)


def test_merge_changes_the_file_that_is_read(tmp_path: Path) -> None:
    source, merged = stock_adapter("qwen3")
    base = tmp_path / "base"
    shutil.copytree(checkpoint("qwen3"), base)  # an index and shards
    model_of(base).save_pretrained(base)  # and one file, which transformers prefers
    shutil.copy(checkpoint("qwen3") / "model.safetensors.index.json", base)
    merge_adapter(source, base, tmp_path / "out", progress=False)
    assert largest_difference(model_of(tmp_path / "out").state_dict(), merged) <= 1e-6


@pytest.mark.parametrize("to", ["per-expert", "peft-fused"])
def test_a_router_keeps_its_scaling(to: str, tmp_path: Path) -> None:
    source, merged = stock_adapter("qwen3", ROUTER)
    convert_adapter(source, tmp_path / "out", to, base=checkpoint("qwen3"))
    assert largest_difference(stock_merge("qwen3", tmp_path / "out"), merged) <= 1e-6


@pytest.mark.parametrize("to", ["per-expert", "peft-fused"])
def test_a_router_keeps_its_scaling_by_way_of_ktransformers(to: str, tmp_path: Path) -> None:
    """Whose configuration names the router's module, where PEFT asks for the parameter's settings."""
    source, merged = stock_adapter("qwen3", ROUTER)
    convert_adapter(source, tmp_path / "kt", "ktransformers", base=checkpoint("qwen3"))
    convert_adapter(tmp_path / "kt", tmp_path / "out", to, base=checkpoint("qwen3"))
    assert largest_difference(stock_merge("qwen3", tmp_path / "out"), merged) <= 1e-6


def test_a_router_of_transformers_4_keeps_its_rank(tmp_path: Path) -> None:
    """The router is a module of ``target_modules`` there, and gate and up have an A each: twice the rank."""
    source, _ = stock_adapter("qwen3", ROUTER)
    convert_adapter(source, tmp_path / "old", "per-expert", base=checkpoint("qwen3"))
    state = load_file(tmp_path / "old" / "adapter_model.safetensors")
    state = {key: value.flip(0) if "up_proj.lora_A" in key else value for key, value in state.items()}
    save_file(state, tmp_path / "old" / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = [*config_of(tmp_path / "old")["target_modules"], "gate"]
    write_config(
        tmp_path / "old", target_modules=modules, target_parameters=None, rank_pattern={}, alpha_pattern={}
    )
    expected = stock_merge("qwen3", tmp_path / "old")
    convert_adapter(tmp_path / "old", tmp_path / "fused", "peft-fused", base=checkpoint("qwen3"))
    assert largest_difference(stock_merge("qwen3", tmp_path / "fused"), expected) <= 1e-6


def test_an_adapted_embedding_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(
        model_of(checkpoint("qwen3")),
        LoraConfig(
            target_modules=["o_proj", "embed_tokens"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    with pytest.raises(ArgumentError, match=r"LoRA on linear layers and experts only, got .*embed"):
        save_per_expert(model, tmp_path / "out")


def test_what_is_read_is_never_overwritten(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(checkpoint("qwen3"), project / "base")
    shutil.copytree(stock_adapter("qwen3")[0], project / "adapter")
    for adapter, base in (("adapter", "base"), ("adapter", str(checkpoint("qwen3")))):
        with pytest.raises(ArgumentError, match="out: expected another directory than one that holds the"):
            merge_adapter(project / adapter, project / base, project, overwrite=True, progress=False)
    assert sorted(path.name for path in project.iterdir()) == ["adapter", "base"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("words")
    model = get_peft_model(
        model_of(checkpoint("qwen3")),
        LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    )
    with pytest.raises(ArgumentError, match="expected a directory, got the file"):
        save_per_expert(model, tmp_path / "precious")
    assert (tmp_path / "precious").read_text() == "words"


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    (tmp_path / "file").write_text("words")
    below = tmp_path / "file" / "adapter"
    with pytest.raises(ArgumentError, match=f"expected one that can be made, got {below}, below a file"):
        convert_adapter(source, below, "per-expert")
    not_utf8 = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    model = get_peft_model(
        model_of(checkpoint("qwen3")), LoraConfig(target_parameters=["mlp.experts.down_proj"])
    )
    for name, use in (
        ("target", lambda: convert_adapter(source, not_utf8, "per-expert")),
        ("adapter", lambda: inspect_adapter(not_utf8)),
        ("directory", lambda: save_per_expert(model, not_utf8)),
        ("directory", lambda: load_model(not_utf8)),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected a path in UTF-8, got "):
            use()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_working_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convert_adapter(stock_adapter("qwen3")[0], ".", "per-expert", base=checkpoint("qwen3"))
    assert "adapter_config.json" in [path.name for path in Path.cwd().iterdir()]


def test_a_refused_cast_changes_nothing() -> None:
    model = amx_sft_moe.load_model(checkpoint("qwen3"), progress=False)
    expected = logits_of_ids(model)
    with pytest.raises(StateError):
        model.bfloat16()
    assert torch.equal(logits_of_ids(model), expected)
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    with pytest.raises(StateError):
        torch.cat([stack, stack])


def logits_of_ids(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(11)[None]).logits


def test_weights_frozen_again_need_no_graph() -> None:
    model = gpt_oss().requires_grad_(True)
    model(**token_batch()).loss.backward()
    model.requires_grad_(False)
    assert not model(token_batch()["input_ids"]).logits.requires_grad


def test_the_implementations_of_transformers_stay() -> None:
    for name in ("grouped_mm", "eager"):
        with pytest.raises(ArgumentError, match="name: expected one that transformers does not have"):
            amx_sft_moe.register(name)


@pytest.mark.parametrize("where", ["/nowhere/at/all", "./nowhere", "~/nowhere"])
def test_a_base_that_is_not_there(where: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"base: expected a directory with config.json.*does not exist"):
        convert_adapter(stock_adapter("qwen3")[0], tmp_path / "out", "per-expert", base=where)


@pytest.mark.parametrize("to", ["per-expert", "peft-fused", "ktransformers"])
def test_a_version_that_is_none(to: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"peft_version: expected one like 0.19.1, got 'abc'"):
        convert_adapter(
            stock_adapter("qwen3")[0], tmp_path / "out", to, base=checkpoint("qwen3"), peft_version="abc"
        )


def test_a_generation_config_that_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3"), folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"model: expected a readable generation_config.json"):
        amx_sft_moe.load_model(folder, progress=False)


@pytest.mark.parametrize("optimizer", [None, [8], True])
def test_an_optimizer_that_is_none(optimizer: Any) -> None:
    model = get_peft_model(
        model_of(checkpoint("qwen3")),
        LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    )
    with pytest.raises(ArgumentError, match=r"optimizer: expected a name or bytes a parameter, got"):
        amx_sft_moe.prepare(model, optimizer=optimizer)
