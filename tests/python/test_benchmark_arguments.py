"""Numbers that the programs of benchmarks/ are given: what has no median or no parts is refused at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import whole_numbers

# Each program's arguments that have no default, and its whole numbers.
PROGRAMS = {
    "amx_model": ("", "tokens threads"),
    "beside_gpu": ("", "layers experts hidden intermediate rank turns threads tokens"),
    "compare_steps": (".", "tokens threads turns"),
    "compare_trees": (".", "shape tokens threads turns"),
    "in_process": ("", "tokens turns threads"),
    "peers": ("", "tokens iterations threads"),
    "peft_step": ("", "experts top-k hidden intermediate tokens rank turns threads"),
    "replay": ("", "threads repeats"),
}
OPTIONS = [(program, option) for program, (_, options) in PROGRAMS.items() for option in options.split()]


@pytest.mark.parametrize(("program", "option"), OPTIONS)
def test_every_program_refuses_none(
    program: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(program)
    needed, _ = PROGRAMS[program]
    values = ["768", "0"] if option == "shape" else ["0"]
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *needed.split(), f"--{option}", *values])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"argument --{option}: expected a whole number of at least 1, got 0\n" in error


@pytest.mark.parametrize("bandwidth", ["0", "-1", "nan", "inf"])
def test_a_bandwidth_is_above_zero(
    bandwidth: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("replay")
    monkeypatch.setattr(sys, "argv", ["replay.py", f"--bandwidth={bandwidth}"])
    with pytest.raises(SystemExit):
        module.main()
    assert "--bandwidth: expected a number above 0, got " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1", "12", "007"])
def test_whole_numbers(text: str) -> None:
    assert whole_numbers.positive(text) == int(text)


@pytest.mark.parametrize("text", ["0", "00", "-1", "1.5", "2x", "", " 1", "1_0", "\u0663"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="of at least 1, got "):
        whole_numbers.positive(text)
