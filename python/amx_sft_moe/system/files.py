"""Small files of /proc and /sys, and texts without the names of people."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path("/")


def read(path: Path) -> str | None:
    """The file's text without white space around it; ``None`` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The file's number; ``None`` where there is none ("max" is none)."""
    text = read(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def without_home(text: str) -> str:
    """``text`` with home directories, which hold people's names, as ``~``."""
    home = os.path.expanduser("~").rstrip("/")
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?=/|:|$)", "~", text)
    return re.sub(r"/(?:home|Users)/[^/:\s]+", "~", text)


def count_of_list(text: str) -> int:
    """Length of a list as Linux writes it: ``"0-3,8"`` is 5."""
    count = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def as_list(numbers: set[int]) -> str:
    """Numbers as Linux writes them: ``{0, 1, 2, 5}`` is ``"0-2,5"``."""
    parts: list[str] = []
    first = last = None
    for number in [*sorted(numbers), None]:
        if last is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = number
    return ",".join(parts)
