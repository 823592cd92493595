"""Files that appear whole or not at all, also under SIGKILL; files that are not what they should be."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_cases import checkpoint, config_of, stock_adapter, write_config
from amx_sft_moe.adapters import convert_adapter, files, merge_adapter
from amx_sft_moe.adapters.cli import main

STEPS = [(os, name) for name in ("fsync", "rename", "replace", "link", "chmod")]
STEPS += [
    (files, "exchange"),
    (files, "save_file"),
    (shutil, "copyfile"),
    (shutil, "copy2"),
    (shutil, "rmtree"),
]


def content(directory: Path) -> dict[str, bytes] | None:
    if not directory.exists():
        return None
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def interrupted(at: int, how: Callable[[], None], patch: pytest.MonkeyPatch) -> list[str]:
    """Counts the steps that touch the disk, and calls ``how`` instead of step ``at``."""
    seen: list[str] = []

    def wrap(name: str, original: Callable) -> Callable:
        def step(*arguments: object, **options: object) -> object:
            seen.append(name)
            if len(seen) == at:
                how()
            return original(*arguments, **options)

        return step

    for module, name in STEPS:
        patch.setattr(module, name, wrap(name, getattr(module, name)))
    return seen


def killed(action: Callable[[], object], at: int) -> bool:
    """Runs ``action`` in a forked process that kills itself at its step ``at``; whether it came that far."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            with pytest.MonkeyPatch.context() as patch:
                interrupted(at, lambda: os.kill(os.getpid(), signal.SIGKILL), patch)
                action()
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WIFSIGNALED(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child process hangs")


@pytest.fixture(params=["convert", "convert in place", "merge", "merge over"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[], object]]:
    """A target that exists or not, and what writes it."""
    source, _ = stock_adapter("qwen3")
    target = tmp_path / "here" / "target"
    if request.param == "convert in place":
        convert_adapter(source, target, "ktransformers")
        (target / "runs").mkdir()
        (target / "runs" / "log.txt").write_text("kept")
        return target, lambda: convert_adapter(target, target, "per-expert", overwrite=True)
    if request.param == "convert":
        return target, lambda: convert_adapter(source, target, "per-expert")
    if request.param == "merge over":
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")
        save_file({}, target / "model.safetensors")
    base, over = checkpoint("qwen3"), target.exists()
    return target, lambda: merge_adapter(source, base, target, overwrite=over, progress=False)


def test_killed_at_every_step(case: tuple[Path, Callable[[], object]], tmp_path: Path) -> None:
    target, action = case
    safe = tmp_path / "safe"
    if target.exists():
        shutil.copytree(target, safe)
    old = content(target)
    action()
    new = content(target)
    assert new != old
    seen = set()
    for at in range(1, 200):
        shutil.rmtree(target.parent)
        if safe.exists():
            shutil.copytree(safe, target)
        if not killed(action, at):
            break
        found = content(target)
        assert found in (old, new), f"step {at}"
        seen.add("old" if found == old else "new")
    else:
        raise AssertionError("too many steps")
    assert at > 5
    assert "old" in seen
    assert content(target) == new


def test_an_error_at_every_step(
    case: tuple[Path, Callable[[], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, action = case
    safe = tmp_path / "safe"
    if target.exists():
        shutil.copytree(target, safe)
    old = content(target)

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for at in range(1, 200):
        shutil.rmtree(target.parent, ignore_errors=True)
        if safe.exists():
            shutil.copytree(safe, target)
        with monkeypatch.context() as patch:
            seen = interrupted(at, fail, patch)
            with contextlib.suppress(OSError):
                action()
        if len(seen) < at:
            break
        found = content(target)
        # Links fall back to copies; once the new content is in place, it stays.
        if seen[at - 1] not in ("link", "rmtree") and found != old:
            assert "exchange" in seen[: at - 1] or "rename" in seen[: at - 1]
        if seen[at - 1] != "rmtree" and target.parent.exists():
            left = [path.name for path in target.parent.iterdir() if "partial" in path.name]
            assert left == [], (at, seen[at - 1])
    assert at > 5


def test_where_directories_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(first: Path, second: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    source, _ = stock_adapter("qwen3")
    convert_adapter(source, tmp_path / "x", "ktransformers")
    (tmp_path / "x" / "notes.txt").write_text("kept")
    convert_adapter(source, tmp_path / "y", "per-expert")
    monkeypatch.setattr(files, "exchange", refused)
    convert_adapter(tmp_path / "x", tmp_path / "x", "per-expert", overwrite=True)
    found = content(tmp_path / "x")
    assert found is not None
    assert found.pop("notes.txt") == b"kept"
    assert found == content(tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_where_directories_cannot_be_synced(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refused(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    source, _ = stock_adapter("qwen3")
    monkeypatch.setattr(os, "fsync", refused)
    convert_adapter(source, tmp_path / "x", "ktransformers")
    convert_adapter(tmp_path / "x", tmp_path / "x", "per-expert", overwrite=True)
    merge_adapter(tmp_path / "x", checkpoint("qwen3"), tmp_path / "merged", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "x"]


@pytest.mark.parametrize(("number", "of_files"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_what_cannot_be_synced_for_another_reason(
    number: int, of_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) != of_files:
            raise OSError(number, os.strerror(number))

    source, _ = stock_adapter("qwen3")
    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        convert_adapter(source, tmp_path / "x", "per-expert")
    assert not list(tmp_path.iterdir())


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    source, _ = stock_adapter("qwen3")
    mask = os.umask(0o022)
    try:
        convert_adapter(source, tmp_path / "x", "per-expert")
    finally:
        os.umask(mask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o755


BROKEN: dict[str, Callable[[Path], object]] = {
    "truncated weights": lambda d: os.truncate(d / "adapter_model.safetensors", 2000),
    "truncated header": lambda d: os.truncate(d / "adapter_model.safetensors", 20),
    "empty weights": lambda d: (d / "adapter_model.safetensors").write_bytes(b""),
    "foreign weights": lambda d: (d / "adapter_model.safetensors").write_bytes(b"\x89PNG" * 999),
    "a huge header": lambda d: (d / "adapter_model.safetensors").write_bytes(b"\xff" * 64),
    "no weights": lambda d: (d / "adapter_model.safetensors").unlink(),
    "no config": lambda d: (d / "adapter_config.json").unlink(),
    "broken config": lambda d: (d / "adapter_config.json").write_text('{"r": 4,'),
    "binary config": lambda d: (d / "adapter_config.json").write_bytes(b"\xff\xfe\x00"),
    "a list as config": lambda d: (d / "adapter_config.json").write_text("[]"),
    "no rank": lambda d: write_config(d, r=None),
    "a word as alpha": lambda d: write_config(d, lora_alpha="eight"),
    "a list as patterns": lambda d: write_config(d, rank_pattern=[1]),
    "a broken pattern": lambda d: write_config(d, rank_pattern={"(": 4}),
    "numbers as targets": lambda d: write_config(d, target_parameters=[1]),
    "no tensors": lambda d: save_file({}, d / "adapter_model.safetensors"),
    "a missing half": lambda d: changed(d, lambda s: s.pop(next(k for k in s if "lora_B" in k))),
    "an unknown key": lambda d: changed(d, lambda s: s.update({"base_model.model.x.y": torch.ones(2)})),
    "an unknown module": lambda d: changed(
        d, lambda s: s.update({f"model.nothing.lora_{x}.weight": torch.ones(4, 4) for x in "AB"})
    ),
    "another layer": lambda d: changed(
        d, lambda s: s.update({k.replace("layers.1", "layers.7"): v.clone() for k, v in list(s.items())})
    ),
    "another shape": lambda d: changed(d, lambda s: s.update({k: v[:, :3].clone() for k, v in s.items()})),
    "a vector": lambda d: changed(d, lambda s: s.update({k: v.flatten() for k, v in s.items()})),
    "rank 0": lambda d: changed(d, lambda s: s.update({k: v[:0].clone() for k, v in s.items()})),
    "float8 factors": lambda d: changed(d, lambda s: cast_all(s, torch.float8_e4m3fn)),
    "bool factors": lambda d: changed(d, lambda s: cast_all(s, torch.bool)),
    "integer factors": lambda d: changed(d, lambda s: cast_all(s, torch.int32)),
    "a deep config": lambda d: (d / "adapter_config.json").write_text('{"r":' + "[" * 100_000),
    "a deep pattern": lambda d: write_config(d, rank_pattern={"(" * 5000 + ")" * 5000: 4}),
    "an endless alpha": lambda d: write_config(d, lora_alpha=10**400),
    "an endless rank": lambda d: write_config(d, r=10**400, rank_pattern={".*": 4}),
    "a pickle of other things": lambda d: pickled(d, lambda s: {1: torch.ones(2)}),
    "a pickle of sparse factors": lambda d: pickled(d, lambda s: {k: v.to_sparse() for k, v in s.items()}),
    "a pickle that is none": lambda d: os.replace(d / "adapter_model.safetensors", d / "adapter_model.bin"),
}


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = {key: tensor.clone() for key, tensor in load_file(directory / "adapter_model.safetensors").items()}
    change(state)
    save_file(state, directory / "adapter_model.safetensors")


def cast_all(state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    state.update({key: tensor.to(dtype) for key, tensor in state.items()})


def pickled(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    torch.save(change(load_file(directory / "adapter_model.safetensors")), directory / "adapter_model.bin")
    (directory / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize("to", ["peft-fused", "per-expert", "ktransformers"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_told(name: str, to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, _ = stock_adapter("qwen3")
    adapter = tmp_path / "adapter"
    convert_adapter(source, adapter, to)
    BROKEN[name](adapter)
    capfd.readouterr()
    base = str(checkpoint("qwen3"))
    fails = main(["convert", str(adapter), str(tmp_path / "x"), "--to", "per-expert", "--base", base])
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    experts_apart = to == "ktransformers"  # its experts do not lie in adapter_model.safetensors
    if fails == 0:
        assert experts_apart
        assert name in ("no weights", "no tensors", "no config")
    else:
        assert fails == 2
        assert said.err.startswith("error: ")
        assert "expected" in said.err
        assert not (tmp_path / "x").exists()
        assert main(["check", str(adapter), "--base", base]) == 1 or name == "no tensors"
    assert main(["inspect", str(adapter)]) in (0, 2)
    assert "Traceback" not in capfd.readouterr().err
    assert main(["merge", str(adapter), base, str(tmp_path / "m"), "--no-progress"]) == (2 if fails else 0) or (
        name == "no tensors"
    )


EXPERTS_APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rank 0": lambda t: t[:, :0] if t.shape[1] == 4 else t[:, :, :0],
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "bool": lambda t: t.bool(),
    "integer": lambda t: t.int(),
}


@pytest.mark.parametrize("name", EXPERTS_APART)
def test_broken_experts_of_ktransformers(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, _ = stock_adapter("qwen3")
    adapter, base = tmp_path / "adapter", str(checkpoint("qwen3"))
    convert_adapter(source, adapter, "ktransformers")
    state = {key: tensor.clone() for key, tensor in load_file(adapter / files.KT_WEIGHTS).items()}
    state = {key: EXPERTS_APART[name](tensor).contiguous() for key, tensor in state.items()}
    save_file(state, adapter / files.KT_WEIGHTS)
    assert main(["inspect", str(adapter)]) == 2
    assert main(["check", str(adapter), "--base", base]) == main(["check", str(adapter)]) == 1
    assert main(["convert", str(adapter), str(tmp_path / "x"), "--to", "per-expert", "--base", base]) == 2
    assert main(["merge", str(adapter), base, str(tmp_path / "m"), "--no-progress"]) == 2
    assert f"error: {adapter / files.KT_WEIGHTS}: layers.0." in capfd.readouterr().err


@pytest.mark.parametrize("alpha", [float("inf"), 10**400, True, None])
def test_a_manifest_without_a_usable_alpha(
    alpha: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter, base = tmp_path / "adapter", str(checkpoint("qwen3"))
    convert_adapter(stock_adapter("qwen3", '{"target_modules": []}')[0], adapter, "ktransformers")
    for name in (files.CONFIG, files.WEIGHTS):
        (adapter / name).unlink()
    manifest = json.loads((adapter / files.KT_MANIFEST).read_text())
    manifest["lora"]["alpha"] = alpha
    (adapter / files.KT_MANIFEST).write_text(json.dumps(manifest))
    assert main(["convert", str(adapter), str(tmp_path / "x"), "--to", "per-expert", "--base", base]) == 2
    assert "expected lora_alpha in" in capfd.readouterr().err


def test_experts_in_both_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, _ = stock_adapter("qwen3")
    for to in ("peft-fused", "per-expert"):
        convert_adapter(source, tmp_path / to, "ktransformers")
        convert_adapter(source, tmp_path / "single", to, overwrite=True)
        shutil.copy(tmp_path / "single" / files.WEIGHTS, tmp_path / to / files.WEIGHTS)
        assert main(["check", str(tmp_path / to)]) == 1
        assert main(["convert", str(tmp_path / to), str(tmp_path / "x"), "--to", "per-expert"]) == 2
        said = capfd.readouterr().err
        assert f"expected experts in {files.KT_WEIGHTS} or in {files.WEIGHTS}, got both in " in said


def test_directories_that_are_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, _ = stock_adapter("qwen3")
    (tmp_path / "file").write_text("")
    for adapter in ("nowhere", "file", "."):
        for command in (["inspect"], ["convert", "--to", "per-expert", str(tmp_path / "x")]):
            assert main([command[0], str(tmp_path / adapter), *command[1:]]) == 2
        assert main(["check", str(tmp_path / adapter)]) == 1
    assert main(["convert", str(source), str(tmp_path / "file"), "--to", "per-expert"]) == 2
    assert main(["merge", str(source), str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    assert main(["convert", str(source), str(source), "--to", "per-expert"]) == 2, "no --overwrite"
    assert "Traceback" not in capfd.readouterr().err
    assert config_of(source)["r"] == 4
