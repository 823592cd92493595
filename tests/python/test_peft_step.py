"""The benchmark beside stock PEFT: its candidates have to compute the same function, or it compares nothing."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "benchmarks" / "peft_step.py"
sys.path.insert(0, str(SOURCE.parent))  # of what it imports
ARGUMENTS = "--experts 4 --top-k 2 --hidden 64 --intermediate 32 --tokens 13 --turns 1 --threads 1 --json"


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("peft_step", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # What it sets for its own process would stay set for the tests after this one.
    register = module.amx_sft_moe.register
    monkeypatch.setattr(module.amx_sft_moe, "register", lambda **options: register())
    monkeypatch.setattr(module.torch, "set_num_threads", lambda threads: None)
    return module


def test_candidates_agree_and_are_compared(benchmark, monkeypatch, capsys):
    memories = {"ours": 1.0, "peft-grouped": 4.0, "factored-grouped": 2.0, "factored-loop": 2.0}
    monkeypatch.setattr(
        benchmark,
        "memory_in_a_process",
        lambda name: {"peak_mb": memories[name], "between_mb": memories[name]},
    )
    monkeypatch.setattr(sys, "argv", ["peft_step.py", *ARGUMENTS.split()])
    benchmark.main()
    document = json.loads(capsys.readouterr().out)
    assert document["about"]["tokens"] == 13
    ours, *others = document["rows"]
    assert ours["candidate"] == "ours"
    assert [row["candidate"] for row in others] == ["peft-grouped", "factored-grouped", "factored-loop"]
    for row in others:
        assert row["largest_difference"] < 2e-2  # bf16
        assert row["ratio"]["step"] == pytest.approx(ours["step_ms"] / row["step_ms"])
        assert row["ratio"]["peak_mb"] == 1.0 / memories[row["candidate"]]


def test_a_candidate_with_a_nan_differs(benchmark):
    right, wrong = torch.ones(3), torch.full((3,), math.nan)
    results = {"ours": [right] * 3, "peft-grouped": [right, wrong, right]}
    seconds = {name: [(1.0, 1.0)] for name in results}
    memories = {name: {"peak_mb": 1.0, "between_mb": 1.0} for name in results}
    _, row = benchmark.rows_of(seconds, results, memories)
    assert math.isnan(row["largest_difference"])


def test_memory_counts_what_a_step_holds(benchmark, monkeypatch):
    tokens, top_k, size = 512, 2, 512
    sizes = f"--experts 4 --top-k {top_k} --hidden {size} --intermediate {size} --tokens {tokens} --threads 1"
    monkeypatch.setattr(sys, "argv", ["peft_step.py", *sizes.split()])
    found = benchmark.memory_in_a_process("factored-grouped")
    # At the least rows of x, of gate and up (as one), of h and of y, in bf16.
    saved = 2 * tokens * top_k * 5 * size
    assert saved / 1e6 < found["between_mb"] <= found["peak_mb"] < 300


def test_unknown_candidates_are_refused(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peft_step.py", "--candidates", "abacus"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "got abacus" in capsys.readouterr().err
