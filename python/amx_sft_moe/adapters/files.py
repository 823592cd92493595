"""Adapter files: read with an error that says what is wrong, written whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from amx_sft_moe.adapters.carried import CarriedOver
from amx_sft_moe.errors import ArgumentError, cause_of

logger = logging.getLogger("amx_sft_moe")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PICKLED = "adapter_model.bin"
KT_WEIGHTS, KT_MANIFEST = "fused_expert_lora.safetensors", "kt_adapter_manifest.json"
ADAPTER_FILES = (WEIGHTS, PICKLED, CONFIG, KT_WEIGHTS, KT_MANIFEST)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # with which torch computes
_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_AT_FDCWD = -100


def require_no_checkpoint(name: str, directory: Path) -> None:
    """Refuses to write an adapter beside a model's weights: transformers would load the model with it from then
    on, without a word."""
    kinds = ("model*.safetensors*", "pytorch_model*.bin*")
    weights = sorted(path.name for kind in kinds for path in directory.glob(kind))
    if weights and (directory / "config.json").is_file():
        raise ArgumentError(
            f"{name}: expected a directory without a checkpoint, which would be loaded with the adapter, got "
            f"{directory} with config.json and {weights[0]}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an :class:`ArgumentError` that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as reason:
        raise ArgumentError(f"{path}: expected a JSON object, got {cause_of(reason)}") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"{path}: expected a JSON object, got a {type(found).__name__}")
    return found


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file (mapped, not copied) or of a ``.bin`` file without foreign code.

    Each can be computed with: of a floating type, on the CPU, with elements (so of no rank 0).
    """
    try:
        found = _read_pickle(path) if path.suffix == ".bin" else _read_safetensors(path)
    except Exception as reason:
        # A pickle that is none raises nearly anything.
        if isinstance(reason, MemoryError):
            raise
        raise ArgumentError(f"{path}: expected a file of tensors, got {cause_of(reason)}") from None
    for key, tensor in found.items():
        if tensor.dtype not in FLOATS:
            raise ArgumentError(f"{path}: {key}: expected one of {list(map(str, FLOATS))}, got {tensor.dtype}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or 0 in tensor.shape:
            raise ArgumentError(
                f"{path}: {key}: expected a plain tensor with elements, got {list(tensor.shape)}, "
                f"{tensor.layout} on {tensor.device}"
            )
    return found


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt", device="cpu") as handle:
        return {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"a {type(value).__name__} under {key!r}")
    return {key: tensor.detach() for key, tensor in found.items()}


def tensor_positions(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Where a safetensors file keeps its data and, by tensor, ``dtype``, ``shape`` and ``data_offsets``.

    The format: 8 bytes with the length of a JSON header, the header, the data. ``safe_open`` checks it first.
    """
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as reason:
        raise ArgumentError(f"{path}: expected a safetensors file, got {cause_of(reason)}") from None
    header.pop("__metadata__", None)
    return 8 + length, header


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes and syncs a safetensors file; each tensor in memory of its own, as the format wants it."""
    own = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    try:
        save_file(own, path, metadata={"format": "pt"})
    except SafetensorError as reason:  # a full disk
        raise OSError(f"{path}: {reason}") from None
    sync(path)


def save_json(content: dict[str, Any], path: Path) -> None:
    """Writes and syncs a JSON object, keys sorted as PEFT does it."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """The file's (or directory's) content is on the disk when this returns; a directory's only where its file
    system can do that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as reason:
        # Some network file systems refuse it for directories; all has been written then.
        if reason.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)


@contextmanager
def replaced_directory(directory: Path, drop: Iterable[str] | None = None) -> Iterator[Path]:
    """A fresh directory to write into, which takes ``directory``'s place when the block ends well.

    A reader sees all of the old or all of the new, also after a crash or SIGKILL at any moment; what can stay
    behind then is a sibling ``NAME.partial-...``. Where two directories cannot be exchanged (the file system
    does not, or an existing one is or holds a mount point, has a parent that cannot be written, or is where
    this process works), an existing one is replaced file by file; what can stay behind lies in it then.

    Args:
        directory: need not exist; its parent is made if need be.
        drop: an existing directory's entries of these names go, all others stay (as hard links), as another
            process makes, changes or removes them meanwhile; what of its doings cannot be carried over stays in
            ``NAME.partial-...``, of which a warning tells. ``None``: all go, and a mount point below is an
            ArgumentError.
    """
    directory = directory.resolve()
    if directory.exists() and not directory.is_dir():
        raise ArgumentError(f"directory: expected a directory, got the file {directory}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ArgumentError(
            f"directory: expected one that can be made, got {directory}, below a file"
        ) from error
    mounts = _mounts_in(directory)
    inside = directory.is_dir() and (bool(mounts) or _has_to_stay(directory))
    below = [path for path in mounts if path != directory]
    if below and drop is None:
        raise ArgumentError(
            f"directory: expected one that can be emptied, got {directory}, with a mount at {below[0]}"
        )
    place = directory if inside else directory.parent
    work = Path(tempfile.mkdtemp(prefix=f"{directory.name}.partial-", dir=place))
    stays = False
    try:
        if inside:
            yield work
            sync(work)
            _put_one_by_one(work, directory, sorted(path.name for path in work.iterdir()), drop)
            sync(directory)
            return
        os.chmod(work, directory.stat().st_mode if directory.is_dir() else 0o777 & ~_umask())
        yield work
        written = sorted(path.name for path in work.iterdir())
        others = None
        if directory.is_dir() and drop is not None:
            others = CarriedOver(directory, work, {*drop, *written})
            others.carry()
        sync(work)
        # After an exchange this is the old content.
        stays = (
            _put(work, directory, written, drop) and others is not None and not others.settle(work, directory)
        )
        sync(directory.parent)
    finally:
        if not stays:
            shutil.rmtree(work, ignore_errors=True)


def _umask() -> int:
    """The process's own, read without changing it where the system tells: other threads make files too."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


def _put(work: Path, directory: Path, written: list[str], drop: Iterable[str] | None) -> bool:
    """Whether the two have changed places."""
    if not directory.exists():
        os.rename(work, directory)
        return False
    try:
        exchange(work, directory)
    except OSError as reason:
        if reason.errno not in (errno.EINVAL, errno.ENOSYS, errno.EBUSY, errno.EXDEV, errno.ENOTSUP):
            raise
        logger.info("%s: replaced file by file (%s)", directory, reason)
        _put_one_by_one(work, directory, written, drop)
        return False
    return True


def _has_to_stay(directory: Path) -> bool:
    """Whether another directory cannot take this one's place, mounts apart."""
    try:
        works_there = Path.cwd().is_relative_to(directory)
    except OSError:  # the working directory is gone
        works_there = False
    return works_there or not os.access(directory.parent, os.W_OK)


def _mounts_in(directory: Path, table: Path = Path("/proc/self/mountinfo")) -> list[Path]:
    """Where something is mounted, there or below, a file or folder of the same file system too: it would move
    with the directory, and be emptied."""
    try:
        mounts = os.fsdecode(table.read_bytes()).rstrip("\n").split("\n")
    except OSError:
        return [directory] if os.path.ismount(directory) else []
    points = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in mounts)
    return [path for point in points if (path := Path(point)).is_relative_to(directory)]


def _put_one_by_one(work: Path, directory: Path, written: list[str], drop: Iterable[str] | None) -> None:
    for name in written:
        try:
            os.replace(work / name, directory / name)
        except OSError as reason:
            if reason.errno != errno.EXDEV:  # of a directory that is mounted from the same file system
                raise
            near = directory / f".{name}.partial"
            shutil.copy2(work / name, near)
            sync(near)
            os.replace(near, directory / name)
    old = [path.name for path in directory.iterdir() if path != work] if drop is None else drop
    for name in {*old} - {*written}:
        if (directory / name).is_dir() and not (directory / name).is_symlink():
            shutil.rmtree(directory / name)
        else:
            (directory / name).unlink(missing_ok=True)


def exchange(first: Path, second: Path) -> None:
    """Swaps two paths in one step, by Linux's ``renameat2``."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "no renameat2")
    paths = os.fsencode(first), os.fsencode(second)
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(second))
