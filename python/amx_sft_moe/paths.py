"""Paths that users give as arguments."""

from __future__ import annotations

import os
from pathlib import Path

from amx_sft_moe.errors import ArgumentError


def given_directory(name: str, value: str | os.PathLike[str]) -> Path:
    """The directory given as argument ``name``, which may not exist.

    An empty one is refused: to ``Path`` it is the current directory, and mostly a script's unset variable. So
    is one whose name is not UTF-8: safetensors writes there, and does not read.

    Raises:
        TypeError: no path. ArgumentError: one that is refused.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name}: expected a path, got {type(value).__name__}")
    if not os.fspath(value):
        raise ArgumentError(f"{name}: expected a directory, got ''")
    try:
        os.fspath(value).encode("utf-8")
    except UnicodeEncodeError:
        raise ArgumentError(f"{name}: expected a path in UTF-8, got {os.fspath(value)!r}") from None
    return Path(value)
