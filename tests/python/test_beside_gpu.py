"""The benchmark beside a GPU, run without one: its candidates train the same model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import beside_gpu

ARGUMENTS = "--device cpu --layers 1 --experts 8 --hidden 64 --intermediate 32 --rank 2 --turns 1 --threads 1"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_gpu, "VOCABULARY", 64)
    # What it sets for its own process would stay set for the tests after this one.
    register = beside_gpu.amx_sft_moe.register
    monkeypatch.setattr(beside_gpu.amx_sft_moe, "register", lambda **options: register())
    monkeypatch.setattr(beside_gpu.torch, "set_num_threads", lambda threads: None)


def run(monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    monkeypatch.setattr(sys, "argv", ["beside_gpu.py", *ARGUMENTS.split(), *more])
    beside_gpu.main()


def test_candidates_train_one_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses: dict[str, list[float]] = {}

    class Watched(beside_gpu.Step):
        def run(self, ids: torch.Tensor) -> list[float]:
            model: Any = self.model
            with torch.no_grad():
                losses.setdefault(self.name, []).append(float(model(input_ids=ids, labels=ids).loss))
            return super().run(ids)

    monkeypatch.setattr(beside_gpu, "Step", Watched)
    run(monkeypatch, "--tokens", "5", "9", "--json")
    document = json.loads(capsys.readouterr().out)
    assert [(row["tokens"], row["candidate"]) for row in document["rows"]] == [
        (tokens, name) for tokens in (5, 9) for name in ("ours", "all-gpu")
    ]
    for row in document["rows"]:
        assert row["step"] >= max(row[part] for part in beside_gpu.PARTS) > 0
        assert row["gpu_mib"] == 0
        assert (0 < row["operator"] < row["step"]) == (row["candidate"] == "ours")
    assert losses["ours"] == pytest.approx(losses["all-gpu"], rel=2e-2)
    assert losses["ours"][0] != losses["ours"][3]  # it learns


def test_table_and_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--tokens", "5", "--candidates", "ours")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].split()[:2] == ["5", "ours"]
    run(monkeypatch, "--tokens", "5", "--profile")
    assert "amx_sft_moe::backward" in capsys.readouterr().out


def test_refusals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--candidates", "abacus")
    assert "expected some of ours, all-gpu, got abacus" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--device", "cuda")
    assert "--device cuda: expected a GPU that torch can use, got none" in capsys.readouterr().err
