"""The verdicts of benchmarks/sweep.py: which rivals a line is compared with, and which target it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import sweep  # noqa: E402


def rows(tokens: int = 128, limit: float = 10, **steps: float) -> dict[str, dict[str, Any]]:
    """Lines of peers.py, by candidate; ``torch_grouped=100``: its step in ms, of which a third is forward."""
    names = {name.replace("_", "-"): step for name, step in steps.items()}
    about = {"shape": sweep.MAIN, "routing": "uniform", "tokens": tokens, "of_limit": 0.5, "limit_ms": limit}
    return {
        name: about | {"peer": name, "step_ms": step, "forward_ms": step / 3, "backward_ms": 2 * step / 3}
        for name, step in names.items()
    }


@pytest.mark.parametrize(
    ("tokens", "target"),
    [
        (1, 0.40),
        (8, 0.40),
        (32, 0.40),
        (128, 0.40),
        (129, 0.45),
        (512, 0.45),
        (513, 0.55),
        (2048, 0.55),
        (4096, 0.55),
    ],
)
def test_target_is_that_of_the_next_larger_number_of_tokens(tokens: int, target: float) -> None:
    assert sweep.target_of(tokens) == target


@pytest.mark.parametrize(
    ("steps", "word"),
    [
        ({"torch_grouped": 100, "kt_bf16": 120}, "met"),
        ({"torch_grouped": 120, "kt_bf16": 99}, "missed"),
        ({"torch_grouped": 100, "kt_int8": 41}, "met"),
        ({"torch_grouped": 100, "kt_int8": 40}, "missed"),  # as fast is not ahead
        ({"torch_grouped": 500, "torch_grouped_fp32": 99}, "missed"),  # fp32 counts where it was run
        ({"torch_grouped": 500, "torch_loop_fp32": 99}, "missed"),
        ({"torch_grouped": 200, "kt_bf16": 200, "kt_bf16_spared": 99}, "missed"),  # with a CPU for who waits
        ({"kt_int8": 50}, ""),  # which is no rival otherwise
        ({"torch_grouped": 90, "limit": 37}, "beyond the limit"),
        ({"torch_grouped": 90, "limit": 36}, "missed"),
        ({"torch_grouped": 90, "limit": 37, "ours_fresh": 35}, "missed"),  # the probe met a slower moment
        ({"torch_grouped": 90, "limit": 37, "kt_int8": 40}, "missed"),
        ({"torch_grouped": 100, "limit": 41}, "met"),  # by a peak or bandwidth that was measured too low
    ],
)
def test_verdict(steps: dict[str, float], word: str) -> None:
    assert sweep.verdict(rows(ours=40, **steps), 128).word == word


def test_rivals_go_by_the_cpu() -> None:
    assert sweep.rivals_on({"avx512_bf16": True}) == sweep.BF16_RIVALS
    without = sweep.rivals_on({"avx512_bf16": False})
    assert without == sweep.BF16_RIVALS + sweep.FP32_RIVALS
    assert {"torch-grouped-fp32", "torch-loop-fp32"} <= set(without)
    assert {"ours", "ours-fresh", *sweep.RIVALS, sweep.INT8} == set(
        sweep.COLOURS
    )  # all have a line in the picture


def test_every_layer_has_each_target() -> None:
    quick, default, everything = sweep.runs(quick=True), sweep.runs(), sweep.runs(everything=True)
    assert {run.key for run in quick} < {run.key for run in default} < {run.key for run in everything}
    for found, tokens in ((default, {8, 128, 512}), (everything, set(sweep.TARGETS))):
        layers = {run.key[:2] for run in found}
        assert len(layers) == 1 + len(sweep.OTHERS)
        for layer in layers:
            assert tokens <= {run.tokens for run in found if run.key[:2] == layer}


def test_what_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that are there are not run again, those near their target are at once; who was killed is left out;
    fp32 rivals by the CPU."""
    import amx_sft_moe

    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> sweep.subprocess.CompletedProcess[str]:
        commands.append(command)
        tokens = int(command[command.index("--tokens") + 1])
        ours = 41 + len(commands) if tokens == 32 else 30
        lines = [json.dumps(row) for row in rows(tokens, ours=ours, torch_grouped=100).values()]
        return sweep.subprocess.CompletedProcess(
            command, -9 if tokens == 2048 else 0, "\n".join(["limit", *lines])
        )

    monkeypatch.setattr(sweep.subprocess, "run", run)
    monkeypatch.setattr(amx_sft_moe, "info", lambda: {"instruction_sets": {"avx512_bf16": False}})
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(rows(8, ours=45)["ours"]) + "\n")
    assert not sweep.run_missing(path, sweep.runs(quick=True))
    tokens = [command[command.index("--tokens") + 1] for command in commands]
    turns = [command[command.index("--iterations") + 1] for command in commands]
    assert tokens == ["32", "32", "128", "512", "2048"]
    assert turns == ["7", "21", "7", "7", "3"]
    assert sweep.read(path)[sweep.MAIN, "uniform", 32]["ours"]["step_ms"] == 43  # the second time's
    assert all("torch-grouped-fp32,torch-loop-fp32,kt-int8" in command[-1] for command in commands)
    assert [key[2] for key in sweep.read(path)] == [8, 32, 128, 512]
    assert "exit status -9" in capsys.readouterr().err


def test_table_and_summary(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [
        *rows(512, ours=46, torch_grouped=100, torch_grouped_fp32=110).values(),
        *rows(8, ours=39, ours_fresh=47, torch_grouped=100, kt_int8=78).values(),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = sweep.read(path)
    header, _, few, many = sweep.table(found).splitlines()
    assert "ours / fastest rival | target | ours / kt-int8 | verdict" in header
    assert few.split(" | ")[2:] == [
        "8",
        "39",
        "47",
        "100",
        "",
        "78",
        "**0.39**",
        "0.40",
        "0.50",
        "met",
        "0.50",
        "0.10 |",
    ]
    assert many.split(" | ")[-6:] == ["**0.46**", "0.45", "", "missed", "0.50", "0.10 |"]
    text = sweep.summary(found)
    assert "1 met, 1 missed, 0 beyond the limit" in text
    assert "T = 8 0.47" in text
    assert "backward / forward of ours: 2.00 to 2.00, above 1.4: qwen3-30b-a3b uniform T = 8 2.00" in text


def test_figures_of_the_page() -> None:
    """The table of benchmarks/README.md is what the script prints of peers.jsonl."""
    printed = sweep.table(sweep.read(BENCHMARKS / "peers.jsonl"))
    assert printed in (BENCHMARKS / "README.md").read_text(encoding="utf-8")
