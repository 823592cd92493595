"""The safetensors files of a checkpoint: which tensor lies in which, and tensors as views of the maps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from amx_sft_moe.errors import ArgumentError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointFiles:
    """Tensors of a local checkpoint by name. Nothing is read before it is asked for.

    safetensors maps a file privately: a tensor is a view of the page cache, and writing into it copies the page
    and never reaches the file. A tensor keeps its map alive.

    Args:
        directory: holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.

    Raises:
        ArgumentError: no such files; a shard is missing, cut off or no safetensors file; a tensor of the index
            is not in its shard. The message names the file.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        listed = listed_files(self.directory)
        for path, names in listed.items():
            present = set(self._opened(path).keys())
            if names is not None and (lost := sorted(names - present)):
                raise ArgumentError(
                    f"{path}: expected {len(names)} tensors of {INDEX}, got no {lost[0]}"
                    + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
                )
            self._file_of |= dict.fromkeys(present if names is None else names, path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Element type."""
        return self._slice(name)[:0].dtype if self.shape(name) else self.tensor(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, a view of the mapped file."""
        path = self._file_of[name]
        with _named(path):
            found: torch.Tensor = self._opened(path).get_tensor(name)
            return found

    def is_aligned(self, name: str) -> bool:
        """Whether the tensor begins at a multiple of its elements' size, as kernels want it. The format does
        not promise it: a header of odd length, or a tensor of single bytes before, is enough."""
        return _is_aligned(self.tensor(name))

    def aligned(self, name: str) -> torch.Tensor:
        """The tensor, a view of the mapped file; a copy where it is not aligned there."""
        found = self.tensor(name)
        return found if _is_aligned(found) else found.clone()

    def _slice(self, name: str) -> Any:
        path = self._file_of[name]
        with _named(path):
            return self._opened(path).get_slice(name)

    def _opened(self, path: Path) -> Any:
        if path not in self._open:
            with _named(path):
                self._open[path] = safe_open(path, "pt")
        return self._open[path]


def require_folder(directory: Path) -> None:
    """ArgumentError where there is no such folder."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "no such folder"
        raise ArgumentError(f"{directory}: expected the folder of a checkpoint, got {found}")


def listed_files(directory: Path) -> dict[Path, set[str] | None]:
    """A checkpoint's safetensors files in the order that transformers looks for them, with the tensors that
    the index wants there.

    Raises:
        ArgumentError: no such folder or files, or an index that names anything else than files beside it.
    """
    require_folder(directory)
    if (directory / WHOLE).is_file():
        return {directory / WHOLE: None}
    index = directory / INDEX
    if not index.is_file():
        raise ArgumentError(f"{directory}: expected {WHOLE} or {INDEX}, got neither")
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(f"{index}: expected JSON with a weight_map, got {error!r}") from error
    listed: dict[Path, set[str]] = {}
    for name, file in file_of:
        # Merging writes files of these names: they must not lead elsewhere.
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise ArgumentError(f"{index}: {name}: expected the name of a file beside it, got {file!r}")
        listed.setdefault(directory / file, set()).add(name)
    if not listed:
        raise ArgumentError(f"{index}: expected shards in its weight_map, got none")
    if missing := sorted(path.name for path in listed if not path.is_file()):
        raise ArgumentError(
            f"{directory}: expected {len(listed)} shards by {INDEX}, got no {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    return {path: listed[path] for path in sorted(listed)}


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % tensor.element_size() == 0


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of safetensors say what is wrong, not with which file."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ArgumentError(f"{path}: expected a whole safetensors file, got: {error}") from error
