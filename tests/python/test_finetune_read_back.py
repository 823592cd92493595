"""finetune: what a run says about its adapter's form, and about what stock PEFT has made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from amx_sft_moe.finetune import cli, model, output, stages
from test_finetune_families import checkpoint, options


def run(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict, str]:
    """Exit status, what metrics.json says of the adapter, and report.md."""
    wanted = options(folder, checkpoint(folder / "checkpoint", family))
    monkeypatch.setattr(cli, "parse", lambda argv: wanted)
    status = cli.main([])
    metrics = json.loads((folder / "out" / output.METRICS).read_text())
    return status, metrics["adapter"], (folder / "out" / output.REPORT).read_text()


def test_no_memory_to_read_it_back_is_told_and_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model, "room_for_copies", lambda *arguments: False)
    status, saved, report = run(tmp_path, "mixtral", monkeypatch)
    assert status == 0
    assert (saved["stock_loss"], saved["stock_error"], saved["stock_differs"]) == (None, "", "")
    assert saved["stock_skipped"] == "memory is short for a second model"
    assert "Not read back by stock PEFT: memory is short for a second model.\n" in report
    assert re.search(r"\| read back by stock PEFT +\| not done \|", report)
    said = capsys.readouterr().out
    assert "not read back, memory is short for a second model\n" in said
    assert "\n  form                per expert\n" in said
    assert "the adapter, for PEFT and for servers\n" in said


@pytest.mark.parametrize(("difference", "expected"), [(0.009, 0), (-0.011, 3), (0.5, 3)])
def test_another_loss_in_stock_peft_has_a_status_of_its_own(
    difference, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(stages, "loss", lambda value: f"about {value:.1f}")
    here = []
    original = stages.keep

    def keep(options, out, base, adapted, *rest):
        here.append(adapted.curve.held_out[-1][1])
        return original(options, out, base, adapted, *rest)

    monkeypatch.setattr(stages, "keep", keep)
    monkeypatch.setattr(stages.adapter, "stock_loss", lambda *arguments: here[0] + difference)
    status, saved, report = run(tmp_path, "mixtral", monkeypatch)
    assert status == expected
    assert saved["stock_loss"] == pytest.approx(here[0] + difference)
    folder = tmp_path / "out" / "adapter"
    told = (
        f"stock PEFT does not get the same model out of {folder}: expected a held-out loss "
        f"within 0.01 of about {here[0]:.1f}, got about {here[0] + difference:.1f}"
    )
    assert saved["stock_differs"] == (told if expected else "")
    assert (f"Beware: {told}.\n" in report) == bool(expected)
    assert (f"\nerror: {told}\n" in capsys.readouterr().err) == bool(expected)


def test_a_fused_adapter_is_not_said_to_be_for_servers(tmp_path, monkeypatch, capsys):
    status, saved, _ = run(tmp_path, "gpt_oss", monkeypatch)
    assert status == 0
    assert saved["fused"]
    said = capsys.readouterr().out
    assert "The adapter, read back by stock PEFT\n" in said
    assert "\n  form                fused, as PEFT writes it; not per expert: " in said
    assert "the adapter, for PEFT; servers drop its form\n" in said
