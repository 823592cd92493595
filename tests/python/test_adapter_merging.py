"""Adapters merged into checkpoints, against stock PEFT's own merge."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from adapter_cases import (
    EXPERTS,
    FAMILIES,
    OPTIONS,
    SIZES,
    checkpoint,
    fresh_directory,
    largest_difference,
    merged_state,
    model_of,
    stock_adapter,
    write_config,
)
from amx_sft_moe import ArgumentError
from amx_sft_moe.adapters import convert_adapter, merge_adapter, merging
from amx_sft_moe.checkpoints.files import INDEX

FORMATS = ("peft-fused", "per-expert", "ktransformers")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_against_stock_peft(family: str, to: str, tmp_path: Path) -> None:
    if family == "gpt_oss" and to != "peft-fused":
        pytest.skip("has no such form")
    source, merged = stock_adapter(family)
    convert_adapter(source, tmp_path / "adapter", to)
    base = checkpoint(family)
    done = merge_adapter(tmp_path / "adapter", base, tmp_path / "out", progress=False)
    found = model_of(tmp_path / "out").state_dict()
    assert largest_difference(found, merged) <= 1e-6
    before = model_of(base).state_dict()
    changed = {name for name in before if not torch.equal(before[name], found[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"gate_up_proj", "down_proj", "weight"}
    assert all(name.endswith(("_proj", "o_proj.weight")) for name in changed)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(p.name for p in base.iterdir())
    differ = 0
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
            continue
        one, other = load_file(path), load_file(tmp_path / "out" / path.name)
        differ += sum(not torch.equal(one[key], other[key]) for key in one)
        with safe_open(path, "pt") as old, safe_open(tmp_path / "out" / path.name, "pt") as new:
            assert new.metadata() == old.metadata()
    assert done.changed == differ


@pytest.mark.parametrize("block", [1, 300, 1 << 20])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_rows_at_a_time(family: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, merged = stock_adapter(family)
    fused = tmp_path / "fused"  # gate and up in one matrix on disk, whatever the family
    model_of(checkpoint(family)).save_pretrained(fused, save_original_format=False, max_shard_size="40KB")
    monkeypatch.setattr(merging, "BLOCK_BYTES", block)
    for base in (fused, checkpoint(family)):
        merge_adapter(source, base, tmp_path / "out", progress=False, overwrite=True)
        assert largest_difference(model_of(tmp_path / "out").state_dict(), merged) <= 1e-6


def test_a_bfloat16_checkpoint_is_rounded_once(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    base = checkpoint("qwen3", torch.bfloat16)
    merge_adapter(source, base, tmp_path / "out", progress=False)
    name = "model.layers.1.mlp.experts.down_proj"
    found = model_of(tmp_path / "out", torch.bfloat16).state_dict()[name]
    weight = model_of(base, torch.bfloat16).state_dict()[name].double()
    state = load_file(source / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.experts"
    a = state[f"{prefix}.lora_A.weight"].double().reshape(5, 4, -1)
    b = state[f"{prefix}.lora_B.weight"].double().reshape(-1, 4, 5).permute(2, 0, 1)
    exact = weight + 2 * b @ a
    spacing = 2.0 ** (exact.abs().log2().floor() - 7)
    assert ((found.double() - exact).abs() <= 0.501 * spacing).all()


def test_whole_weights_replace(tmp_path: Path) -> None:
    source, merged = stock_adapter("qwen3", json.dumps({"modules_to_save": ["lm_head"]}))
    base = checkpoint("qwen3")
    merge_adapter(source, base, tmp_path / "out", progress=False)
    found = model_of(tmp_path / "out").state_dict()
    assert not torch.equal(found["lm_head.weight"], model_of(base).state_dict()["lm_head.weight"])
    assert largest_difference(found, merged) <= 1e-6


def tied_checkpoint(folder: Path) -> Path:
    """Its head is its embedding: a checkpoint without a head."""
    name, sizes = FAMILIES["qwen3"]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES, **sizes, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as held:
        assert "lm_head.weight" not in held.keys()  # noqa: SIM118
    return folder


@pytest.mark.parametrize("which", ["embed_tokens", "lm_head"])
def test_one_of_two_tied_weights_alone_is_refused(which: str, tmp_path: Path) -> None:
    """PEFT trains a copy of it; merged it would change the other too."""
    base = tied_checkpoint(tmp_path / "base")
    model = get_peft_model(model_of(base), LoraConfig(**OPTIONS, modules_to_save=[which]))
    model.save_pretrained(tmp_path / "adapter")
    message = (
        rf"adapter: expected the same new weight for model\.embed_tokens\.weight and lm_head\.weight.*{which}"
    )
    with pytest.raises(ArgumentError, match=message):
        merge_adapter(tmp_path / "adapter", base, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_two_tied_weights_that_stay_alike_are_merged(tmp_path: Path) -> None:
    base = tied_checkpoint(tmp_path / "base")
    whole = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    model = get_peft_model(model_of(base), LoraConfig(**OPTIONS, **whole))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    merged = merged_state(model)
    merge_adapter(tmp_path / "adapter", base, tmp_path / "out", progress=False)
    assert largest_difference(model_of(tmp_path / "out").state_dict(), merged) <= 1e-6
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(file)
    state["base_model.model.lm_head.weight"] = state["base_model.model.lm_head.weight"] + 1
    save_file(state, file)
    with pytest.raises(ArgumentError, match=r"tied in the checkpoint .*, got different ones of the two"):
        merge_adapter(tmp_path / "adapter", base, tmp_path / "other", progress=False)


def test_an_adapter_beside_the_checkpoint_is_not_copied(tmp_path: Path) -> None:
    """from_pretrained would apply it to weights that have it already."""
    source, merged = stock_adapter("qwen3")
    base = shutil.copytree(checkpoint("qwen3"), tmp_path / "base")
    before = {path.name for path in base.iterdir()}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(source / name, base)
    merge_adapter(base, base, tmp_path / "out", progress=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == before
    assert largest_difference(model_of(tmp_path / "out").state_dict(), merged) <= 1e-6


OTHER_WEIGHTS = (
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "consolidated.safetensors"),
    *("Model-Q4.GGUF", "optimizer.pt", "tf_model.h5"),
)
NO_WEIGHTS = (
    *("tokenizer.model", "tokenizer.json", "tokenizer.bin", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("modeling_custom.py", "README.md", "qwen.tiktoken", "training_args.bin", "params.json"),
)


@pytest.mark.parametrize("whole", [True, False], ids=["one file", "shards"])
def test_weights_that_were_not_read_are_left_out(
    whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loader may prefer them to the merged ones."""
    source, merged = stock_adapter("qwen3")
    base = tmp_path / "base"
    model_of(checkpoint("qwen3")).save_pretrained(base, max_shard_size="1GB" if whole else "40KB")
    ours = {path.name for path in base.iterdir()}
    others = {*OTHER_WEIGHTS, "model-00009-of-00009.safetensors", *([INDEX] if whole else [])}
    for name in (*others, *NO_WEIGHTS):
        (base / name).write_text(name)
    (base / "original").mkdir()
    (base / "original" / "consolidated.00.pth").write_text("")
    done = merge_adapter(source, base, tmp_path / "out", progress=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*ours, *NO_WEIGHTS}
    assert all((tmp_path / "out" / name).read_text() == name for name in NO_WEIGHTS)
    assert done.left_out == tuple(sorted(others))
    [record] = [one for one in caplog.records if one.name == "amx_sft_moe"]
    assert record.getMessage().endswith(f"unmerged weights: {', '.join(sorted(others))}")
    assert largest_difference(model_of(tmp_path / "out").state_dict(), merged) <= 1e-6


def test_space_for_the_other_files_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = stock_adapter("qwen3")
    base = shutil.copytree(checkpoint("qwen3"), tmp_path / "base")
    needed = sum(path.stat().st_size for path in base.iterdir()) + 1000
    (base / "tokenizer.model").write_bytes(bytes(1000))
    (base / "model.gguf").write_bytes(bytes(1000))

    def merge(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, free))
        merge_adapter(source, base, tmp_path / "out", progress=False)

    with pytest.raises(ArgumentError, match=f"expected {needed:,} bytes of free space"):
        merge(needed - 1)
    merge(needed)


def test_numbers_that_the_checkpoint_cannot_hold_are_refused(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3", json.dumps({"modules_to_save": ["lm_head"]}))
    base = checkpoint("qwen3", torch.float16)
    state = load_file(source / "adapter_model.safetensors")
    factors = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    for key, name in ((factors, "o_proj"), ("base_model.model.lm_head.weight", "lm_head")):
        adapter = shutil.copytree(source, tmp_path / name)
        save_file({**state, key: state[key] * 1e6}, adapter / "adapter_model.safetensors")
        with pytest.raises(
            ArgumentError, match=rf"{name}\.weight: expected numbers up to 65504 .*float16.*, got "
        ):
            merge_adapter(adapter, base, tmp_path / "out", progress=False)
        assert not (tmp_path / "out").exists()
    merge_adapter(source, base, tmp_path / "out", progress=False)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_adapted_layers(bias: str, to: str, tmp_path: Path) -> None:
    options = {"bias": bias, "target_modules": ["q_proj"]}
    source, merged = stock_adapter("qwen2", json.dumps(options))
    convert_adapter(source, tmp_path / "adapter", to)
    merge_adapter(tmp_path / "adapter", checkpoint("qwen2"), tmp_path / "out", progress=False)
    found = model_of(tmp_path / "out").state_dict()
    name = "model.layers.1.self_attn.q_proj.bias"
    assert not torch.equal(found[name], model_of(checkpoint("qwen2")).state_dict()[name])
    assert largest_difference(found, merged) <= 1e-6


def test_whole_experts(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3", json.dumps({"target_parameters": EXPERTS[1:]}))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    state = load_file(source / "adapter_model.safetensors")
    state[f"base_model.model.{name}"] = torch.randn(5, 24, 28)
    shutil.copytree(source, tmp_path / "adapter")
    save_file(state, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ArgumentError, match=rf"modules that the checkpoint .* holds, got {name}"):
        merge_adapter(tmp_path / "adapter", checkpoint("qwen3"), tmp_path / "out", progress=False)
    model_of(checkpoint("qwen3")).save_pretrained(tmp_path / "fused", save_original_format=False)
    merge_adapter(tmp_path / "adapter", tmp_path / "fused", tmp_path / "out", progress=False)
    assert torch.equal(model_of(tmp_path / "out").state_dict()[name], state[f"base_model.model.{name}"])


def test_what_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = stock_adapter("qwen3")
    base, out = checkpoint("qwen3"), tmp_path / "out"

    def merge(where: Path) -> None:
        merge_adapter(source, base, where, overwrite=True, progress=False)

    out.mkdir()
    merge(out)
    (out / "amx_sft_moe-experts").mkdir()  # load_model's
    merge(out)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in base.iterdir())
    (out / "runs").mkdir()
    with pytest.raises(ArgumentError, match=f"no folders, got {out} with runs$"):
        merge(out)
    (out / "runs").rmdir()
    monkeypatch.chdir(out)
    merge(Path())
    home = tmp_path / "home"
    for names in (["thesis.tex"], ["config.json"], ["a", "b", "c", "d", "e", "model.safetensors"]):
        home.mkdir()
        for name in names:
            (home / name).write_text("mine")
        monkeypatch.chdir(home)
        for where in (home, Path()):
            with pytest.raises(
                ArgumentError, match=f"out: expected, to overwrite, .* with {', '.join(names[:4])}"
            ):
                merge(where)
        assert sorted(path.name for path in home.iterdir()) == names
        shutil.rmtree(home)


def test_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = stock_adapter("qwen3")
    base = tmp_path / "base"

    def refused(message: str, adapter: Path = source) -> None:
        with pytest.raises(ArgumentError, match=message):
            merge_adapter(adapter, base, tmp_path / "out", progress=False)
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out")]

    shutil.copytree(checkpoint("qwen3"), base)
    index = json.loads((base / INDEX).read_text())
    shard = index["weight_map"]["model.layers.1.mlp.experts.3.up_proj.weight"]
    state = load_file(base / shard)
    weight = state.pop("model.layers.1.mlp.experts.3.up_proj.weight")
    save_file(state, base / shard)
    refused(r"model\.layers\.1\.mlp\.experts\.3\.up_proj \(1 are missing")
    state["model.layers.1.mlp.experts.3.up_proj.weight"] = weight[:5]
    save_file(state, base / shard)
    refused(r"experts\.3\.up_proj\.weight: expected \[12, 28\] for each expert, got \[5, 28\]")
    state["model.layers.1.mlp.experts.3.up_proj.weight"] = weight.to(torch.float8_e4m3fn)
    save_file(state, base / shard)
    refused("expected one of .*'F32'.*, got F8_E4M3")
    (base / shard).write_bytes((base / shard).read_bytes()[:-100])
    refused(f"{shard}: expected a safetensors file")
    (base / shard).unlink()
    refused(f"got no {shard}")
    (base / INDEX).write_text("{}")
    refused("expected JSON with a weight_map")
    state = {key: tensor.clone() for key, tensor in model_of(checkpoint("qwen3")).state_dict().items()}
    save_file(state, tmp_path / "of-the-user.safetensors")
    (base / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, "../of-the-user.safetensors")}))
    refused("expected the name of a file beside it, got '../of-the-user.safetensors'")
    (base / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, 3)}))
    refused("expected the name of a file beside it, got 3")
    shutil.rmtree(base)
    shutil.copytree(checkpoint("qwen3"), base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refused("not quantised")
    (base / "config.json").write_text(json.dumps(config))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        refused("bytes of free space")
    shutil.copytree(source, tmp_path / "adapter")
    write_config(tmp_path / "adapter", init_lora_weights="pissa")
    refused("init_lora_weights", tmp_path / "adapter")
    with pytest.raises(ArgumentError, match="another directory"):
        merge_adapter(source, base, base, overwrite=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(ArgumentError, match="does not exist"):
        merge_adapter(source, base, tmp_path / "out")


MEMORY = """
import resource, sys, torch
from amx_sft_moe.adapters import merge_adapter
import amx_sft_moe.adapters.merging
torch.ones(300, 300) @ torch.ones(300, 300)  # the libraries' own buffers
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge_adapter(*sys.argv[1:4], progress=False)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_stays_small(tmp_path: Path) -> None:
    """A checkpoint of 200 MB in two shards, one of them fused, is merged in a fraction of that."""
    hidden, width, experts = 512, 256, 64
    base = fresh_directory()
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2}
    config |= {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": experts, "vocab_size": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 8}
    (base / "config.json").write_text(json.dumps(config))
    prefix = "model.layers.0.mlp.experts"
    single = {}
    for expert in range(experts):
        for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            single[f"{prefix}.{expert}.{name}_proj.weight"] = torch.ones(shape)
    fused = {
        "model.layers.1.mlp.experts.gate_up_proj": torch.ones(experts, 2 * width, hidden),
        "model.layers.1.mlp.experts.down_proj": torch.ones(experts, hidden, width),
    }
    names = {"model-1.safetensors": single, "model-2.safetensors": fused}
    for name, state in names.items():
        save_file(state, base / name)
    weight_map = {key: name for name, state in names.items() for key in state}
    (base / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    size = sum((base / name).stat().st_size for name in names)
    assert size > 190e6
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    state = {}
    for layer in (0, 1):
        for inner, (out_size, in_size) in ((".base_layer", (2 * width, hidden)), ("", (hidden, width))):
            name = f"base_model.model.model.layers.{layer}.mlp.experts{inner}"
            state[f"{name}.lora_A.weight"] = torch.full((experts * 2, in_size), 0.5)
            state[f"{name}.lora_B.weight"] = torch.full((out_size, 2 * experts), 0.25)
    save_file(state, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_parameters": EXPERTS})
    )
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, str(adapter), str(base), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split()[-2:])
    adapter_size = (adapter / "adapter_model.safetensors").stat().st_size
    assert (after - before) * 1024 < adapter_size + 40e6 < size / 4
    for name in names:
        found = load_file(tmp_path / "out" / name)
        assert all((tensor == 1 + 4 * 2 * 0.5 * 0.25).all() for tensor in found.values())


@pytest.mark.parametrize("where", [slice(0, 9), slice(9, None), slice(0, None, 2), slice(1, None, 2)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_any_rows_of_any_layout(where: slice, transposed: bool) -> None:
    """Also gate and up interleaved without being transposed, which no family has today."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 7, generator=random), torch.randn(9, 2, generator=random)
    expected = torch.zeros(18, 7)
    expected[where] = 3 * b @ a
    expected = expected.T if transposed else expected
    for block in (1, 2, 4, 5, 18):
        found = torch.zeros_like(expected)
        for first in range(0, len(found), block):
            rows = slice(first, min(first + block, len(found)))
            merging._add(found[rows], merging._Change(where, a, b, 3.0), rows, transposed)
        torch.testing.assert_close(found, expected)
