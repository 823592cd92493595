"""One module per format. `read_file` finds out which it is and hands out a timeline.

A reader streams: it holds one record, one chunk of text or one batch of rows at a time, and what the filters
keep.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from ..errors import TimelineError
from ..filters import Filters
from ..table import Bounds, Collector, Source, Timeline
from . import chrome_trace, json_lines, nsys_sqlite, text_dump

_SAMPLE = 1 << 16
_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\x00"
_STEP_LINE = re.compile(rb'^\s*\{\s*"(?:format"\s*:\s*"amx_sft_moe\.step/|step"\s*:\s*")', re.MULTILINE)
_STEP_KEYS = re.compile(rb'^\s*\{.*"phases_ms"\s*:', re.MULTILINE)
_DUMP_LINE = re.compile(rb"^\s*\[(?:BWD|FWD) TIMER\] \S+: ", re.MULTILINE)

Reader = Callable[[Path, Collector, Filters], None]
_EXPECTED = (
    "JSON lines of AMX_SFT_MOE_TIMER=json, a text dump, a Chrome trace (of this package or of torch, also .gz) "
    "or an SQLite export of Nsight Systems"
)


def _sample(path: Path) -> bytes:
    """The first bytes of a file, unpacked."""
    try:
        if path.is_dir():
            raise TimelineError(f"{path} is a folder; give its files")
        with path.open("rb") as stream:
            sample = stream.read(_SAMPLE)
        if sample.startswith(_GZIP):
            with gzip.open(path) as stream:
                sample = stream.read(_SAMPLE)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TimelineError(f"{path} begins like a gzip file but cannot be unpacked: {error}") from error
    except OSError as error:
        raise TimelineError(f"cannot read {path}: {error.strerror or error}") from error
    if not sample.strip():
        raise TimelineError(f"{path} is empty")
    return sample


def _recognise(path: Path, sample: bytes) -> tuple[str, Reader]:
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
    if text.startswith((b"{", b"[")):
        return "Chrome trace", chrome_trace.read
    shown = text[:40].decode("utf-8", "backslashreplace")
    raise TimelineError(f"{path} is none of the formats read here: {_EXPECTED}; it begins with {shown!r}")


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
    form, reader = _recognise(path, _sample(path))
    into = Collector(Source(str(path), form, path.stat().st_size), bounds or Bounds(), number)
    try:
        reader(path, into, filters.for_new_file())
    except OSError as error:
        raise TimelineError(f"cannot read {path}: {error.strerror or error}") from error
    if not len(into.ranges) and not len(into.passes):
        why = "nothing of it passes the filters" if filters.any else "it holds no ranges"
        raise TimelineError("; ".join([f"{path} is a {form} file, but {why}", *into.notes]))
    return into.timeline()
