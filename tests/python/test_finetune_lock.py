"""One run at a time in an output folder: of two, one would report on an adapter that the other has replaced."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from amx_sft_moe.finetune import cli, stages
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.finetune.output import opened

HELD = r"expected a folder in which no other run works, got one that another finetune has open"


def test_a_second_run_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(*arguments: object) -> None:
        raise FinetuneError("the run has begun")

    monkeypatch.setattr(stages, "read_text", begun)
    with opened(tmp_path, with_base=True) as out:
        before = sorted(tmp_path.iterdir())
        assert cli.main(["--quick", "--output", str(tmp_path)]) == 1
        assert f"error: --output {tmp_path}: {HELD}" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
        (out.adapter / "adapter_config.json").write_text("{}")
        out.keep()
        # What comes after is about the adapter that now lies there.
        with pytest.raises(FinetuneError, match=HELD), opened(tmp_path, with_base=False):
            pass
    assert cli.main(["--quick", "--output", str(tmp_path)]) == 1
    assert "error: the run has begun" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base-model"}


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from amx_sft_moe.finetune.output import opened\n"
        "with opened(pathlib.Path(sys.argv[1]), with_base=False):\n"
        "    print('open', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        try:
            with pytest.raises(FinetuneError, match=HELD), opened(tmp_path, with_base=False):
                pass
        finally:
            other.kill()
    with opened(tmp_path, with_base=False):
        pass


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_does_not_lock(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(handle: int, operation: int) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    with opened(tmp_path, with_base=False) as out:
        (out.adapter / "adapter_config.json").write_text("{}")
        out.keep()
    assert (tmp_path / "adapter" / "adapter_config.json").read_text() == "{}"
