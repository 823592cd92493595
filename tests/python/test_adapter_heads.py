"""LoRA on the head: PEFT keeps the weight beneath it, which is not the checkpoint's after tokens were added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from adapter_cases import (
    OPTIONS,
    checkpoint,
    draw_factors,
    largest_difference,
    merged_state,
    model_of,
)
from amx_sft_moe import ArgumentError
from amx_sft_moe.adapters import check_adapter, convert_adapter, merge_adapter, save_per_expert
from amx_sft_moe.adapters.cli import main
from test_adapter_merging import tied_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),  # PEFT: what this is about
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
]

WEIGHTS = "adapter_model.safetensors"
HEAD = "base_model.model.lm_head.base_layer.weight"
ON_HEAD: dict[str, Any] = {"target_modules": ["o_proj", "lm_head"]}
FORMATS = ("peft-fused", "per-expert", "ktransformers")


def larger(size: int) -> Any:
    """The checkpoint's model with another vocabulary; the new rows are the same each time."""
    model: Any = model_of(checkpoint("qwen3"))
    model.resize_token_embeddings(size, mean_resizing=False)
    return model


def trained(base: Any, **options: Any) -> PeftModel:
    model = get_peft_model(base, LoraConfig(**(OPTIONS | options)))
    draw_factors(model, seed=3)
    return model


def with_new_rows(base: Any) -> Any:
    """A user who has put tokens of his own in unused rows."""
    with torch.no_grad():
        base.lm_head.weight[-3:] = 0.5
    return base


@pytest.fixture
def on_head(tmp_path: Path) -> Path:
    """Stock PEFT's adapter of a head with three new rows."""
    trained(with_new_rows(model_of(checkpoint("qwen3"))), **ON_HEAD).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.mark.parametrize("options", [ON_HEAD, ON_HEAD | {"modules_to_save": ["embed_tokens"]}], ids=str)
def test_a_head_with_added_tokens_is_kept(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = trained(larger(70), **options)
    save_per_expert(model, tmp_path / "adapter")
    torch.testing.assert_close(load_file(tmp_path / "adapter" / WEIGHTS)[HEAD], model.state_dict()[HEAD])
    torch.manual_seed(2)
    loaded = PeftModel.from_pretrained(larger(70), tmp_path / "adapter")
    found, expected = merged_state(loaded), merged_state(model)
    if "modules_to_save" not in options:  # then PEFT does not keep the embedding either
        del found["model.embed_tokens.weight"], expected["model.embed_tokens.weight"]
    assert largest_difference(found, expected) <= 1e-6


def test_no_adapter_on_the_head_no_weight_of_it(tmp_path: Path) -> None:
    save_per_expert(trained(model_of(checkpoint("qwen3"))), tmp_path / "adapter")
    assert not any("lm_head" in key for key in load_file(tmp_path / "adapter" / WEIGHTS))


@pytest.mark.parametrize("to", FORMATS)
def test_conversions_keep_it(to: str, on_head: Path, tmp_path: Path) -> None:
    convert_adapter(on_head, tmp_path / "there", to)
    convert_adapter(tmp_path / "there", tmp_path / "back", "peft-fused")
    expected = load_file(on_head / WEIGHTS)[HEAD]
    for name in ("there", "back"):
        assert torch.equal(load_file(tmp_path / name / WEIGHTS)[HEAD], expected)


@pytest.mark.parametrize("to", FORMATS)
def test_merging_begins_with_it(to: str, on_head: Path, tmp_path: Path) -> None:
    convert_adapter(on_head, tmp_path / "adapter", to)
    merge_adapter(tmp_path / "adapter", checkpoint("qwen3"), tmp_path / "out", progress=False)
    expected = merged_state(PeftModel.from_pretrained(model_of(checkpoint("qwen3")), on_head))
    assert largest_difference(model_of(tmp_path / "out").state_dict(), expected) <= 1e-6


def test_merging_says_so(on_head: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = str(checkpoint("qwen3"))
    assert main(["merge", str(on_head), base, str(tmp_path / "out"), "--no-progress"]) == 0
    assert f"  note: {HEAD}: PEFT puts it in the place of the base model's own" in capfd.readouterr().out


def test_a_rounded_copy_does_not_round_the_checkpoint(tmp_path: Path) -> None:
    """Trained in bfloat16 on a checkpoint in float32."""
    model = trained(with_new_rows(model_of(checkpoint("qwen3"), torch.bfloat16)), **ON_HEAD)
    save_per_expert(model, tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / WEIGHTS)
    assert state[HEAD].dtype == torch.bfloat16
    merge_adapter(tmp_path / "adapter", checkpoint("qwen3"), tmp_path / "out", progress=False)
    found = model_of(tmp_path / "out").state_dict()["lm_head.weight"]
    a, b = (state[f"base_model.model.lm_head.lora_{side}.weight"].float() for side in "AB")
    own = with_new_rows(model_of(checkpoint("qwen3"))).lm_head.weight
    torch.testing.assert_close(found, own + 2 * b @ a, rtol=0, atol=1e-6)


def test_a_head_tied_to_the_embedding_is_refused(tmp_path: Path) -> None:
    """The weight beneath the adapter is the embedding's to the last bit; what is added to it is not."""
    base = tied_checkpoint(tmp_path / "base")
    options = ON_HEAD | {"modules_to_save": ["embed_tokens"]}
    model = get_peft_model(model_of(base), LoraConfig(**(OPTIONS | options)))
    model.save_pretrained(tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / WEIGHTS)
    state["base_model.model.model.embed_tokens.weight"] = state[HEAD].clone()
    save_file(state, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(ArgumentError, match="which are tied in the checkpoint"):
        merge_adapter(tmp_path / "adapter", base, tmp_path / "out", progress=False)


def test_check_tells_who_uses_it(on_head: Path, tmp_path: Path) -> None:
    convert_adapter(on_head, tmp_path / "adapter", "per-expert")
    check = check_adapter(tmp_path / "adapter")
    assert check.findings == ()
    assert check.notes == (f"{HEAD}: PEFT puts it in the place of the base model's own, servers do not",)
    assert {one.tool: one.loads for one in check.loads}["vLLM, SGLang"]


@pytest.mark.parametrize("which", [["embed_tokens"], ["lm_head", "embed_tokens"]], ids=str)
def test_whole_weights_of_a_larger_vocabulary_that_peft_writes_twice(which: list[str], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = trained(larger(70), modules_to_save=which)
    model.save_pretrained(tmp_path / "stock")
    assert any(".original_module." in key for key in load_file(tmp_path / "stock" / WEIGHTS))
    save_per_expert(model, tmp_path / "ours")
    larger(70).config.save_pretrained(tmp_path / "base")
    convert_adapter(tmp_path / "stock", tmp_path / "converted", "per-expert", base=tmp_path / "base")
    torch.manual_seed(1)  # a head that trains not is the user's to bring
    loaded = [PeftModel.from_pretrained(larger(70), tmp_path / name) for name in ("ours", "converted")]
    expected = merged_state(model)
    assert [largest_difference(merged_state(one), expected) <= 1e-6 for one in loaded] == [True, True]
