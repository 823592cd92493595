"""The folder of a run: refused before training, changed as a whole or not at all, other people's files kept."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError

from amx_sft_moe.adapters import files
from amx_sft_moe.finetune import cli, job, stages
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.finetune.output import REPORTS, Output, opened
from amx_sft_moe.finetune.training import Curve

CONFIG = "adapter_config.json"


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def earlier_run(folder: Path) -> dict[str, str]:
    """What a run before left, with files of the user's own; returns them."""
    for name in (f"adapter/{CONFIG}", "adapter/chat_template.jinja", "base-model/config.json", *REPORTS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")
    own = {"adapter/README.md": "mine", "adapter/runs/log": "mine", "base-model/notes": "mine", "todo": "mine"}
    for name, text in own.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return own


def fill(out: Output) -> None:
    (out.adapter / CONFIG).write_text("new")
    assert out.base is not None
    (out.base / "config.json").write_text("new")


NEW = {f"adapter/{CONFIG}": "new", "base-model/config.json": "new"}


def test_both_appear_when_they_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    with opened(folder, with_base=True) as out:
        fill(out)
        assert not (folder / "adapter").exists()
        assert not (folder / "base-model").exists()
        out.keep()
        assert content(folder) == NEW
    assert content(folder) == NEW
    assert {path.name for path in folder.iterdir()} == {"adapter", "base-model"}


def test_they_replace_those_of_a_run_before_and_nothing_else(tmp_path: Path) -> None:
    own = earlier_run(tmp_path)
    with opened(tmp_path, with_base=True) as out:
        fill(out)
        out.keep()
    # Neither the tokenizer's old template nor reports on the old adapter.
    assert content(tmp_path) == {**NEW, **own}
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base-model", "todo"}


def test_a_base_stays_where_none_is_made(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    with opened(tmp_path, with_base=False) as out:
        assert out.base is None
        (out.adapter / CONFIG).write_text("new")
        out.keep()
    assert (tmp_path / "base-model" / "config.json").read_text() == "old"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_what_was_there_survives_an_interruption(tmp_path: Path, interruption: type[BaseException]) -> None:
    earlier_run(tmp_path)
    before = content(tmp_path)

    def write_half() -> None:
        with opened(tmp_path, with_base=True) as out:
            fill(out)
            raise interruption

    with pytest.raises(interruption):
        write_half()
    assert content(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base-model", "todo", *REPORTS}


class Stopped(BaseException):
    """SIGTERM has reached the handler that was there before the command."""


def stop(number: int, frame: object) -> None:
    raise Stopped


@pytest.fixture
def terminable() -> Iterator[None]:
    """A handler of SIGTERM, without which it would end the tests."""
    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("interruptible", "terminable")
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)], ids=["INT", "TERM"]
)
def test_an_interrupt_waits_until_both_are_in_place(
    number: signal.Signals, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = earlier_run(tmp_path)
    exchange, exchanged = files.exchange, []

    def interrupted(first: Path, second: Path) -> None:
        signal.raise_signal(number)
        exchanged.append(second.name)
        exchange(first, second)

    monkeypatch.setattr(files, "exchange", interrupted)
    with opened(tmp_path, with_base=True) as out:
        fill(out)
        with pytest.raises(raised):
            out.keep()
    assert sorted(exchanged) == ["adapter", "base-model"]
    assert content(tmp_path) == {**NEW, **own}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is stop


def occupied(tmp_path: Path) -> Path:
    (tmp_path / "out").write_text("a file")
    return tmp_path / "out"


def with_adapter_that_is_a_file(tmp_path: Path) -> Path:
    (tmp_path / "adapter").write_text("a file")
    return tmp_path


def with_report_that_is_a_folder(tmp_path: Path) -> Path:
    (tmp_path / "report.md").mkdir()
    return tmp_path


def within_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "out"


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (occupied, "File exists"),
        (within_a_file, "Not a directory"),
        (with_adapter_that_is_a_file, "expected a directory, got the file"),
        (with_report_that_is_a_folder, r"report.md: expected a file, got a directory"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_training(
    make: Callable[[Path], Path],
    got: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def trained(*arguments: object) -> None:
        raise AssertionError("the run has begun")

    monkeypatch.setattr(stages, "read_text", trained)
    folder = make(tmp_path)
    assert cli.main(["--quick", "--output", str(folder)]) == 1
    error = capsys.readouterr().err
    assert f"error: --output {folder}: expected a folder to write into, got " in error
    assert got in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(FinetuneError, match="Permission denied"), opened(tmp_path, with_base=True):
        pass


def test_the_folder_is_tried_by_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**arguments: object) -> None:
        assert arguments["dir"] == tmp_path
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refused)
    with pytest.raises(FinetuneError, match="Read-only file system"), opened(tmp_path, with_base=True):
        pass


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_is_an_error_of_the_command(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(FinetuneError, match=rf"--output {tmp_path}: .*No space left"),
        opened(tmp_path, with_base=False) as out,
        out.writing(),
    ):
        raise error

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "run", full)
    assert cli.main([]) == 1
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.usefixtures("interruptible", "terminable")
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["INT", "TERM"],
)
def test_a_base_alone_does_not_appear(
    number: signal.Signals,
    status: int,
    word: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped between base and adapter: what the run before left still belongs together."""
    own = earlier_run(tmp_path)
    before = content(tmp_path)
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def train(*arguments: object, title: str, **rest: object) -> Curve:
        if title.strip() == "LoRA":
            assert any(path.name.startswith("base-model.partial") for path in tmp_path.iterdir())
            assert any(path.name.startswith("amx-sft-moe-") for path in scratch.iterdir())
            try:
                signal.raise_signal(number)
            finally:
                if number == signal.SIGTERM:
                    signal.raise_signal(number)  # as `timeout` does; without effect
        return Curve(held_out=[(0, 1.0)])

    monkeypatch.setattr(stages, "train", train)
    assert cli.main(["--quick", "--output", str(tmp_path)]) == status
    assert not any(path.name.startswith("amx-sft-moe-") for path in scratch.iterdir())
    assert signal.getsignal(signal.SIGTERM) is stop
    assert content(tmp_path) == before
    assert own.items() <= before.items()
    said = capsys.readouterr()
    assert f"{word}; what was not finished is not on disk" in said.err
    assert f"the adapter in {tmp_path} is replaced once the new one is trained" in said.out
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base-model", "todo", *REPORTS}


@pytest.mark.usefixtures("terminable")
def test_sigterm_stays_ignored_and_belongs_to_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(*arguments: object) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        raise FinetuneError("seen")

    monkeypatch.setattr(job, "run", run)
    thread = threading.Thread(target=cli.main, args=([],))
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert cli.main([]) == 1
    assert seen == [stop, signal.SIG_IGN]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
