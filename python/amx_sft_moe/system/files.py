"""Small files of /proc and /sys, and texts without the names of people and hosts."""

from __future__ import annotations

import os
import pwd
import re
import sys
from contextlib import suppress
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


# Where every machine has the same folders: their names are nobody's.
_EVERYWHERE = re.compile(r"/(?:usr|lib|lib32|lib64|opt|etc|dev|proc|sys|nix|snap)(?:/|$)")
# In a list as of LD_PRELOAD, which has colons or spaces in it, behind an option (-L/x), or in a sentence, in
# brackets say. Folders may have spaces too. A slash within a relative path begins none.
_ABSOLUTE = re.compile(r"""(?:(?<![\w.~}*+/-])|(?<=-[LI]))/(?:(?!\s(?:-[LI])?/)[^:;,'"\n()\[\]{}<>`])*""")
_TOKEN = re.compile(r"""[^\s:;,='"]+""")


def without_names(text: str) -> str:
    """``text`` for others to read: home directories as ``~``, the Python environment as ``<environment>``, of
    paths that are neither there nor in a system's own folders the last part alone; and ``...`` for the name of
    the user and of the host within what is left of a path."""
    text = _ABSOLUTE.sub(lambda path: _shortened(path[0]), text)
    names = _own_names()
    if not names:
        return text
    whole = re.compile(rf"(?<![^\W_])(?:{'|'.join(map(re.escape, names))})(?![^\W_])")
    return _TOKEN.sub(lambda token: whole.sub("...", token[0]) if set(token[0]) & set("/.") else token[0], text)


def _shortened(path: str) -> str:
    """An absolute path without its first folders, unless they are those of every machine."""
    home = os.path.expanduser("~").rstrip("/")
    for folder in (re.escape(home) if len(home) > 1 else "", "/(?:home|Users)/[^/]+"):
        if folder and (found := re.match(rf"{folder}(?=/|$)", path)):
            return "~" + path[found.end() :]
    if _EVERYWHERE.match(path):
        return path
    for folder in (sys.prefix, sys.base_prefix):
        if len(folder) > 1 and path.startswith(folder.rstrip("/") + "/"):
            return "<environment>" + path[len(folder.rstrip("/")) :]
    before, _, last = path.rstrip("/").rpartition("/")
    return f".../{last}" if before else path


def _own_names() -> list[str]:
    """Of the user and of the host, longest first; not those that tell nothing."""
    host = os.uname().nodename
    names = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), host, host.partition(".")[0]}
    with suppress(KeyError):  # as in containers that run under any number
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    return sorted(names - {"", "root", "localhost"}, key=len, reverse=True)


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
