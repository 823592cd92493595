"""JSON lines, one per pass of an operator: ``amx_sft_moe.step/1`` and the form before it (without ``format``).

Fields that are missing are done without. Where a line has no spans, the phases of a thread are laid one after
the other inside its part of the region: their lengths are measured, their positions are not, and the timeline
says so.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from ..filters import Filters
from ..names import is_total, step_kind
from ..table import NOT_KNOWN, UNKNOWN, Collector

_Time = TypeVar("_Time", int, float)

_NS_PER_MS = 1e6
_LARGEST = 1 << 61  # what is beyond cannot be a time, and the sum of two must fit a column
_MOST_COMPLAINTS = 3
BAD = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)  # what damage raises
_END = "amx_sft_moe.end/1"  # of the last line of a recording that reached its limit


def whole(value: Any) -> int:
    """A number of a file as an integer; raises ValueError or TypeError where it is none or too large."""
    if type(value) is int and -_LARGEST < value < _LARGEST:  # nearly all, and there are millions
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    number = round(value)
    if not -_LARGEST < number < _LARGEST:
        raise ValueError(f"{number} is no time or size")
    return number


def real(value: Any) -> float:
    """A number of a file as a float; raises ValueError or TypeError where it is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{value} is no amount")
    return float(value)


def _span(what: str, begin: Any, end: Any) -> tuple[int, int]:
    """Begin and end of something as integers; raises ValueError too where it ends before it begins."""
    first, last = whole(begin), whole(end)
    if last < first:
        raise ValueError(f"a {what} ends before it begins")
    return first, last


def _length(time: _Time) -> _Time:
    """The same time; raises ValueError where it is below zero."""
    if time < 0:
        raise ValueError("a time below zero")
    return time


def text_of(value: Any) -> str:
    """A name of a file; whatever else stands there is written out. So are lone surrogates, which JSON and paths
    can have and no encoding has."""
    text = value if isinstance(value, str) else json.dumps(value)[:200]
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass
class _Sums:
    """Sums over one pass."""

    busy: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    serial: dict[str, float] = field(default_factory=dict)  # by group
    thread_waits: list[tuple[int, str, float, float, float]] = field(default_factory=list)
    ranges: list[tuple[str, str, int, int, int]] = field(default_factory=list)  # kind, name, thread, begin, end
    laid_out: bool = False
    most_threads: int = 0


class _Unpacked(io.RawIOBase):
    """The bytes of a gzip file, which end where it is cut off or damaged: all before that is handed out."""

    def __init__(self, path: Path, on_damage: Callable[[str], None]) -> None:
        self._packed = gzip.GzipFile(path)
        self._on_damage: Callable[[str], None] | None = on_damage

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._on_damage is None:
            return 0
        try:
            data = self._packed.read1(len(buffer))  # read() would drop what comes before the damage
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            ends = isinstance(error, EOFError)
            self._on_damage("the packed file ends early" if ends else f"the packed file is damaged ({error})")
            self._on_damage = None
            return 0
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._packed.close()
        super().close()


def open_unpacked(path: Path, on_damage: Callable[[str], None]) -> BinaryIO:
    """A file's bytes, through gzip where it is packed; `on_damage` is told why a packed one ends too early."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, io.BufferedReader(_Unpacked(path, on_damage))) if packed else path.open("rb")


def lines(stream: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """The lines of a stream; None in place of one that is longer than `longest` bytes, which is passed over."""
    while line := stream.readline(longest):
        if line.endswith(b"\n") or len(line) < longest:
            yield line
            continue
        while (rest := stream.readline(longest)) and not rest.endswith(b"\n"):
            pass
        yield None


class _Callers:
    """Finds passes of one process that ran at the same time, where lines do not say which thread called."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # of each process
        self.mixed = False

    def add(self, process: int, begin: int, end: int) -> None:
        """One pass. They come in the order of their ends, so one that overlaps any overlaps the last."""
        last_begin, last_end = self._last.get(process, (end, begin))
        self.mixed |= begin < last_end and last_begin < end
        self._last[process] = begin, end


def _thread_ranges(thread: dict[str, Any], begin: int, end: int, busy: dict[str, int], sums: _Sums) -> None:
    """The phases of one thread in one region: its spans, and what these leave of its busy times laid out."""
    number = whole(thread["thread"])
    left = dict(busy)
    at = begin
    for name, span_begin, span_end, *_ in thread.get("spans") or []:
        span_begin, span_end = _span("span", span_begin, span_end)
        sums.ranges.append(("phase", text_of(name), number, span_begin, span_end))
        left[text_of(name)] = left.get(text_of(name), 0) - (span_end - span_begin)
        at = max(at, span_end)
    if thread.get("spans") and not thread.get("spans_dropped"):
        return
    for name, ns in left.items():
        stop = min(at + max(ns, 0), max(end, at))
        if stop > at:
            sums.ranges.append(("phase", name, number, at, stop))
            sums.laid_out = True
            at = stop


def _region(region: dict[str, Any], sums: _Sums) -> None:
    """Adds one region to the sums of its pass."""
    group = text_of(region["group"])
    begin, end = _span("region", region["begin_ns"], region["end_ns"])
    threads = region.get("threads") or []
    # The form before step/1 does not say so; there a region of one thread is serial work.
    parallel = bool(region.get("parallel", len(threads) > 1))
    sums.ranges.append(("group", group, 0, begin, end))
    sums.most_threads = max(sums.most_threads, len(threads))
    sums.serial[group] = sums.serial.get(group, 0.0) + (0.0 if parallel else end - begin)
    region_busy: dict[str, int] = {}
    for thread in threads:
        own_begin, own_end = _span("thread's part", thread["begin_ns"], thread["end_ns"])
        busy = {text_of(name): _length(whole(ns)) for name, ns in (thread.get("busy_ns") or {}).items()}
        for name, ns in busy.items():
            region_busy[name] = region_busy.get(name, 0) + ns
        if parallel:
            wait = max(end - own_end, 0)
            sums.thread_waits.append((whole(thread["thread"]), group, sum(busy.values()), wait, end - begin))
        _thread_ranges(thread, own_begin, own_end, busy, sums)
    all_busy = sum(region_busy.values())
    for name, ns in region_busy.items():
        sums.busy[name] = sums.busy.get(name, 0.0) + ns
        if ns > 0:
            sums.wall[name] = sums.wall.get(name, 0.0) + (end - begin) * ns / all_busy


def _phase_rows(record: dict[str, Any], sums: _Sums) -> list[tuple[str, float, float, float, float]]:
    """Name, wall, busy, flop and bytes of each phase of a pass. Regions are exact to the nanosecond; phases in
    none of them have the line's own wall times, which are rounded."""
    named = {text_of(k): _length(real(v)) * _NS_PER_MS for k, v in (record.get("phases_ms") or {}).items()}
    wall = {name: ns for name, ns in named.items() if not is_total(name)} | sums.wall
    flop = {name: real(v) for name, v in (record.get("phases_flop") or {}).items()}
    size = {name: real(v) for name, v in (record.get("phases_bytes") or {}).items()}
    return [
        (name, ns, sums.busy.get(name, 0.0), flop.get(name, NOT_KNOWN), size.get(name, NOT_KNOWN))
        for name, ns in wall.items()
    ]


def _add(record: dict[str, Any], into: Collector, filters: Filters, callers: _Callers) -> None:
    """One line. Everything is read before anything is added, so that a bad line leaves nothing behind."""
    step = step_kind(text_of(record["step"]))
    begin = whole(record["begin_ns"])
    end = record["end_ns"] if "end_ns" in record else begin + real(record["total_ms"]) * _NS_PER_MS
    begin, end = _span("pass", begin, end)
    # total_ms is the same, rounded.
    total = float(end - begin) if "end_ns" in record else real(record["total_ms"]) * _NS_PER_MS
    sums = _Sums()
    for region in record.get("regions") or []:
        _region(region, sums)
    phases = _phase_rows(record, sums)
    process = whole(record.get("pid", into.number))
    caller = whole(record.get("caller", 0))  # the number of its team's first thread
    layer = text_of(record.get("name", ""))
    operator = whole(record.get("operator", 0))
    counted = [whole(record.get(key, UNKNOWN)) for key in ("tokens", "routed_rows")]
    threads = whole(record.get("threads", sums.most_threads or UNKNOWN))
    sync_points = whole(record.get("sync_points", UNKNOWN))
    number = len(into.passes)
    index = whole(record["index"]) if "index" in record else None
    limits = {key: real(record[key]) for key in ("peak_gflops", "bandwidth_gbs") if record.get(key) is not None}
    if not filters.keeps_time(begin, end):
        return
    if "caller" not in record:
        callers.add(process, begin, end)
    into.limits.update({key: value for key, value in limits.items() if value > 0 and math.isfinite(value)})
    kernel = text_of(record.get("kernel", ""))
    index = into.next_index(process, operator, step, layer) if index is None else index
    into.passes.add(
        into.number,
        process,
        operator,
        step,
        index,
        layer,
        kernel,
        *counted,
        threads,
        begin,
        end,
        total,
        sync_points,
    )
    for phase, *values in phases:
        if filters.keeps_name(phase):
            into.phases.add(number, phase, *values)
    waits = {group: [0.0, 0.0, serial] for group, serial in sums.serial.items()}
    for thread, group, busy, wait, region in sums.thread_waits:
        if filters.keeps_thread(caller + thread):
            into.add_thread_wait(process, caller + thread, group, busy, wait, region)
            waits[group][0] += wait
            waits[group][1] += region
    for group, values in waits.items():
        into.waits.add(number, group, *values)
    into.laid_out |= sums.laid_out
    whole_pass = [("step", step, 0, begin, end)]
    for kind, name, of_team, range_begin, range_end in whole_pass + sums.ranges:
        thread = caller + of_team
        if filters.keeps(name, thread, range_begin, range_end):
            into.add_range(
                kind, name, step, process, thread, range_begin, range_end, number, layer, NOT_KNOWN, NOT_KNOWN
            )


def _parse(line: bytes | None, longest: int) -> dict[str, Any]:
    """The record on a line; raises ValueError with what is wrong."""
    if line is None:
        raise ValueError(f"longer than {longest:,} bytes")
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    return record


def read(path: Path, into: Collector, filters: Filters) -> None:
    """Reads line by line; lines that cannot be used are counted and the first few named."""
    complaints: list[str] = []
    callers = _Callers()
    bad = 0
    with open_unpacked(path, into.note_cut) as stream:
        longest = into.bounds.record_bytes
        for number, line in enumerate(lines(stream, longest), start=1):
            if line is not None and not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            try:
                record = _parse(line, longest)
                if record.get("format") == _END:
                    into.note_limit()
                else:
                    _add(record, into, filters, callers)
            except BAD as error:
                bad += 1
                what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
                if len(complaints) < _MOST_COMPLAINTS:
                    complaints.append(f"line {number}: {what}")
    if bad:
        more = "" if bad <= len(complaints) else f" and {bad - len(complaints):,} more"
        into.note(f"{bad:,} lines could not be used: {'; '.join(complaints)}{more}")
    if callers.mixed:
        into.note(
            "passes of one process overlap in time and their lines do not say which threads called: gaps, "
            "waiting by thread and what lies in what mix them"
        )
    if into.laid_out:
        into.note(
            "positions of phases inside their regions are laid out one after the other, not measured (no or "
            "incomplete spans); their lengths are measured"
        )
