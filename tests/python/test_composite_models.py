"""Checkpoints for text and images, whose causal language model is made of the part for text or of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from amx_sft_moe.checkpoints import load_model, routed_experts
from amx_sft_moe.finetune import model as finetune_model
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.integrations.mapped_experts import is_mapped
from composite_models import TEXT_ALONE, WHOLE, make, write

IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("family", [*TEXT_ALONE, *WHOLE])
def test_load_model(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "whole", family)
    expected = make(family)(input_ids=IDS).logits
    model = load_model(folder, progress=False)
    assert type(model) is type(AutoModelForCausalLM.from_pretrained(folder))
    assert type(model.config) is type(model).config_class
    assert (model(input_ids=IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    on_disk_one_by_one = family != "gemma4"
    for _, module in routed_experts(model):
        assert is_mapped(module) == on_disk_one_by_one


def test_what_transformers_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "whole", TEXT_ALONE[0])

    def broken(*arguments: object, **options: object) -> None:
        raise AttributeError("'Config' object has no attribute 'vocab_size'\nmore")

    monkeypatch.setattr(finetune_model, "load_mapped", broken)
    message = (
        f"^cannot load a model from {folder}: AttributeError: 'Config' object has no attribute 'vocab_size'$"
    )
    with pytest.raises(FinetuneError, match=message):
        finetune_model.load_model(folder, torch.float32, torch.float32, "eager")
