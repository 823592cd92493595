"""A folder in which another process works while an adapter is written into it, a Trainer's with its logs and
checkpoints: what that makes, changes or removes meanwhile is neither lost nor in the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amx_sft_moe.adapters import carried, files

DROP = ("adapter.bin",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run: an adapter to be replaced, a log, a checkpoint."""
    folder = tmp_path / "out"
    for name in ("adapter", "adapter.bin", "state", "runs/log", "checkpoint-1/weights", "checkpoint-1/deep/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")
        os.utime(folder / name, (1, 1))
    return folder


OTHERS = dict.fromkeys(("state", "runs/log", "checkpoint-1/weights", "checkpoint-1/deep/x"), "old")


def no_links(*arguments: object, **options: object) -> None:
    raise PermissionError(1, "no links on this file system")


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path) -> None:
    with files.replaced_directory(folder, DROP) as work:
        (work / "adapter").write_text("new")
    assert [path.name for path in folder.parent.iterdir()] == ["out"], "nothing lies beside it"


def before(name: str, act: Callable[..., object], patch: pytest.MonkeyPatch, module: Any = files) -> list[str]:
    """Lets another process act right before the first call of a function; the list fills when it has."""
    original, acted = getattr(module, name), []

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not acted:
            acted.append(name)
            act(*arguments)
        return original(*arguments, **options)

    patch.setattr(module, name, wrapped)
    return acted


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "copied"])
def test_what_is_made_before_the_exchange_stays(
    linked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_process(*arguments: object) -> None:
        for name in ("runs/events", "checkpoint-1/deep/y", "checkpoint-2/deep/z", "adapter.bin", "adapter"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("made")
        (folder / "state.tmp").write_text("replaced")
        os.replace(folder / "state.tmp", folder / "state")
        with (folder / "runs" / "log").open("a") as log:
            log.write(" and longer")
        (folder / "link").symlink_to("nowhere")

    if not linked:
        monkeypatch.setattr(os, "link", no_links)
    acted = before("exchange", another_process, monkeypatch)
    write(folder)
    assert acted
    made = dict.fromkeys(("runs/events", "checkpoint-1/deep/y", "checkpoint-2/deep/z"), "made")
    changed = {"state": "replaced", "runs/log": "old and longer"}
    assert content(folder) == OTHERS | made | changed | {"adapter": "new"}
    assert (folder / "link").readlink() == Path("nowhere")


def test_what_is_written_after_the_exchange_is_not_undone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = files.exchange

    def another_process_after(first: Path, second: Path) -> None:
        exchange(first, second)
        (folder / "state.tmp").write_text("replaced")
        os.replace(folder / "state.tmp", folder / "state")
        remove(folder / "runs")

    monkeypatch.setattr(files, "exchange", another_process_after)
    write(folder)
    others = {name: text for name, text in OTHERS.items() if name != "runs/log"}
    assert content(folder) == others | {"state": "replaced", "adapter": "new"}


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "copied"])
@pytest.mark.parametrize("entry", ["state", "runs/log", "checkpoint-1/deep", "checkpoint-1"])
def test_what_is_removed_before_the_exchange_stays_so(
    entry: str, linked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linked:
        monkeypatch.setattr(os, "link", no_links)
    acted = before("exchange", lambda *paths: remove(folder / entry), monkeypatch)
    write(folder)
    assert acted
    expected = {name: text for name, text in OTHERS.items() if not name.startswith(entry)}
    assert content(folder) == expected | {"adapter": "new"}
    assert not (folder / entry).exists()


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "copied"])
def test_what_is_put_in_place_of_another_stays_however_old(
    linked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_process(*arguments: object) -> None:
        (folder / "state.tmp").write_text("restored")
        os.utime(folder / "state.tmp", (0, 0))  # as of cp -p, and of an archive
        os.replace(folder / "state.tmp", folder / "state")
        remove(folder / "runs")
        (folder / "runs").write_text("a file")
        remove(folder / "checkpoint-1" / "weights")
        (folder / "checkpoint-1" / "weights").mkdir()
        (folder / "checkpoint-1" / "weights" / "0").write_text("a folder's")

    if not linked:
        monkeypatch.setattr(os, "link", no_links)
    before("exchange", another_process, monkeypatch)
    write(folder)
    made = {"state": "restored", "runs": "a file", "checkpoint-1/weights/0": "a folder's"}
    assert content(folder) == {"checkpoint-1/deep/x": "old", "adapter": "new"} | made


def test_what_cannot_be_moved_is_not_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(source: Path, place: Path) -> None:
        if source.name == "events":
            raise PermissionError(13, "no")
        os.replace(source, place)

    def another_process(*arguments: object) -> None:
        (folder / "events").write_text("made")
        (folder / "later").write_text("made")

    monkeypatch.setattr(carried, "_replace", refused)
    before("exchange", another_process, monkeypatch)
    with files.replaced_directory(folder, DROP) as work:
        (work / "adapter").write_text("new")
    assert content(folder) == OTHERS | {"adapter": "new", "later": "made"}
    (beside,) = (path for path in folder.parent.iterdir() if path != folder)
    assert (beside / "events").read_text() == "made"
    assert f"{beside / 'events'}: not moved to {folder / 'events'}" in caplog.text


@pytest.mark.parametrize("entry", ["state", "runs/log", "checkpoint-1/weights", "checkpoint-1"])
def test_what_vanishes_is_passed_over(entry: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the first entry is listed already, and not yet linked.
    monkeypatch.setattr(Path, "iterdir", first_listed(folder / entry, Path.iterdir))
    acted = before("_link", lambda *paths: remove(folder / entry), monkeypatch, carried)
    write(folder)
    assert acted
    expected = {name: text for name, text in OTHERS.items() if not name.startswith(entry)}
    assert content(folder) == expected | {"adapter": "new"}
    if entry == "checkpoint-1":
        assert not (folder / entry).exists(), "an empty one would be taken for the last"


def first_listed(wanted: Path, iterdir: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Lists a folder with what is wanted, or what it lies in, first."""

    def listed(folder: Path) -> Any:
        return iter(sorted(iterdir(folder), key=lambda path: (not wanted.is_relative_to(path), path.name)))

    return listed


def test_an_error_of_another_kind_is_not_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise FileNotFoundError(2, "the place to write to is gone")

    monkeypatch.setattr(carried, "_link", refused)
    expected = content(folder)
    with pytest.raises(FileNotFoundError, match="the place to write to is gone"):
        write(folder)
    assert content(folder) == expected
