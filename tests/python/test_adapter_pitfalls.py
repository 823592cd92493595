"""What would be lost, mixed up or written wrongly without a word: names that two modules share, two entries of
one matrix, mount points, full disks, sums that are too large, code that comes with a checkpoint."""

from __future__ import annotations

import builtins
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adapter_cases import (
    OPTIONS,
    checkpoint,
    config_of,
    draw_factors,
    largest_difference,
    merged_state,
    model_of,
    stock_adapter,
    stock_merge,
    write_config,
)
from amx_sft_moe import ArgumentError, StateError
from amx_sft_moe.adapters import (
    check_adapter,
    convert_adapter,
    files,
    inspect_adapter,
    live,
    load_base,
    merge_adapter,
    read_adapter,
    save_per_expert,
)
from amx_sft_moe.adapters.cli import main
from amx_sft_moe.checkpoints import load_model

WEIGHTS = "adapter_model.safetensors"
EXPERT = "model.layers.0.mlp.experts.1."


def trained(family: str, **options: Any) -> Any:
    model = get_peft_model(model_of(checkpoint(family)), LoraConfig(**(OPTIONS | options)))
    draw_factors(model, seed=3)
    return model


@pytest.fixture
def per_expert(tmp_path: Path) -> Path:
    """An adapter in format per-expert that a test may change."""
    convert_adapter(stock_adapter("qwen3")[0], tmp_path / "per-expert", "per-expert", base=checkpoint("qwen3"))
    return tmp_path / "per-expert"


def change(adapter: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(adapter / WEIGHTS)
    state = {key: tensor.clone() for key, tensor in state.items()}
    how(state)
    save_file(state, adapter / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_a_shared_expert_with_names_of_the_experts(pattern: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {pattern: {"mlp.experts.down_proj": 12}}
    model = trained("qwen2", target_modules=["down_proj", "o_proj"], **options)
    save_per_expert(model, tmp_path / "saved")
    convert_adapter(tmp_path / "saved", tmp_path / "fused", "peft-fused", base=checkpoint("qwen2"))
    expected = merged_state(model)
    for name in ("saved", "fused"):
        assert largest_difference(stock_merge("qwen2", tmp_path / name), expected) < 1e-5


def test_what_was_saved_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly(adapter: Any, base: Any, kind: str, directory: Path, *rest: Any) -> tuple[list[str], int]:
        told = write(adapter, base, kind, directory, *rest)
        change(directory, lambda state: state[next(k for k in state if "o_proj.lora_B" in k)].mul_(2))
        return told

    write = live.write_adapter
    monkeypatch.setattr(live, "write_adapter", wrongly)
    with pytest.raises(StateError, match=r"o_proj: expected the same scaling \* B A after writing"):
        save_per_expert(trained("qwen3"), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_what_is_rounded_on_saving_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = trained("qwen3", alpha_pattern={"layers.0.mlp.experts.gate_up_proj": 0})
    with caplog.at_level(logging.WARNING, "amx_sft_moe"):
        save_per_expert(model, tmp_path)
    assert "B became zero: its scaling of 0" in caplog.text


SECOND = {
    "without the prefix": (EXPERT + "gate_proj", EXPERT + "gate_proj"),
    "of a linear": ("model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.o_proj"),
    "with another number": (
        EXPERT + "gate_proj",
        "base_model.model." + EXPERT.replace(".1.", ".01.") + "gate_proj",
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_two_entries_of_one_matrix(name: str, per_expert: Path, tmp_path: Path) -> None:
    first, second = SECOND[name]

    def add(state: dict[str, torch.Tensor]) -> None:
        for side in ("lora_A", "lora_B"):
            state[f"{second}.{side}.weight"] = 5 * state[f"base_model.model.{first}.{side}.weight"]

    change(per_expert, add)
    with pytest.raises(ArgumentError, match=r"expected one (lora_[AB]|adapter) of .*, got "):
        convert_adapter(per_expert, tmp_path / "out", "peft-fused", base=checkpoint("qwen3"))
    assert any(
        "expected one " in finding for finding in check_adapter(per_expert, checkpoint("qwen3")).findings
    )


def test_gate_and_up_of_two_types(per_expert: Path, tmp_path: Path) -> None:
    def round_gate(state: dict[str, torch.Tensor]) -> None:
        state.update({k: v.bfloat16() for k, v in state.items() if EXPERT + "gate_proj" in k})

    change(per_expert, round_gate)
    convert_adapter(per_expert, tmp_path / "fused", "peft-fused", base=checkpoint("qwen3"))
    base = load_base(checkpoint("qwen3"))
    before, after = (read_adapter(folder, base)[0].experts for folder in (per_expert, tmp_path / "fused"))
    for module, projections in before.items():
        for projection, factors in projections.items():
            for expert in range(5):
                assert torch.equal(after[module][projection].delta(expert), factors.delta(expert))


def test_a_mount_point_in_the_directory_stays(per_expert: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (per_expert / "volume").mkdir()
    (per_expert / "volume" / "precious").write_text("x")
    was = per_expert.stat().st_ino, (per_expert / "volume").stat().st_ino
    monkeypatch.setattr(files, "_mounts_in", lambda directory: [directory / "volume"])
    save_per_expert(trained("qwen3"), per_expert)
    assert (per_expert.stat().st_ino, (per_expert / "volume").stat().st_ino) == was
    assert (per_expert / "volume" / "precious").read_text() == "x"
    with (
        pytest.raises(
            ArgumentError, match=r"expected one that can be emptied, got .*, with a mount at .*volume$"
        ),
        files.replaced_directory(per_expert),
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["per-expert"]


def test_mount_points_are_found(tmp_path: Path) -> None:
    assert Path("/proc") in files._mounts_in(Path("/"))
    assert files._mounts_in(Path("/proc"))[0] == Path("/proc")
    assert files._mounts_in(tmp_path) == []
    table = tmp_path / "mountinfo"
    table.write_text("1 0 8:1 / /a\\040b\u2028 rw - ext4 /dev/x rw\n2 0 8:1 / /a rw - ext4 /dev/x rw\n")
    assert files._mounts_in(Path("/a b\u2028"), table) == [Path("/a b\u2028")]


def test_a_full_disk(per_expert: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    base = str(checkpoint("qwen3"))
    assert main(["convert", str(per_expert), str(tmp_path / "x"), "--to", "peft-fused", "--base", base]) == 2
    assert f"{WEIGHTS}: I/O error: No space left" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["per-expert"]


@pytest.mark.parametrize("number", [1e30, float("nan")])
def test_sums_that_are_not_finite_are_not_merged(number: float, per_expert: Path, tmp_path: Path) -> None:
    change(
        per_expert,
        lambda state: [v.fill_(number) for k, v in state.items() if "layers.1.self_attn.o_proj" in k],
    )
    with pytest.raises(ArgumentError, match=r"o_proj.weight: expected numbers up to .*, got (inf|nan)"):
        merge_adapter(per_expert, checkpoint("qwen3"), tmp_path / "merged", progress=False)
    assert not (tmp_path / "merged").exists()


def test_no_adapter_beside_a_pickled_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"without a checkpoint.*pytorch_model-00001"):
        save_per_expert(trained("qwen3"), tmp_path)


def test_an_architecture_under_another_model_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi K2 is a DeepSeek-V3 that brings code of its own: which nobody is asked to run, nor is it."""
    folder, asked = tmp_path / "kimi", []
    shutil.copytree(checkpoint("deepseek"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_deepseek.py").write_text("raise SystemExit('run')\n")
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(words) or "y")
    adapter, _ = stock_adapter("deepseek")
    assert load_model(folder).config.model_type == "deepseek_v3"
    convert_adapter(adapter, tmp_path / "out", "per-expert", base=folder)
    merge_adapter(adapter, folder, tmp_path / "merged", progress=False)
    convert_adapter(adapter, tmp_path / "known", "per-expert", base=checkpoint("deepseek"))
    found, expected = (load_file(tmp_path / name / WEIGHTS) for name in ("out", "known"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert config_of(tmp_path / "out")["rank_pattern"] == config_of(tmp_path / "known")["rank_pattern"]
    assert asked == []


def test_layers_with_different_parameters_are_inspected_apart(tmp_path: Path) -> None:
    targets = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    trained("qwen3", target_parameters=targets).save_pretrained(tmp_path)
    found = inspect_adapter(tmp_path)["experts"]
    assert {name: (group["layers"], group["weights"]) for name, group in found.items()} == {
        "gate_up_proj": ([0], 5),
        "down_proj": ([1], 5),
    }


@pytest.mark.parametrize("option", ["subfolder", "variant", "revision"])
def test_options_that_name_other_files(option: str) -> None:
    with pytest.raises(TypeError, match=rf"^options: expected the files of directory itself, got {option}$"):
        load_model(checkpoint("qwen3"), **{option: "other"})


def test_code_for_a_model_that_is_no_language_model_is_not_run(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(words) or "y")
    folder = tmp_path / "vit"
    shutil.copytree(checkpoint("qwen3"), folder)
    code = {"AutoModelForCausalLM": "modeling_vit.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "auto_map": code}))
    (folder / "modeling_vit.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(ArgumentError, match=r"vit: expected a causal language model, got 'vit': "):
        load_model(folder)
    assert asked == []


def loads_in_peft(adapter: Path, family: str) -> tuple[bool, str]:
    check = check_adapter(adapter, checkpoint(family))
    assert not check.findings
    found = next(one for one in check.loads if one.tool == "PEFT from 0.20")
    return found.loads, found.reason


def test_what_peft_drops_is_told(per_expert: Path, tmp_path: Path) -> None:
    assert loads_in_peft(per_expert, "qwen3") == (True, "fuses it while loading")
    names = config_of(per_expert)["target_modules"]
    write_config(per_expert, target_modules=[name for name in names if name != "down_proj"])
    loads, reason = loads_in_peft(per_expert, "qwen3")
    assert not loads
    assert reason.startswith("finds no target for model.layers.0.mlp.experts.down_proj")
    write_config(per_expert, target_modules=[name for name in names if name != "up_proj"])
    assert "targets: PEFT refuses them: ValueError: Cannot convert" in loads_in_peft(per_expert, "qwen3")[1]
    write_config(per_expert, target_modules="(")
    assert "targets: PEFT refuses them" in loads_in_peft(per_expert, "qwen3")[1]

    # A base whose names PEFT does not take for those of experts.
    save_per_expert(trained("qwen2"), tmp_path / "saved")
    assert loads_in_peft(tmp_path / "saved", "qwen2")[0]
    write_config(tmp_path / "saved", target_parameters=None)
    loads, reason = loads_in_peft(tmp_path / "saved", "qwen2")
    assert not loads
    assert "finds no target for model.layers.0.mlp.experts." in reason


def test_a_shared_expert_is_counted_apart(tmp_path: Path) -> None:
    save_per_expert(trained("qwen2", target_modules=["down_proj", "o_proj"]), tmp_path / "saved")
    found = inspect_adapter(tmp_path / "saved")
    shared, routed = found["others"]["down_proj"], found["experts"]["down_proj"]
    assert shared["weights"] == len(shared["layers"])
    assert routed["weights"] == routed["experts"] * len(routed["layers"])
