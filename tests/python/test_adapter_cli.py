"""``python -m amx_sft_moe adapter``: what it says, and what inspect and check find."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_cases import checkpoint, stock_adapter, write_config
from amx_sft_moe.__main__ import main as amx_sft_moe
from amx_sft_moe.adapters import check_adapter, convert_adapter, inspect_adapter

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    convert_adapter(stock_adapter("qwen3")[0], tmp_path / "single", "per-expert")
    return tmp_path / "single"


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capfd.readouterr()
    status = amx_sft_moe(["adapter", *map(str, arguments)])
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    return status, said.out


def test_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, _ = stock_adapter("qwen3")
    status, said = run(
        capfd, "convert", source, tmp_path / "kt", "--to", "ktransformers", "--dtype", "bfloat16"
    )
    assert status == 0
    assert "(peft-fused) ->" in said
    assert "lossless: no\n  lost: factors were rounded to bfloat16" in said
    status, said = run(capfd, "convert", tmp_path / "kt", tmp_path / "pe", "--to", "per-expert")
    assert status == 0
    assert "verified: 20 products" in said
    assert "lossless: yes" in said
    status, said = run(capfd, "merge", tmp_path / "pe", checkpoint("qwen3"), tmp_path / "m", "--no-progress")
    assert status == 0
    assert "32 of " in said
    assert run(capfd, "merge", tmp_path / "pe", checkpoint("qwen3"), tmp_path / "m")[0] == 2
    assert run(capfd, "check", tmp_path / "pe")[0] == 0
    assert "nothing wrong found" in run(capfd, "check", tmp_path / "pe")[1]
    assert "vLLM, SGLang    yes" in run(capfd, "check", tmp_path / "pe")[1]
    assert json.loads(run(capfd, "check", tmp_path / "kt", "--json")[1])["findings"] == []
    for command in ([], ["--help"], ["convert", "--help"], ["nothing"]):
        with pytest.raises(SystemExit):
            amx_sft_moe(["adapter", *command])


def refusal(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    capfd.readouterr()
    assert amx_sft_moe(["adapter", *map(str, arguments)]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("to", ["peft-fused", "per-expert", "ktransformers"])
def test_a_checkpoint_stays_without_an_adapter(
    to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, _ = stock_adapter("qwen3")
    base = shutil.copytree(checkpoint("qwen3"), tmp_path / "base")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    for options in ([], ["--overwrite"]):
        said = refusal(capfd, "convert", source, base, "--to", to, "--base", base, *options)
        assert "target: expected a directory without a checkpoint, which would be loaded with the ada" in said
        assert f"got {base} with config.json and model-00001-of-" in said
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


def test_an_empty_path_is_not_the_current_directory(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    base = checkpoint("qwen3")
    for place in (single, base, tmp_path / "here"):  # an adapter, a model, nothing
        monkeypatch.chdir(place)
        before = sorted(place.iterdir())
        for name, arguments in (
            ("target", ("convert", single, "", "--to", "peft-fused")),
            ("source", ("convert", "", tmp_path / "new", "--to", "peft-fused")),
            ("base", ("convert", single, tmp_path / "new", "--to", "peft-fused", "--base", "")),
            ("adapter", ("inspect", "")),
            ("base", ("check", single, "--base", "")),
            ("adapter", ("merge", "", base, tmp_path / "new")),
            ("base_checkpoint", ("merge", single, "", tmp_path / "new")),
            ("out", ("merge", single, base, "", "--overwrite")),
        ):
            assert refusal(capfd, *arguments) == f"error: {name}: expected a directory, got ''\n"
        assert sorted(place.iterdir()) == before
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["nope", "nobody/nothing", "no/such/folder", "no name"])
def test_a_base_that_is_nowhere(name: str, single: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = refusal(capfd, "check", single, "--base", name)
    assert said.endswith(f"got {name}: no such folder, and not in the cache\n")
    write_config(single, base_model_name_or_path=name)
    assert (
        f"(base: expected a directory with config.json, or a name in the local Hugging Face cache, got {name}"
        in (run(capfd, "check", single)[1])
    )


def test_a_cached_base_that_is_broken(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "cache" / "models--nobody--broken"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("1" * 40)
    (model / "snapshots" / ("1" * 40)).mkdir(parents=True)
    (model / "snapshots" / ("1" * 40) / "config.json").write_text('{"model_type": "abacus"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    said = refusal(capfd, "check", single, "--base", "nobody/broken")
    assert "expected the config.json of a model that transformers knows, got nobody/broken: ValueError" in said


@pytest.mark.parametrize("to", ["peft-fused", "per-expert", "ktransformers"])
def test_inspect(to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, _ = stock_adapter("qwen3", json.dumps({"rank_pattern": {"down_proj": 2}}))
    convert_adapter(source, tmp_path / "a", to)
    found = json.loads(run(capfd, "inspect", tmp_path / "a", "--json")[1])
    assert found == json.loads(json.dumps(inspect_adapter(tmp_path / "a")))
    assert found["format"] == to
    assert found["base_model"] == str(checkpoint("qwen3"))
    assert found["dtypes"] == ["float32"]
    tensors = {k: v for file in (tmp_path / "a").glob("*.safetensors") for k, v in load_file(file).items()}
    assert found["tensors"] == len(tensors)
    assert found["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert found["bytes"] == 4 * found["parameters"]
    names = {"down_proj", "gate_up_proj"} if to == "peft-fused" else {"down_proj", "gate_proj", "up_proj"}
    assert set(found["experts"]) == names
    down = found["experts"]["down_proj"]
    assert (down["weights"], down["layers"], down["experts"]) == (10, [0, 1], 5)
    assert down["ranks"] == ([4] if to == "ktransformers" else [2])
    assert down["zero_b"] == down["not_finite"] == 0
    gate = found["experts"]["gate_up_proj" if to == "peft-fused" else "gate_proj"]
    assert (gate["ranks"], gate["scalings"]) == ([4], [2.0])
    keys = [key for key in tensors if "gate" in key or "base_layer" in key]
    largest = max(float(tensors[key].abs().max()) for key in keys if "lora_a" in key.lower())
    assert gate["max_abs_a"] == pytest.approx(largest)
    assert found["others"]["o_proj"]["weights"] == 2
    text = run(capfd, "inspect", tmp_path / "a")[1]
    assert f": {to}\n" in text
    assert "o_proj" in text


def test_inspect_finds_untrained_and_broken_numbers(single: Path) -> None:
    state = load_file(single / WEIGHTS)
    prefix = "base_model.model.model.layers.1.mlp.experts"
    state[f"{prefix}.3.up_proj.lora_B.weight"].zero_()
    state[f"{prefix}.2.up_proj.lora_A.weight"][0, :2] = torch.tensor([float("nan"), float("-inf")])
    save_file(state, single / WEIGHTS)
    found = inspect_adapter(single)["experts"]["up_proj"]
    assert found["not_finite"] == 2
    assert found["zero_b_first"] == [f"{prefix}.3.up_proj".removeprefix("base_model.model.")]
    check = check_adapter(single)
    assert [finding for finding in check.findings if "2 NaN or Inf" in finding]
    source, _ = stock_adapter("qwen3")
    shutil.copytree(source, single.parent / "fused")
    state = load_file(source / WEIGHTS)
    b = state[f"{prefix}.lora_B.weight"]
    b.reshape(b.shape[0], 4, 5)[:, :, 2] = 0  # experts innermost
    save_file(state, single.parent / "fused" / WEIGHTS)
    assert inspect_adapter(single.parent / "fused")["experts"]["down_proj"]["zero_b_first"] == [
        "model.layers.1.mlp.experts.down_proj[2]"
    ]


@pytest.mark.parametrize("to", ["peft-fused", "per-expert", "ktransformers"])
def test_check_reads_every_number(to: str, tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3", json.dumps({"modules_to_save": ["lm_head"]}))
    convert_adapter(source, tmp_path / "a", to)
    other = {"lora_A.": "lora_B.", "lora_B.": "lora_A.", "_lora_a": "_lora_b", "_lora_b": "_lora_a"}

    def told(path: Path, state: dict[str, torch.Tensor]) -> int:
        save_file(state, path)
        return sum("got 1 NaN or Inf" in finding for finding in check_adapter(tmp_path / "a").findings)

    for path in (tmp_path / "a").glob("*.safetensors"):
        state = load_file(path)
        for key in (key for key in state if not re.search(r"layers\.0\.|experts\.[0-3]\.", key)):
            spoilt = {**state, key: state[key].clone()}
            spoilt[key].view(-1)[-1] = float("nan")
            assert told(path, spoilt) == 1, key
            for half in (half for half in other if half in key):
                del spoilt[key.replace(half, other[half])]
                assert told(path, spoilt) == 1, f"{key} alone"
        save_file(state, path)


def test_check_tells_every_finding(single: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = load_file(single / WEIGHTS)
    prefix = "base_model.model.model.layers.1"
    del state[f"{prefix}.mlp.experts.3.up_proj.lora_B.weight"]
    state[f"{prefix}.nothing.lora_A.weight"] = state[f"{prefix}.nothing.lora_B.weight"] = torch.ones(4, 4)
    state[f"{prefix}.nothing.lora_B.weight"] = torch.ones(4, 4)
    state[f"{prefix}.self_attn.o_proj.lora_magnitude_vector"] = torch.ones(28)
    for key in [key for key in state if "layers.0.mlp.experts.2" in key]:
        del state[key]
    save_file(state, single / WEIGHTS)
    status, said = run(capfd, "check", single)
    assert status == 1
    findings = check_adapter(single, checkpoint("qwen3")).findings
    for word in ("experts.3.up_proj: expected lora_A and lora_B", "nothing", "magnitude_vector", "experts [2]"):
        assert any(word in finding for finding in findings), word
        assert word in said
    write_config(single, base_model_name_or_path="nobody/nothing")
    check = check_adapter(single)
    assert any("not compared with a base model" in note for note in check.notes)
    assert any("experts.3.up_proj" in finding for finding in check.findings)


def test_check_says_who_would_scale_it_wrongly(single: Path) -> None:
    def reasons() -> dict[str, tuple[bool, str]]:
        check = check_adapter(single)
        assert check.findings == ()
        return {one.tool: (one.loads, one.reason) for one in check.loads}

    assert reasons()["vLLM, SGLang"][0]
    assert reasons()["PEFT from 0.20"][0]
    assert not reasons()["PEFT 0.18"][0]
    write_config(single, alpha_pattern={"o_proj": 5})
    assert reasons()["PEFT from 0.20"][0]
    assert reasons()["vLLM, SGLang"][0] is False
    assert "--one-scaling" in reasons()["vLLM, SGLang"][1]
    write_config(single, alpha_pattern={}, use_rslora=True)  # as a model of transformers 4 trains it
    assert reasons()["vLLM, SGLang"][0]
    loads, why = reasons()["PEFT from 0.20"]
    assert not loads
    assert "scaling 5.65685" in why
    write_config(single, use_rslora=False, lora_dropout=0.1)
    assert "lora_dropout" in reasons()["PEFT from 0.20"][1]
