"""What `adapter check` advises is what works for that base: no conversion that would be refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from adapter_cases import OPTIONS, SIZES, checkpoint, draw_factors, stock_adapter, write_config
from amx_sft_moe import ArgumentError
from amx_sft_moe.adapters import check_adapter, convert_adapter, merge_adapter
from amx_sft_moe.adapters.checks import Loads

SERVERS, KT = "vLLM, SGLang", "KTransformers"


def advice(adapter: Path) -> dict[str, Loads]:
    check = check_adapter(adapter)
    assert check.findings == ()
    return {one.tool: one for one in check.loads}


def advised(reason: str) -> set[str]:
    return set(re.findall(r"(?<!not )--to (\S+?)(?: or|[:;]|$| )", reason))


def granite(folder: Path) -> tuple[Path, Path]:
    """A checkpoint whose experts lie fused, rows first, and an adapter of it."""
    config = transformers.GraniteMoeConfig(**SIZES, num_local_experts=5)
    torch.manual_seed(0)
    model = transformers.GraniteMoeForCausalLM(config)
    model.save_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", experts_implementation="eager")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(model, LoraConfig(**(OPTIONS | {"target_parameters": targets})))
    draw_factors(model, seed=3)
    model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "granite"])
def test_what_is_advised_works_and_what_is_not_is_refused(family: str, tmp_path: Path) -> None:
    base, adapter = granite(tmp_path) if family == "granite" else (checkpoint(family), stock_adapter(family)[0])
    told = advice(adapter)
    for tool, to in ((SERVERS, "per-expert"), (KT, "ktransformers")):
        if to in advised(told[tool].reason):
            convert_adapter(adapter, tmp_path / to, to)
        else:
            with pytest.raises(ArgumentError, match=r"expected (a model whose|experts with)") as refused:
                convert_adapter(adapter, tmp_path / to, to)
            assert told[tool].reason.endswith(f"not --to {to}: {refused.value}")
    assert ("adapter merge" in told[SERVERS].reason) == (family != "qwen3")
    merge_adapter(adapter, base, tmp_path / "merged", progress=False)


def test_files_for_ktransformers_of_a_base_without_names_per_expert(tmp_path: Path) -> None:
    _, adapter = granite(tmp_path)
    convert_adapter(adapter, tmp_path / "kt", "ktransformers", dtype=torch.bfloat16)
    told = advice(tmp_path / "kt")
    assert told[KT].loads
    assert advised(told["PEFT from 0.20"].reason) == {"peft-fused"}
    assert advised(told[SERVERS].reason) == set()


def test_a_linear_layer_that_peft_takes_for_an_experts(tmp_path: Path) -> None:
    """PEFT 0.18 adapts a shared expert's down_proj beside the routed ones; no other format can hold both."""
    source, _ = stock_adapter("deepseek")
    convert_adapter(source, tmp_path / "old", "peft-fused", peft_version="0.18.1")
    file = tmp_path / "old" / "adapter_model.safetensors"
    name = "base_model.model.model.layers.1.mlp.shared_experts.down_proj"
    pair = {f"{name}.lora_A.weight": torch.ones(4, 12), f"{name}.lora_B.weight": torch.ones(28, 4)}
    save_file(load_file(file) | pair, file)
    write_config(tmp_path / "old", target_modules=["o_proj", "down_proj"])
    told = advice(tmp_path / "old")
    for tool in ("PEFT from 0.20", SERVERS):
        assert advised(told[tool].reason) == set()
    with pytest.raises(ArgumentError, match="takes the name"):
        convert_adapter(tmp_path / "old", tmp_path / "new", "peft-fused")
    with pytest.raises(ArgumentError, match="named like the experts'"):
        convert_adapter(tmp_path / "old", tmp_path / "new", "per-expert")
