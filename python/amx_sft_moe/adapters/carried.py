"""A folder's other entries, carried over to the one that takes its place while another process works in it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger("amx_sft_moe")

_Identity = tuple[int, ...]


@dataclass(frozen=True)
class CarriedOver:
    """What was carried over from ``old`` to ``new``, and how both were then: by that is known who changed what.

    ``without``: names of entries that have no place in the new folder, or another one's.
    """

    old: Path
    new: Path
    without: Container[str]
    _seen: dict[Path, tuple[_Identity | None, _Identity | None]] = field(default_factory=dict)

    def carry(self, below: Path = Path()) -> None:
        """Hard links, or copies where there are none, of what is in ``old``; what vanishes meanwhile is not."""
        for entry in self._entries(self.old, below):
            source, place = self.old / entry, self.new / entry
            before = _identity(source)
            try:
                if _is_folder(source):
                    place.mkdir()
                    self.carry(entry)
                    shutil.copystat(source, place)
                else:
                    _link(source, place)
            except FileNotFoundError:
                if os.path.lexists(source):
                    raise
                shutil.rmtree(place, ignore_errors=True)  # as a Trainer removes old checkpoints
            self._seen[entry] = before, _identity(place)

    def settle(self, old: Path, new: Path) -> bool:
        """What others did to the old folder since, done to the new one; both have changed places.

        They win over what was carried, the later over what was written in both. Whether nothing failed: else
        ``old`` has things that are nowhere else.
        """
        good = True
        for entry, (_, carried) in sorted(self._seen.items(), reverse=True):  # what is in a folder before it
            if not os.path.lexists(old / entry) and _identity(new / entry) == carried:
                with suppress(OSError):  # a folder in which something is by now
                    (new / entry).rmdir() if _is_folder(new / entry) else (new / entry).unlink()
        for entry in self._entries(old, Path()):
            good &= self._bring(old, new, entry)
        return good

    def _bring(self, old: Path, new: Path, entry: Path) -> bool:
        source, place = old / entry, new / entry
        try:
            if _is_folder(source) and _is_folder(place):
                moved = [self._bring(old, new, each) for each in self._entries(old, entry)]
                return all(moved)
            before, carried = self._seen.get(entry, (None, None))
            here = _identity(place)
            is_changed = _identity(source) != before
            if is_changed and (here is None or here == carried or _is_later(source, place)):
                _replace(source, place)
        except OSError as reason:
            if not os.path.lexists(source):
                return True  # removed meanwhile
            logger.warning("%s: not moved to %s: %s", source, place, reason)
            return False
        return True

    def _entries(self, folder: Path, below: Path) -> list[Path]:
        names = [path.name for path in (folder / below).iterdir()]
        return [below / name for name in names if below != Path() or name not in self.without]


def _identity(path: Path) -> _Identity | None:
    """By which a changed or another entry is told; a folder's does not change with what is in it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return (status.st_ino,) if _is_folder(path) else (status.st_ino, status.st_mtime_ns, status.st_size)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_later(one: Path, other: Path) -> bool:
    return one.lstat().st_mtime_ns > other.lstat().st_mtime_ns


def _replace(source: Path, place: Path) -> None:
    if _is_folder(place):  # a file has taken its place, or a link
        shutil.rmtree(place)
    elif _is_folder(source):
        place.unlink(missing_ok=True)
    os.replace(source, place)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
