"""Commands whose output nobody takes: a pipe whose reader has gone, a full disk, a closed stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "amx_sft_moe"]


def run(command: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell with its standard output redirected so; the shell's status is the command's."""
    line = f'set -o pipefail; "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", line, "bash", *command], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(params=["info", "profile", "adapter check"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    small = "--hidden 64 --intermediate 32 --experts 4 --top-k 2 --tokens 8 --iterations 1 --no-machine"
    arguments = {"info": [], "profile": small.split(), "adapter check": [str(tmp_path)]}
    return [*RUN, *request.param.split(), *arguments[request.param]]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_error(
    command: list[str], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = run(command, "| true")
    expected = 1 if "check" in command else 0  # there is no adapter in that folder, whoever reads it
    assert (done.returncode, "Traceback" in done.stderr, "roken pipe" in done.stderr) == (
        expected,
        False,
        False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("name", ["info", "profile"])
def test_a_full_disk(name: str) -> None:
    small = "--hidden 64 --intermediate 32 --experts 4 --top-k 2 --tokens 8 --iterations 1 --no-machine"
    done = run([*RUN, name, *(small.split() if name == "profile" else [])], "> /dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: standard output: No space left on device"


@pytest.mark.parametrize("name", ["info", "profile", "timeline", "adapter", "finetune"])
def test_closed(name: str) -> None:
    done = run([*RUN, name], ">&-")
    assert (done.returncode, done.stderr) == (1, "error: standard output: closed\n")
