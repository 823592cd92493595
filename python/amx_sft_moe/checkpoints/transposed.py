"""Experts that a checkpoint holds as ``[E, in, out]``, or packed as mxfp4, written once as ``[E, out, in]``.

The operator reads rows ``[out, in]``. A file with them is made beside the checkpoint, expert by expert, and
mapped from then on: the model's parameter is its transposed view. An interrupted conversion goes on with the
next tensor; a changed checkpoint is noticed and converted anew. Each state of a checkpoint has a folder of its
own, so that several can share a cache and a model in use keeps its files. Nothing removes a folder: what was
written for another state, or by an earlier revision under another name, is left to the user.

A state is known by size, time and header of its files and by blocks of 4 KiB, spread evenly over each expert
tensor. Two states with all of these alike are taken for one: a change of other bytes alone that keeps the
file's time is not noticed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from amx_sft_moe.checkpoints.files import CheckpointFiles
from amx_sft_moe.errors import ArgumentError

logger = logging.getLogger("amx_sft_moe")

FOLDER = "amx_sft_moe-experts"  # within the checkpoint's folder, unless the user names another
_FORMAT = "1"  # of these files; another number makes them anew
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_ALIGNMENT = 64  # bytes, of the data in the file
_RESERVE = 64 << 20  # bytes of the disk that are left alone
_BLOCK = 4096  # bytes of a file that are compared in one place
_BLOCKS = 1024  # of a file, shared by its tensors: takes milliseconds whatever its size


@dataclass(frozen=True)
class Conversion:
    """One expert weight to be written: ``[E, out, in]`` of ``dtype``."""

    parameter: str
    sources: tuple[str, ...]  # names of its tensors in the checkpoint
    shape: tuple[int, int, int]
    dtype: torch.dtype
    expert: Callable[[int], torch.Tensor]  # [out, in] of one expert

    @property
    def nbytes(self) -> int:
        """Of the data."""
        return self.shape[0] * self.shape[1] * self.shape[2] * self.dtype.itemsize


def of_transposed(files: CheckpointFiles, parameter: str, name: str) -> Conversion:
    """From a tensor ``[E, in, out]``."""
    tensor = files.tensor(name)
    if tensor.dim() != 3 or tensor.dtype not in _NAMES:
        raise ArgumentError(
            f"{name}: expected [E, in, out] in bfloat16 or float32, got {list(tensor.shape)} in {tensor.dtype}"
        )
    e, rows, cols = tensor.shape
    return Conversion(parameter, (name,), (e, cols, rows), tensor.dtype, lambda index: tensor[index].t())


def of_mxfp4(files: CheckpointFiles, parameter: str, blocks_name: str, scales_name: str) -> Conversion:
    """From mxfp4 blocks ``[E, out, in / 32, 16]`` and scales ``[E, out, in / 32]``, to bfloat16: it holds
    each of their values exactly."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = files.tensor(blocks_name), files.tensor(scales_name)
    if blocks.dim() != 4 or blocks.shape[3] != 16 or tuple(scales.shape) != tuple(blocks.shape[:3]):
        raise ArgumentError(
            f"{blocks_name}: expected [E, out, in / 32, 16] beside scales [E, out, in / 32], got "
            f"{list(blocks.shape)} and {list(scales.shape)}"
        )
    e, out, groups, width = blocks.shape

    def expert(index: int) -> torch.Tensor:
        one = slice(index, index + 1)
        return convert_moe_packed_tensors(blocks[one], scales[one], dtype=torch.bfloat16)[0].t()

    shape = (e, out, groups * width * 2)
    return Conversion(parameter, (blocks_name, scales_name), shape, torch.bfloat16, expert)


def converted(
    files: CheckpointFiles,
    conversions: list[Conversion],
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> dict[str, torch.Tensor]:
    """Makes what is not there yet; returns each parameter as a view ``[E, in, out]`` of its mapped file.

    Memory: one expert and the page cache. Processes that convert the same checkpoint wait for each other.

    Args:
        files: the checkpoint.
        conversions: what is needed.
        cache_dir: where the folder with the files is; ``None``: ``amx_sft_moe-experts`` of the checkpoint.
        progress: whether a bar on standard error shows the bytes written.

    Raises:
        ArgumentError: too little space, or a folder that cannot be written or locked; the message names it.
    """
    names_in: dict[Path, list[str]] = {}
    for name in sorted(name for one in conversions for name in one.sources):
        names_in.setdefault(files.file_of(name), []).append(name)
    prints = {path: _fingerprint(path, names) for path, names in names_in.items()}
    folder = files.directory / FOLDER if cache_dir is None else Path(cache_dir)
    folder /= hashlib.sha256("".join(prints[path] for path in sorted(prints)).encode()).hexdigest()[:32]
    stamps = {
        one.parameter: {
            "format": _FORMAT,
            "sources": json.dumps([[name, prints[files.file_of(name)]] for name in one.sources]),
        }
        for one in conversions
    }
    found = {one.parameter: _read(folder, one, stamps[one.parameter]) for one in conversions}
    if any(tensor is None for tensor in found.values()):
        with _locked(folder):
            for one in conversions:  # of a process that was killed
                _partial(folder, one.parameter).unlink(missing_ok=True)
            # Another process may have made some while this one waited.
            missing = [one for one in conversions if _read(folder, one, stamps[one.parameter]) is None]
            if missing:
                _require_space(folder, sum(one.nbytes for one in missing))
                _write_all(folder, missing, stamps, progress)
            found = {one.parameter: _read(folder, one, stamps[one.parameter]) for one in conversions}
    for parameter, tensor in found.items():
        if tensor is None:
            raise ArgumentError(f"{_path(folder, parameter)}: expected the file just written, got another")
    return {parameter: tensor.transpose(1, 2) for parameter, tensor in found.items() if tensor is not None}


def _fingerprint(path: Path, names: list[str]) -> str:
    """Of a file's size, time and header, and of blocks of the tensors ``names``: two checkpoints of one
    architecture may differ in their numbers alone, where all files were given the same time."""
    status = path.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode())
    with path.open("rb", buffering=0) as file:  # what is read is what is asked for
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
        digest.update(header)
        entries = json.loads(header)
        for name in names:
            start, end = entries[name]["data_offsets"]
            for offset, size in _sampled(end - start, max(2, _BLOCKS // len(names))):
                file.seek(8 + length + start + offset)
                digest.update(file.read(size))
    return digest.hexdigest()


def _sampled(length: int, count: int) -> list[tuple[int, int]]:
    """Offset and size of ``count`` blocks spread evenly over ``length`` bytes, the first and the last among
    them; of all bytes where the blocks would cover them."""
    if length <= count * _BLOCK:
        return [(0, length)]
    return [(index * (length - _BLOCK) // (count - 1), _BLOCK) for index in range(count)]


def _path(folder: Path, parameter: str) -> Path:
    return folder / f"{parameter}.safetensors"


def _partial(folder: Path, parameter: str) -> Path:
    return folder / f".{_path(folder, parameter).name}.partial"


def _read(folder: Path, one: Conversion, stamp: Mapping[str, str]) -> torch.Tensor | None:
    """The tensor ``[E, out, in]`` of a finished file, mapped; None where there is none, or one of another
    checkpoint."""
    path = _path(folder, one.parameter)
    try:
        with safe_open(path, "pt") as file:
            if file.metadata() != dict(stamp):
                return None
            tensor = file.get_tensor(one.parameter)
    except (OSError, SafetensorError):
        return None
    return tensor if tuple(tensor.shape) == one.shape and tensor.dtype == one.dtype else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ArgumentError(
            f"cache_dir: expected a folder that can be written, for experts in the operator's layout, got "
            f"{folder}: {error.strerror}"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems
            raise ArgumentError(
                "cache_dir: expected a folder whose files can be locked, such as one on a local disk, for "
                f"experts in the operator's layout, got {folder}: {error.strerror}"
            ) from error
        yield


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    needed += _RESERVE
    if needed > free:
        raise ArgumentError(
            f"cache_dir: expected {needed:,} bytes of free space for the operator's layout, got "
            f"{free:,} in {folder}"
        )


def _write_all(
    folder: Path, missing: list[Conversion], stamps: Mapping[str, Mapping[str, str]], progress: bool
) -> None:
    total = sum(one.nbytes for one in missing)
    logger.info("writing %d expert weights (%.1f GB) to %s", len(missing), total / 1e9, folder)
    with tqdm(
        total=total,
        desc="experts, once",
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=not progress,
    ) as bar:
        for one in missing:
            path = _path(folder, one.parameter)
            partial = _partial(folder, one.parameter)
            try:
                with partial.open("wb") as file:
                    _write(file, one, stamps[one.parameter], bar)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            except OSError as error:
                raise ArgumentError(
                    f"cache_dir: expected room to write {path}, got: {error.strerror}"
                ) from error
            finally:
                partial.unlink(missing_ok=True)


def _write(file: BinaryIO, one: Conversion, stamp: Mapping[str, str], bar: tqdm) -> None:
    """A safetensors file of one tensor, expert by expert: the library's writer wants the whole tensor."""
    entry = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [0, one.nbytes]}
    header = json.dumps({"__metadata__": dict(stamp), one.parameter: entry}).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(header)) + header)
    for index in range(one.shape[0]):
        matrix = one.expert(index).contiguous()
        if tuple(matrix.shape) != one.shape[1:] or matrix.dtype != one.dtype:
            raise ArgumentError(
                f"{one.sources[0]}: expected experts {list(one.shape[1:])} {one.dtype}, got "
                f"{list(matrix.shape)} {matrix.dtype}"
            )
        file.write(matrix.view(torch.uint8).numpy().data)
        bar.update(matrix.numel() * matrix.element_size())
