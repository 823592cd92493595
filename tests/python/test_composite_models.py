"""Checkpoints for text and images, whose causal language model is made of the part for text or of the whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapter_cases import draw_factors
from amx_sft_moe import ArgumentError, prepare
from amx_sft_moe.adapters import (
    check_adapter,
    convert_adapter,
    load_base,
    merge_adapter,
    read_adapter,
    save_per_expert,
)
from amx_sft_moe.checkpoints import load_model, routed_experts
from amx_sft_moe.finetune import model as finetune_model
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.integrations import trained_parts
from amx_sft_moe.integrations.mapped_experts import is_mapped
from checkpoint_folders import edit_config
from composite_models import TEXT_ALONE, WHOLE, make, write
from models import EXPERTS, base_model

IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a family's checkpoint, written once and not to be changed."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = write(tmp_path_factory.mktemp(family) / "whole", family)
        return made[family]

    return folder


def text_alone(folder: Path) -> Any:
    """What most people load; for some families it is the whole model."""
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()


def whole(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, experts_implementation="eager").eval()


def adapted(model: Any, **changes: Any) -> PeftModel:
    """LoRA with random factors on all routed experts and on attention."""
    options: dict[str, Any] = {
        "r": 2,
        "target_modules": r"(?!.*vision).*\.self_attn\.q_proj",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    model = get_peft_model(model, LoraConfig(**(options | changes))).eval()
    draw_factors(model, seed=1)
    return model


def assert_same_logits(model: Any, expected: torch.Tensor) -> None:
    found = model(input_ids=IDS).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", [*TEXT_ALONE, *WHOLE])
def test_load_model(family: str, checkpoint: Any) -> None:
    model = load_model(checkpoint(family), progress=False)
    assert type(model) is type(text_alone(checkpoint(family)))
    assert type(model.config) is type(model).config_class
    assert_same_logits(model, make(family)(input_ids=IDS).logits)
    on_disk_one_by_one = family != "gemma4"
    for _, module in routed_experts(model):
        assert is_mapped(module) == on_disk_one_by_one


def test_what_transformers_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise AttributeError("'Config' object has no attribute 'vocab_size'\nmore")

    monkeypatch.setattr(finetune_model, "load_mapped", broken)
    message = (
        f"^cannot load a model from {tmp_path}: AttributeError: 'Config' object has no attribute 'vocab_size'$"
    )
    with pytest.raises(FinetuneError, match=message):
        finetune_model.load_model(tmp_path, torch.float32, torch.float32, "eager")


@pytest.mark.parametrize("form", ["peft-fused", "per-expert"])
@pytest.mark.parametrize("part", [text_alone, whole])
@pytest.mark.parametrize("family", TEXT_ALONE)
def test_adapters(family: str, part: Any, form: str, checkpoint: Any, tmp_path: Path) -> None:
    """Of the whole model and of the part for text, whose modules have other names than the checkpoint."""
    base = checkpoint(family)
    model = adapted(part(base), modules_to_save=["lm_head"])
    expected = model(input_ids=IDS).logits
    if form == "per-expert":
        save_per_expert(model, tmp_path / "saved")
    else:
        model.save_pretrained(tmp_path / "saved")
    check = check_adapter(tmp_path / "saved", base)
    assert (check.format, check.findings) == (form, ())
    other = "peft-fused" if form == "per-expert" else "per-expert"
    convert_adapter(tmp_path / "saved", tmp_path / "converted", other, base=base)
    if other == "per-expert" and part is whole:
        assert (
            not check_adapter(tmp_path / "converted", base).loads[0].loads
        )  # PEFT would leave the experts out
        convert_adapter(tmp_path / "converted", tmp_path / "converted", form, base=base, overwrite=True)
    else:
        assert check_adapter(tmp_path / "converted", base).loads[0].loads
    assert_same_logits(PeftModel.from_pretrained(part(base), tmp_path / "converted"), expected)
    merge_adapter(tmp_path / "saved", base, tmp_path / "merged", progress=False)
    assert_same_logits(part(tmp_path / "merged"), expected)


@pytest.mark.parametrize("family", WHOLE)
def test_merging_into_a_model_that_is_one_class(family: str, checkpoint: Any, tmp_path: Path) -> None:
    model = adapted(text_alone(checkpoint(family)))
    model.save_pretrained(tmp_path / "saved")
    assert load_base(checkpoint(family)).as_causal_lm is None
    merge_adapter(tmp_path / "saved", checkpoint(family), tmp_path / "merged", progress=False)
    assert_same_logits(text_alone(tmp_path / "merged"), model(input_ids=IDS).logits)


def test_factors_of_the_part_for_text(checkpoint: Any, tmp_path: Path) -> None:
    adapted(text_alone(checkpoint(TEXT_ALONE[0]))).save_pretrained(tmp_path)
    found, _ = read_adapter(tmp_path, load_base(checkpoint(TEXT_ALONE[0])))
    assert sorted(found.experts) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_an_adapter_of_neither_class_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    base = checkpoint(TEXT_ALONE[0])
    adapted(text_alone(base)).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "adapter_model.safetensors"
    renamed = {key.replace(".layers.", ".blocks."): tensor for key, tensor in load_file(path).items()}
    save_file(renamed, path)
    with pytest.raises(ArgumentError, match=rf"expected modules of {base}, got model\.blocks\.0\."):
        merge_adapter(tmp_path / "saved", base, tmp_path / "merged", progress=False)
    assert not (tmp_path / "merged").exists()


def test_a_configuration_that_names_the_part_for_text(tmp_path: Path) -> None:
    """Beside a configuration for text and images, as a model for text saved with that one has it."""
    folder = write(tmp_path / "whole", TEXT_ALONE[0])
    edit_config(folder, architectures=[type(text_alone(folder)).__name__])
    assert "model.layers.0.mlp.experts" in load_base(folder).layouts


def mixed() -> torch.nn.Module:
    """Experts in two places, one of them directly in its layer."""
    model = base_model("amx_sft_moe")
    model.model.layers[1].experts = model.model.layers[1].mlp.experts
    model.model.layers[1].mlp = torch.nn.Identity()
    return model


@pytest.mark.parametrize(
    ("made", "targets"),
    [
        (lambda: base_model("amx_sft_moe"), EXPERTS),
        (lambda: make("gemma4"), ["experts.gate_up_proj", "experts.down_proj"]),
        (mixed, [*EXPERTS, "experts.gate_up_proj", "experts.down_proj"]),
    ],
    ids=["in_a_block", "in_the_layer", "both"],
)
def test_the_advice_adapts_all_layers(made: Any, targets: list[str]) -> None:
    model = made().requires_grad_(False)
    with pytest.raises(ArgumentError) as error:
        prepare(model, quiet=True)
    advice = re.search(r"LoraConfig\(target_parameters=(\[.*\]), \.\.\.\)$", str(error.value))
    assert advice is not None
    assert json.loads(advice[1]) == targets
    found = get_peft_model(model, LoraConfig(target_modules=[], target_parameters=json.loads(advice[1])))
    assert not [
        note for note in prepare(found, quiet=True).notes if "layers" in note and "do not run" not in note
    ]
    adapted = {name.partition(".lora_")[0] for name, p in found.named_parameters() if p.requires_grad}
    assert len({name.replace(".base_layer", "") for name in adapted}) == len(
        trained_parts.routed_experts(model)
    )
