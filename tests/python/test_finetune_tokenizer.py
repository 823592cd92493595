"""A tokenizer that cannot be written beside the adapter, as one with code of its own may not be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from amx_sft_moe.finetune import cli, output
from test_finetune_families import checkpoint, options


@pytest.mark.parametrize("error", [NotImplementedError("it has no files"), OSError(28, "No space left")])
def test_what_was_trained_is_kept_without_it(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))

    def half(tokenizer: object, folder: Path, **rest: object) -> None:
        (folder / "tokenizer.json").write_text("{")
        (folder / "additional_chat_templates").mkdir()
        raise error

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", half)
    monkeypatch.setattr(cli, "parse", lambda argv: wanted)
    assert cli.main([]) == 1
    out = tmp_path / "out"
    assert {path.name for path in (out / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    said = capsys.readouterr()
    assert "the adapter is kept without its tokenizer: " in said.out
    assert f"error: --output {out}: the adapter is written, but not its tokenizer: " in said.err
    metrics = json.loads((out / output.METRICS).read_text())
    assert set(metrics["failed"]) == {"its tokenizer"}
    assert metrics["adapter"]["stock_error"] == ""
    assert "- its tokenizer: " in (out / output.REPORT).read_text()
