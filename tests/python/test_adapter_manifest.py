"""KTransformers' manifest: what ``check`` says of an adapter whose files are no longer what it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_cases import checkpoint, largest_difference, stock_adapter, stock_merge, write_config
from amx_sft_moe import ArgumentError
from amx_sft_moe.adapters import check_adapter, checks, convert_adapter, files, load_base, read_adapter
from amx_sft_moe.adapters.cli import main


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40  # a mantissa's bit: still a number
    path.write_bytes(content)


def edit_manifest(adapter: Path, **changes: object) -> None:
    path = adapter / files.KT_MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_artifacts(adapter: Path, more: dict[str, object], without: str = "") -> None:
    artifacts = json.loads((adapter / files.KT_MANIFEST).read_text())["artifacts"] | more
    edit_manifest(adapter, artifacts={name: record for name, record in artifacts.items() if name != without})


def edit_record(adapter: Path, **changes: object) -> None:
    record = json.loads((adapter / files.KT_MANIFEST).read_text())["artifacts"][files.KT_WEIGHTS]
    edit_artifacts(adapter, {files.KT_WEIGHTS: record | changes})


def link(path: Path) -> None:
    path.rename(path.with_suffix(".there"))
    path.symlink_to(path.with_suffix(".there"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kt: flip(kt / files.KT_WEIGHTS), f"{files.KT_WEIGHTS}: expected sha256 "),
        (lambda kt: flip(kt / files.WEIGHTS), f"{files.WEIGHTS}: expected sha256 "),
        (lambda kt: write_config(kt, note="x"), f"{files.CONFIG}: expected size "),
        (lambda kt: write_config(kt, lora_alpha=16), "lora: expected {'rank': 4, 'alpha': 16}, got {"),
        (lambda kt: edit_manifest(kt, status="writing"), "status: expected ready, got writing"),
        (lambda kt: edit_manifest(kt, artifacts=[]), "expected artifacts with "),
        (lambda kt: edit_manifest(kt, version=2), "version: expected 1, got 2"),
        (lambda kt: edit_artifacts(kt, {"../a": {}}), "../a: expected a file beside it, with size and sha256"),
        (lambda kt: edit_artifacts(kt, {"a": {}}), "a: expected a file, got none"),
        (lambda kt: edit_artifacts(kt, {"a" * 300: {}}), f"{'a' * 80}: expected a file that can be read, got "),
        (lambda kt: edit_artifacts(kt, {}, without=files.WEIGHTS), f"expected {files.WEIGHTS} or "),
        (lambda kt: edit_record(kt, tensor_count=1), f"{files.KT_WEIGHTS}: expected tensor_count 1, got "),
        (lambda kt: edit_record(kt, tensors={}), f"{files.KT_WEIGHTS}: expected tensors {{}}, got "),
        (lambda kt: edit_manifest(kt, expert_weight_format=None), "expected expert_weight_format, got none"),
        (lambda kt: link(kt / files.KT_MANIFEST), "expected a file, got a link"),
        (lambda kt: link(kt / files.WEIGHTS), f"{files.WEIGHTS}: expected a file, got a link"),
        (lambda kt: (kt / files.KT_MANIFEST).write_text("["), "expected a JSON object, got"),
    ],
)
def test_a_manifest_that_no_longer_holds(
    change: Callable[[Path], object], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "kt"
    convert_adapter(stock_adapter("qwen3")[0], adapter, "ktransformers")
    assert main(["check", str(adapter)]) == 0
    change(adapter)
    assert main(["check", str(adapter)]) == 1
    assert f"wrong: {adapter / files.KT_MANIFEST}: {said}" in capfd.readouterr().out
    again = tmp_path / "again"
    if main(["convert", str(adapter), str(again), "--to", "ktransformers"]) == 0:
        assert main(["check", str(again)]) == 0, "written anew"


ONE_LAYER = json.dumps(
    {"target_parameters": [f"layers.0.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")]}
)


def in_kt_format(folder: Path, options: str = "{}") -> Path:
    source, _ = stock_adapter("qwen3", options)
    convert_adapter(source, folder, "ktransformers", dtype=torch.bfloat16, base=checkpoint("qwen3"))
    return folder


def why_not_kt(adapter: Path) -> str:
    """What ``check`` says of KTransformers; empty where it loads the adapter."""
    loads = {found.tool: found for found in check_adapter(adapter, checkpoint("qwen3")).loads}[checks.KT]
    return "" if loads.loads else loads.reason


def test_layers_that_are_not_adapted_are_in_the_file(tmp_path: Path) -> None:
    """KTransformers refuses a file that lacks one."""
    adapter = in_kt_format(tmp_path / "kt", ONE_LAYER)
    tensors = load_file(adapter / files.KT_WEIGHTS)
    names = [f"{name}_lora_{side}" for name in ("gate", "up", "down") for side in "ab"]
    assert set(tensors) == {f"layers.{layer}.experts.{name}" for layer in (0, 1) for name in names}
    for name in names:
        assert tensors[f"layers.0.experts.{name}"].any()
        assert not tensors[f"layers.1.experts.{name}"].any()
        assert tensors[f"layers.1.experts.{name}"].shape == tensors[f"layers.0.experts.{name}"].shape
    assert why_not_kt(adapter) == ""
    convert_adapter(adapter, tmp_path / "back", "peft-fused", base=checkpoint("qwen3"))
    _, merged = stock_adapter("qwen3", ONE_LAYER)
    assert largest_difference(stock_merge("qwen3", tmp_path / "back"), merged) < 0.01  # of bfloat16


def test_a_file_that_lacks_a_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = in_kt_format(tmp_path / "kt")
    assert why_not_kt(adapter) == ""
    tensors = load_file(adapter / files.KT_WEIGHTS)
    monkeypatch.setattr(checks, "manifest_problems", lambda directory: [])
    for key in ("layers.1.experts.down_lora_b", "layers.1.experts.down_lora_a"):  # one left, then none
        del tensors[key]
        save_file(tensors, adapter / files.KT_WEIGHTS)
        said = why_not_kt(adapter)
        assert said == f"expects all six factors of each layer, {key} is not there: --to ktransformers"


def test_a_manifest_that_no_longer_holds_keeps_it_from_loading(tmp_path: Path) -> None:
    adapter = in_kt_format(tmp_path / "kt")
    edit_manifest(adapter, status="writing")
    assert why_not_kt(adapter) == f"{adapter / files.KT_MANIFEST}: status: expected ready, got writing"


def test_a_rank_that_the_configuration_does_not_have(tmp_path: Path) -> None:
    """alpha / rank would be another scaling than alpha / r."""
    adapter = in_kt_format(tmp_path / "kt")
    write_config(adapter, r=8)
    save_file({}, adapter / files.WEIGHTS)  # of attention's factors it is noticed anyway
    said = "expected rank 8 \\(r of adapter_config.json\\), got 4: which of the two lora_alpha belongs to"
    with pytest.raises(ArgumentError, match=said):
        read_adapter(adapter, load_base(checkpoint("qwen3")))
