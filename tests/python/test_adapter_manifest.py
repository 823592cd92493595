"""KTransformers' manifest: what ``check`` says of an adapter whose files are no longer what it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_cases import stock_adapter, write_config
from amx_sft_moe.adapters import convert_adapter, files
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
