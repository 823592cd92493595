"""Adapters from format to format: bit for bit where that is possible, and honest where it is not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_cases import (
    EXPERTS,
    FAMILIES,
    PER_EXPERT_ON_DISK,
    checkpoint,
    config_of,
    largest_difference,
    model_of,
    stock_adapter,
    stock_merge,
    write_config,
)
from amx_sft_moe import ArgumentError, StateError
from amx_sft_moe.adapters import conversion, convert_adapter, load_base, merge_adapter, read_adapter
from amx_sft_moe.adapters.adapter import Factors, same_bits
from amx_sft_moe.adapters.fusing import folded, fused

FORMATS = ("peft-fused", "per-expert", "ktransformers")
WEIGHTS, KT = "adapter_model.safetensors", "fused_expert_lora.safetensors"


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = [directory / name for name in (WEIGHTS, KT) if (directory / name).exists()]
    return {key: value for file in files for key, value in load_file(file).items()}


def assert_same_files(found: Path, expected: Path) -> None:
    one, other = tensors(found), tensors(expected)
    assert set(one) == set(other)
    assert all(same_bits(one[key], other[key]) for key in other)


def with_own_a(source: Path, target: Path) -> Path:
    """A per-expert adapter as v4 trains it: gate and up each with its own A."""
    shutil.copytree(source, target)
    state = load_file(target / WEIGHTS)
    for key in state:
        if "up_proj.lora_A" in key:
            state[key] = state[key].flip(0) * 1.25
    save_file(state, target / WEIGHTS)
    return target


@pytest.mark.parametrize("via", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 7},
        {"rank_pattern": {"gate_up_proj": 6, "o_proj": 2}, "alpha_pattern": {"gate_up_proj": 12}},
        {"target_parameters": EXPERTS[:1]},
        {"target_parameters": EXPERTS[1:], "target_modules": r".*1\.self_attn\.[qk]_proj"},
    ],
    ids=str,
)
def test_peft_fused_there_and_back(options: dict[str, Any], via: str, tmp_path: Path) -> None:
    source, merged = stock_adapter("qwen3", json.dumps(options))
    there = convert_adapter(source, tmp_path / "there", via)
    back = convert_adapter(tmp_path / "there", tmp_path / "back", "peft-fused")
    assert there.lossless
    assert back.lossless
    assert back.verified >= there.verified > 0
    assert largest_difference(stock_merge("qwen3", tmp_path / "back"), merged) <= 1e-6
    if via != "ktransformers" and options.get("target_parameters") == EXPERTS[:1]:
        return  # a pair of zeros for down_proj was added: loaders want it
    if via == "ktransformers" and ("rank_pattern" in options or "target_parameters" in options):
        return  # one rank for all, all projections: zeros were added
    expected = tensors(source)
    found = tensors(tmp_path / "back")
    assert set(found) == set(expected)
    assert all(same_bits(found[key], expected[key]) for key in expected)
    was, now = config_of(source), config_of(tmp_path / "back")
    assert sorted(now["target_modules"]) == sorted(was["target_modules"])
    assert now["base_model_name_or_path"] == was["base_model_name_or_path"]


@pytest.mark.parametrize("via", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_per_expert_there_and_back(via: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    convert_adapter(source, tmp_path / "shared", "per-expert", dtype=dtype)
    separate = with_own_a(tmp_path / "shared", tmp_path / "separate")
    for adapter in (tmp_path / "shared", separate):
        there = convert_adapter(adapter, tmp_path / "there", via, overwrite=True)
        back = convert_adapter(tmp_path / "there", tmp_path / "back", "per-expert", overwrite=True)
        assert there.lossless
        assert back.lossless
        assert_same_files(tmp_path / "back", adapter)
        assert config_of(tmp_path / "back") == config_of(adapter)


def test_separate_a_becomes_twice_the_rank(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    convert_adapter(source, tmp_path / "shared", "per-expert")
    separate = with_own_a(tmp_path / "shared", tmp_path / "separate")
    convert_adapter(separate, tmp_path / "fused", "peft-fused")
    convert_adapter(tmp_path / "shared", tmp_path / "again", "peft-fused")
    key = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    assert tensors(tmp_path / "fused")[key].shape == (5 * 8, 28)
    assert tensors(tmp_path / "again")[key].shape == (5 * 4, 28)
    expected = stock_merge("qwen3", separate)
    assert largest_difference(stock_merge("qwen3", tmp_path / "fused"), expected) <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_peft_0_18(family: str, tmp_path: Path) -> None:
    source, _ = stock_adapter(family)
    convert_adapter(source, tmp_path / "old", "peft-fused", peft_version="0.18.1")
    convert_adapter(tmp_path / "old", tmp_path / "new", "peft-fused", peft_version="0.21.2")
    assert_same_files(tmp_path / "new", source)
    base = load_base(checkpoint(family))
    layout = next(iter(base.layouts.values()))
    found = tensors(tmp_path / "old")[f"base_model.model.{layout.module}.lora_A.weight"]
    h, i = layout.hidden_size, layout.intermediate_size
    assert found.shape[1] == (i if family == "gpt_oss" else h)
    for adapter in (tmp_path / "old", tmp_path / "new"):
        merge_adapter(adapter, checkpoint(family), tmp_path / f"{adapter.name}-merged", progress=False)
    for shard in (tmp_path / "new-merged").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "old-merged" / shard.name).read_bytes()


def test_shapes_that_fit_both_orders_need_the_version(tmp_path: Path) -> None:
    base = tmp_path / "base"  # H = 2I, so gate_up_proj is square
    base.mkdir()
    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"hidden_size": 24}))
    random = torch.Generator().manual_seed(0)
    state = {}
    for layer in (0, 1):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        state[f"{prefix}.lora_A.weight"] = torch.randn(10, 24, generator=random)
        state[f"{prefix}.lora_B.weight"] = torch.randn(24, 10, generator=random)
    found = {}
    for version in ("0.18.1", "0.19.0.dev0@1234", None):
        adapter = tmp_path / "adapter"
        adapter.mkdir(exist_ok=True)
        save_file(state, adapter / WEIGHTS)
        content = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "peft_version": version}
        (adapter / "adapter_config.json").write_text(
            json.dumps(content | {"target_parameters": ["experts.gate_up_proj"]})
        )
        if version is None:
            with pytest.raises(ArgumentError, match="expected peft_version"):
                read_adapter(adapter, load_base(base))
        else:
            experts = read_adapter(adapter, load_base(base))[0].experts["model.layers.1.mlp.experts"]
            found[version] = torch.cat([experts["gate_proj"].delta(3), experts["up_proj"].delta(3)])
    assert not torch.equal(*found.values())
    torch.testing.assert_close(found["0.18.1"], found["0.19.0.dev0@1234"].T)


@pytest.mark.parametrize("family", PER_EXPERT_ON_DISK)
def test_stock_peft_loads_per_expert(family: str, tmp_path: Path) -> None:
    source, merged = stock_adapter(family)
    convert_adapter(source, tmp_path / "adapter", "per-expert")
    assert largest_difference(stock_merge(family, tmp_path / "adapter"), merged) <= 1e-6
    names = {key.partition(".lora_")[0].rpartition(".")[2] for key in tensors(tmp_path / "adapter")}
    assert names >= ({"w1", "w2", "w3"} if family == "mixtral" else {"gate_proj", "up_proj", "down_proj"})


def test_scalings_that_one_number_cannot_hold(tmp_path: Path) -> None:
    pattern = {"layers.0.mlp.experts.gate_up_proj": 4, r".*layers\.1\.mlp\.experts\.gate_up_proj": 16}
    source, merged = stock_adapter("qwen3", json.dumps({"alpha_pattern": pattern}))
    done = convert_adapter(source, tmp_path / "exact", "per-expert")
    assert done.lossless, "powers of two"
    assert largest_difference(stock_merge("qwen3", tmp_path / "exact"), merged) <= 1e-6
    pattern = {r".*layers\.1\.mlp\.experts\.gate_up_proj": 5.6}
    source, merged = stock_adapter("qwen3", json.dumps({"alpha_pattern": pattern}))
    done = convert_adapter(source, tmp_path / "rounded", "per-expert")
    assert not done.lossless
    assert all("layers.1" in line and "rounded" in line for line in done.lost)
    assert largest_difference(stock_merge("qwen3", tmp_path / "rounded"), merged) <= 1e-6


@pytest.mark.parametrize("via", FORMATS)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_adapted_layers(bias: str, via: str, tmp_path: Path) -> None:
    """PEFT names them as it does its copies of base weights: behind ``base_layer``."""
    options = {"bias": bias, "target_modules": ["q_proj"]}
    source, merged = stock_adapter("qwen2", json.dumps(options))
    assert convert_adapter(source, tmp_path / "there", via).lossless
    convert_adapter(tmp_path / "there", tmp_path / "back", "peft-fused")
    assert_same_files(tmp_path / "back", source)
    if via != "ktransformers":
        assert largest_difference(stock_merge("qwen2", tmp_path / "there"), merged) <= 1e-6


def test_biases_of_adapted_experts(tmp_path: Path) -> None:
    """PEFT before 0.21 stores every entry with ``bias`` in its name, those of experts too."""
    source, _ = stock_adapter("gpt_oss", json.dumps({"bias": "all"}))
    shutil.copytree(source, tmp_path / "old")
    state = load_file(source / WEIGHTS)
    name = "base_model.model.model.layers.1.mlp.experts.base_layer.base_layer.down_proj_bias"
    state[name] = torch.randn(5, 28)
    save_file(state, tmp_path / "old" / WEIGHTS)
    assert convert_adapter(tmp_path / "old", tmp_path / "new", "peft-fused").lossless
    assert_same_files(tmp_path / "new", tmp_path / "old")
    merge_adapter(tmp_path / "old", checkpoint("gpt_oss"), tmp_path / "merged", progress=False)
    found = model_of(tmp_path / "merged").state_dict()["model.layers.1.mlp.experts.down_proj_bias"]
    assert torch.equal(found, state[name])
    state["base_model.model.model.layers.1.mlp.experts.down_proj_bias"] = torch.randn(5, 28)
    save_file(state, tmp_path / "old" / WEIGHTS)
    with pytest.raises(ArgumentError, match=r"expected one entry for model\..*experts.down_proj_bias, got "):
        convert_adapter(tmp_path / "old", tmp_path / "twice", "peft-fused")


def test_one_scaling_for_servers(tmp_path: Path) -> None:
    options = {"alpha_pattern": {"down_proj": 2, "o_proj": 32}, "rank_pattern": {"o_proj": 2}}
    source, merged = stock_adapter("qwen3", json.dumps(options))
    done = convert_adapter(source, tmp_path / "adapter", "per-expert", one_scaling=True)
    assert done.lossless
    config = config_of(tmp_path / "adapter")
    assert set(config["alpha_pattern"]) == {
        r"model\.layers\.0\.self_attn\.o_proj(\.weight)?",
        r"model\.layers\.1\.self_attn\.o_proj(\.weight)?",
    }
    ranks = {**config["rank_pattern"]}
    assert all(
        alpha / ranks[name] == config["lora_alpha"] / config["r"]
        for name, alpha in config["alpha_pattern"].items()
    )
    assert largest_difference(stock_merge("qwen3", tmp_path / "adapter"), merged) <= 1e-6
    with pytest.raises(ArgumentError, match="one_scaling"):
        convert_adapter(source, tmp_path / "other", "peft-fused", one_scaling=True)


def test_a_rounded_type_is_said(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    done = convert_adapter(source, tmp_path / "bf16", "ktransformers", dtype=torch.bfloat16)
    assert not done.lossless
    assert "bfloat16" in done.lost[0]
    done = convert_adapter(tmp_path / "bf16", tmp_path / "fp32", "peft-fused", dtype=torch.float32)
    assert done.lossless, "bfloat16 fits into float32"


@pytest.mark.parametrize("to", FORMATS)
def test_a_scaling_of_zero(to: str, tmp_path: Path) -> None:
    """One layer's experts of lora_alpha 0, the first that is read: the others keep theirs."""
    source, merged = stock_adapter(
        "qwen3", json.dumps({"alpha_pattern": {"layers.0.mlp.experts.gate_up_proj": 0}})
    )
    done = convert_adapter(source, tmp_path / "there", to)
    back = convert_adapter(tmp_path / "there", tmp_path / "back", "peft-fused")
    assert back.lossless
    assert largest_difference(stock_merge("qwen3", tmp_path / "back"), merged) <= 1e-6
    assert done.lossless == (to == "peft-fused")
    for line in done.lost:
        assert re.search(r"layers\.0.*B became zero: its scaling of 0 had to become 2", line), line


@pytest.mark.parametrize("zero", ["gate_proj", "up_proj"])
def test_a_scaling_of_zero_of_gate_or_up(zero: str, tmp_path: Path) -> None:
    layout = next(iter(load_base(checkpoint("qwen3")).layouts.values()))
    given = {}
    for name in ("gate_proj", "up_proj"):
        a, b = torch.ones(5, 2, 28), torch.ones(5, 12, 2)
        given[name] = Factors(tuple(a), tuple(b), 0.0 if name == zero else 2.0)
    found, exact = fused(given["gate_proj"], given["up_proj"], layout)
    assert not exact
    assert found.scaling == 2
    for name, factors in given.items():
        assert torch.equal(found.delta(3)[layout.rows(name)], factors.delta(3))
    with pytest.raises(ArgumentError, match="scaling: expected one that 2 can be turned into, got 0"):
        folded(Factors(tuple(a), tuple(b), 2.0), 0.0)


def test_numbers_that_a_type_cannot_hold(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    state = load_file(source / WEIGHTS)
    for factor in (1e6, 1e-9):
        adapter = shutil.copytree(source, tmp_path / f"{factor:g}")
        changed = {key: tensor * factor if "lora_B" in key else tensor for key, tensor in state.items()}
        save_file(changed, adapter / WEIGHTS)
    with pytest.raises(ArgumentError, match=r"dtype: expected one for numbers up to .*, got torch\.float16"):
        convert_adapter(tmp_path / "1e+06", tmp_path / "x", "per-expert", dtype=torch.float16)
    assert not (tmp_path / "x").exists()
    done = convert_adapter(tmp_path / "1e-09", tmp_path / "x", "per-expert", dtype=torch.float16)
    assert not done.lossless
    assert any("became zero in float16" in line for line in done.lost)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float8_e4m3fn, torch.int8, torch.complex64, 16], ids=str)
def test_another_dtype_is_refused_first(dtype: Any, tmp_path: Path) -> None:
    floats = "torch.float64', 'torch.float32', 'torch.float16', 'torch.bfloat16"
    message = re.escape(f"dtype: expected None or one of ['{floats}'], got {dtype!r}")
    with pytest.raises(TypeError, match=f"^{message}$"):
        convert_adapter(tmp_path / "nowhere", tmp_path / "x", "per-expert", dtype=dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_the_other_floats_are_written(dtype: torch.dtype, tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    done = convert_adapter(source, tmp_path / "x", "per-expert", dtype=dtype)
    assert done.lossless == (dtype == torch.float64)
    assert {tensor.dtype for tensor in load_file(tmp_path / "x" / WEIGHTS).values()} == {dtype}


def test_experts_without_an_adapter(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    convert_adapter(source, tmp_path / "adapter", "per-expert")
    state = load_file(tmp_path / "adapter" / WEIGHTS)
    kept = {
        key: tensor
        for key, tensor in state.items()
        if ".1.mlp.experts.2." not in key and "layers.0.mlp.experts.4.up" not in key
    }
    assert len(kept) == len(state) - 6 - 2
    save_file(kept, tmp_path / "adapter" / WEIGHTS)
    done = convert_adapter(tmp_path / "adapter", tmp_path / "fused", "peft-fused")
    assert len(done.notes) == 4
    expected = stock_adapter("qwen3")[1]
    original = stock_merge("qwen3", source)
    found = stock_merge("qwen3", tmp_path / "fused")
    untouched = load_file_of_base("model.layers.1.mlp.experts.2.down_proj.weight")
    torch.testing.assert_close(found["model.layers.1.mlp.experts.down_proj"][2], untouched, rtol=0, atol=0)
    for expert in (0, 1, 3, 4):
        torch.testing.assert_close(
            found["model.layers.1.mlp.experts.down_proj"][expert],
            expected["model.layers.1.mlp.experts.down_proj"][expert],
        )
    assert largest_difference(original, expected) == 0


def load_file_of_base(key: str) -> torch.Tensor:
    for shard in checkpoint("qwen3").glob("*.safetensors"):
        state = load_file(shard)
        if key in state:
            return state[key]
    raise KeyError(key)


def test_what_has_no_form(tmp_path: Path) -> None:
    source, _ = stock_adapter("gpt_oss")
    for to in ("per-expert", "ktransformers"):
        with pytest.raises(ArgumentError, match=r"fused|interleaved"):
            convert_adapter(source, tmp_path / "x", to)
    with pytest.raises(ArgumentError, match="expected one of"):
        convert_adapter(source, tmp_path / "x", "gguf")
    source, _ = stock_adapter("qwen3")
    for version, expected in (
        ("new", "one like 0.19.1"),
        ("0.5", "at least 0.18"),
        ("0.17.1", "at least 0.18"),
    ):
        with pytest.raises(ArgumentError, match=f"^peft_version: expected {expected}, got '{version}'$"):
            convert_adapter(source, tmp_path / "x", "peft-fused", peft_version=version)
    shutil.copytree(source, tmp_path / "odd")
    for changes, message in (
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"r": 5}, "rank 5"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"base_model_name_or_path": None}, "base: expected"),
        ({"base_model_name_or_path": "nobody/nothing"}, "config.json as base"),
    ):
        write_config(tmp_path / "odd", **(config_of(source) | changes))
        with pytest.raises(ArgumentError, match=message):
            convert_adapter(tmp_path / "odd", tmp_path / "x", "per-expert")
    assert not (tmp_path / "x").exists()


def test_names_that_loading_would_take_for_experts(tmp_path: Path) -> None:
    source, _ = stock_adapter("deepseek")
    convert_adapter(source, tmp_path / "adapter", "per-expert")
    state = load_file(tmp_path / "adapter" / WEIGHTS)
    name = "base_model.model.model.layers.0.mlp.gate_proj"
    state[f"{name}.lora_A.weight"] = torch.ones(4, 28)
    state[f"{name}.lora_B.weight"] = torch.ones(20, 4)
    save_file(state, tmp_path / "adapter" / WEIGHTS)
    for to in ("peft-fused", "per-expert"):
        with pytest.raises(ArgumentError, match=r"layers\.0\.mlp\.gate_proj"):
            convert_adapter(tmp_path / "adapter", tmp_path / "x", to)
    done = convert_adapter(tmp_path / "adapter", tmp_path / "x", "peft-fused", peft_version="0.18.1")
    assert done.lossless, "PEFT 0.18 takes no name for another"


def test_another_result_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = stock_adapter("qwen3")
    convert_adapter(source, tmp_path / "adapter", "per-expert")
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    original = conversion.write_adapter

    def wrong(adapter: Any, *arguments: Any, **options: Any) -> Any:
        place = adapter.experts["model.layers.1.mlp.experts"]
        place = {**place, "up_proj": place["gate_proj"]}
        changed = type(adapter)(
            adapter.config, {**adapter.experts, "model.layers.1.mlp.experts": place}, adapter.linears
        )
        return original(changed, *arguments, **options)

    monkeypatch.setattr(conversion, "write_adapter", wrong)
    with pytest.raises(StateError, match=r"layers\.1\.mlp\.experts\.0\.up_proj"):
        convert_adapter(source, tmp_path / "adapter", "per-expert", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_ktransformers_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("kt_kernel")
    lora = pytest.importorskip("kt_kernel.sft.lora")
    to_sglang = pytest.importorskip("kt_kernel.sft.convert_kt_to_sglang_adapter")
    source, _ = stock_adapter("qwen3")
    convert_adapter(source, tmp_path / "kt", "ktransformers")
    stored = load_file(tmp_path / "kt" / KT)
    names = [f"{name}_lora_{side}" for name in ("gate", "up", "down") for side in "ab"]
    wrappers = [
        SimpleNamespace(
            layer_idx=layer,
            _fused_expert_lora_params=[
                torch.nn.Parameter(torch.zeros_like(stored[f"layers.{layer}.experts.{name}"])) for name in names
            ],
        )
        for layer in (0, 1)
    ]
    assert lora._load_fused_expert_lora(wrappers, str(tmp_path / "kt")) == 12
    to_sglang.convert_kt_to_sglang_adapter(
        tmp_path / "kt", tmp_path / "sglang", base_model_name_or_path=str(checkpoint("qwen3"))
    )
    convert_adapter(source, tmp_path / "per-expert", "per-expert")
    found, expected = load_file(tmp_path / "sglang" / WEIGHTS), load_file(tmp_path / "per-expert" / WEIGHTS)
    expected = {key.removeprefix("base_model.model."): tensor for key, tensor in expected.items()}
    assert set(found) == set(expected)
    assert all(same_bits(found[key], expected[key]) for key in expected)
    manifest = json.loads((tmp_path / "kt" / "kt_adapter_manifest.json").read_text())
    assert manifest["lora"] == {"rank": 4, "alpha": 8.0}
    assert manifest["artifacts"][KT]["size"] == (tmp_path / "kt" / KT).stat().st_size
    # As its converter reads it, without the prefix.
    convert_adapter(tmp_path / "sglang", tmp_path / "back", "per-expert")
    assert_same_files(tmp_path / "back", tmp_path / "per-expert")
