"""One module per format. `read_file` finds out which it is and hands out a timeline.

A reader streams: it holds one record, one chunk of text or one batch of rows at a time, and what the filters
keep.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import TimelineError
from ..filters import Filters
from ..table import Bounds, Collector, Source, Timeline
from . import chrome_trace, json_lines, nsys_sqlite, text_dump
from .json_lines import open_unpacked, text_of

_SAMPLE = 1 << 16
_SQLITE = b"SQLite format 3\x00"
_STEP_LINE = re.compile(
    rb'^[ \t\r]*\{\s*"(?:format"\s*:\s*"amx_sft_moe\.(?:step|end)/|step"\s*:\s*")', re.MULTILINE
)
_STEP_KEYS = re.compile(rb'^[ \t\r]*\{.*"phases_ms"\s*:', re.MULTILINE)
_DUMP_LINE = re.compile(rb"^[ \t\r]*\[(?:(?:BWD|FWD) TIMER\] \S+|TIMER\] ended): ", re.MULTILINE)

_TRACE = re.compile(rb'\{\s*"|\[\s*\{')  # begins like one, and not like "[INFO] ..."

_OTHER_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}

Reader = Callable[[Path, Collector, Filters], None]
_EXPECTED = (
    "JSON lines of AMX_SFT_MOE_TIMER=json, a text dump, a Chrome trace (of this package or of torch, also .gz) "
    "or an SQLite export of Nsight Systems"
)


def _sample(path: Path) -> tuple[bytes, str]:
    """The first bytes of a file, unpacked, without blanks before them, and what kept them from being more."""
    sample = b""
    damage: list[str] = []
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise TimelineError(f"{path} is a folder; give its files")
        # Opened three times: here, to see whether it is packed, and to be read.
        if not stat.S_ISREG(mode):
            kind = _OTHER_KINDS.get(stat.S_IFMT(mode), "something else")
            raise TimelineError(f"{path}: expected a regular file, got {kind}")
        with open_unpacked(path, damage.append) as stream:
            # A recording whose first step is beyond its limit is blanks up to the end mark.
            while len(sample) < _SAMPLE and (block := stream.read(_SAMPLE)):
                sample = (sample + block).lstrip()
    except OSError as error:
        raise TimelineError(f"cannot read {path}: {error.strerror or error}") from error
    if not sample and not damage:
        raise TimelineError(f"{path} is empty")
    return sample, "".join(damage)


def _recognise(path: Path, sample: bytes, damage: str) -> tuple[str, Reader]:
    """The name of the format and its reader; raises TimelineError for a foreign file."""
    text = sample.removeprefix(b"\xef\xbb\xbf").lstrip()
    if sample.startswith(_SQLITE):
        return "Nsight Systems SQLite", nsys_sqlite.read
    if sample.startswith((b"NVIDIA Tegra Profiler Report", b"QDSTRM")) or path.suffix in (
        ".nsys-rep",
        ".qdrep",
        ".qdstrm",
    ):
        raise TimelineError(
            f"{path} is a report of Nsight Systems: nsys export --type sqlite {path.name}, then give that file"
        )
    if _STEP_LINE.search(text) or (_STEP_KEYS.search(text) and b'"traceEvents"' not in text):
        return "JSON lines", json_lines.read
    if _DUMP_LINE.search(text):  # begins with a bracket too
        return "text dump", text_dump.read
    if _TRACE.match(text) and not _is_of_lines(text):
        return "Chrome trace", chrome_trace.read
    if not damage and (further := _further_on(path)):
        return further
    if text.startswith((b"{", b"[")):  # whose reader says what is wrong
        return "Chrome trace", chrome_trace.read
    if damage:
        raise TimelineError(f"{path} begins like a gzip file but cannot be unpacked: {damage}")
    shown = text[:40].decode("utf-8", "backslashreplace")
    raise TimelineError(f"{path} is none of the formats read here: {_EXPECTED}; it begins with {shown!r}")


def _is_of_lines(text: bytes) -> bool:
    """Whether the first line is JSON by itself and others follow, as in a log of objects."""
    first, _, rest = text.partition(b"\n")
    if not rest.strip():
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _further_on(path: Path) -> tuple[str, Reader] | None:
    """The format of the first line of ours behind a long log of others; None for a file that has none."""
    carried = b""
    with open_unpacked(path, lambda damage: None) as stream:
        while (block := stream.read(_SAMPLE)) and b"\0" not in block:
            text = carried + block
            if _STEP_LINE.search(text) or _STEP_KEYS.search(text):
                return "JSON lines", json_lines.read
            if _DUMP_LINE.search(text):
                return "text dump", text_dump.read
            carried = text[text.rfind(b"\n") + 1 :]
            if len(carried) > _SAMPLE:  # of ours it would have been known by now; what follows is no beginning
                carried = b"-"
    return None


def _origin(reader: Reader, path: Path, bounds: Bounds, source: Source) -> int | None:
    """When the earliest range of a file begins, which is known when it has been read to its end."""
    scout = Filters(scouting=True)
    reader(path, Collector(replace(source, facts={}), bounds), scout)
    return scout.origin


def read_file(
    path: Path, filters: Filters | None = None, bounds: Bounds | None = None, number: int = 0
) -> Timeline:
    """One file as a timeline.

    Args:
        path: the file; its format is found out from its first bytes.
        filters: what is kept; everything by default.
        bounds: how much is kept at most.
        number: of the file among those read together; stands for the process where the file names none.

    Raises:
        TimelineError: the file cannot be read, is of no known format, or holds nothing.
    """
    filters = filters or Filters()
    try:
        form, reader = _recognise(path, *_sample(path))
        own, bounds = filters.for_new_file(), bounds or Bounds()
        source = Source(text_of(str(path)), form, path.stat().st_size)
        if own.window:
            own.origin = _origin(reader, path, bounds, source)
        into = Collector(source, bounds, number)
        reader(path, into, own)
    except OSError as error:
        raise TimelineError(f"cannot read {path}: {error.strerror or error}") from error
    if not len(into.ranges) and not len(into.passes):
        why = "nothing of it passes the filters" if filters.any else "it holds no ranges"
        raise TimelineError("; ".join([f"{path} is a {form} file, but {why}", *into.notes]))
    return into.timeline()
