"""Chrome traces: ours, torch.profiler's, and any other with complete (X), begin and end (B, E), asynchronous
(b, e) and counter (C) events. Instants and flow arrows carry no time and are passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..filters import Filters
from ..names import step_kind
from ..table import NOT_KNOWN, UNKNOWN, Collector
from .json_lines import BAD, open_unpacked, real, text_of, whole
from .json_stream import TraceEvents

_NS_PER_US = 1000
_MOST_OPEN = 100_000  # begin events without their end
_RANGES_PER_COUNT = 4  # of the bound: as many events of counters are kept as a quarter of it

_KINDS = {
    "step": "step",
    "group": "group",
    "phase": "phase",
    # torch.profiler's categories
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "user_annotation": "nvtx",
    "gpu_user_annotation": "gpu_annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
}
_PASS_ARGUMENTS = (("operator", 0), ("tokens", UNKNOWN), ("routed_rows", UNKNOWN))
LANE = 1000  # our traces give each caller's team a thousand numbers of threads, the caller's the first
_ENDED = "amx_sft_moe trace ended"  # an instant, of a recording that reached its limit
_NOT_RANGES = ("Trace",)  # torch's frame around the whole recording


class _Names:
    """Numbers of processes and threads; names that stand in their place (torch's "Spans") get negative
    numbers."""

    def __init__(self, into: Collector) -> None:
        self._into = into
        self._known: dict[str, int] = {}

    def number(self, value: Any) -> int:
        if isinstance(value, str):
            try:
                return whole(int(value))
            except ValueError:
                return self._known.setdefault(value[:100], -2 - len(self._known))
        return whole(value)

    def metadata(self, event: dict[str, Any]) -> None:
        name = event.get("args", {}).get("name")
        if not isinstance(name, str) or event["name"] != "thread_name":
            return
        if len(self._into.thread_names) < _MOST_OPEN:
            process, thread = self.number(event.get("pid", 0)), self.number(event.get("tid", 0))
            self._into.thread_names[process, thread] = text_of(name[:100])


def _nanoseconds(value: Any) -> int:
    """Microseconds of a trace in nanoseconds."""
    return whole(round(real(value) * _NS_PER_US))


def _amount(args: dict[str, Any], key: str) -> float:
    """What other programs write under our names may be anything."""
    try:
        return real(args[key])
    except BAD:
        return NOT_KNOWN


class _Reader:
    """Turns events into ranges."""

    def __init__(self, into: Collector, filters: Filters) -> None:
        self._into, self._filters = into, filters
        self._names = _Names(into)
        self._open: dict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]] = {}
        self._open_count = 0
        self._teams: dict[tuple[int, int], set[int]] = {}  # threads by process and lane
        self._team_of_pass: list[set[int]] = []
        self.bad = 0
        self.counts_left_out = 0

    def _range(self, event: dict[str, Any], begin: int, end: int, kind: str | None = None) -> None:
        """Adds one range; `event` names it."""
        category = text_of(event.get("cat", ""))
        if category in _NOT_RANGES:
            return
        name = text_of(event["name"])
        thread = self._names.number(event.get("tid", 0))
        process = self._names.number(event.get("pid", self._into.number))
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        kind = kind or _KINDS.get(category, "range")
        if kind == "phase":  # before any filter: the team is that of the whole file
            self._team(process, thread).add(thread % LANE)
        if kind == "step":
            name = category = step_kind(name)  # the layer is in the arguments
        elif kind == "group" and thread % LANE:
            kind = "member"  # a thread's part of a group, of which the caller's is the whole
        layer, flop, size = text_of(args.get("layer", "")), _amount(args, "flop"), _amount(args, "bytes")
        if kind == "step":
            self._pass(category, layer, process, thread, begin, end, args)
        if self._filters.keeps_for_passes(kind, name, thread, begin, end):
            self._into.add_range(kind, name, category, process, thread, begin, end, UNKNOWN, layer, flop, size)

    def _team(self, process: int, thread: int) -> set[int]:
        """The threads of one caller, numbered from 0."""
        if len(self._teams) >= _MOST_OPEN:
            return self._teams.get((process, thread // LANE), set())
        return self._teams.setdefault((process, thread // LANE), set())

    def count_threads(self) -> None:
        """Gives the passes the size of their team: no event says it, but our traces name each of its threads,
        and each that works has phases. Left unknown where there is neither."""
        for (process, thread), name in self._into.thread_names.items():
            if name.removesuffix(" of another caller") == f"thread {thread % LANE}":
                self._team(process, thread).add(thread % LANE)
        for row, team in enumerate(self._team_of_pass):
            if team:
                self._into.passes.put("threads", row, len(team))

    def _pass(
        self, step: str, layer: str, process: int, thread: int, begin: int, end: int, args: dict[str, Any]
    ) -> None:
        """The row of a pass; its phases are worked out when all ranges are there."""
        into = self._into
        if not self._filters.keeps_time(begin, end):
            return
        operator, tokens, rows = (whole(args.get(k, d)) for k, d in _PASS_ARGUMENTS)
        index = whole(args["step"]) if "step" in args else into.next_index(process, operator, step, layer)
        kernel = text_of(args.get("kernel", ""))
        into.passes.add(
            into.number,
            process,
            operator,
            step,
            index,
            layer,
            kernel,
            tokens,
            rows,
            UNKNOWN,
            begin,
            end,
            float(end - begin),
            UNKNOWN,
        )
        self._team_of_pass.append(self._team(process, thread))

    def _opened(self, key: tuple[Any, ...], event: dict[str, Any]) -> None:
        if self._open_count >= _MOST_OPEN:
            raise ValueError("too many open ranges")
        self._open.setdefault(key, []).append((_nanoseconds(event["ts"]), event))
        self._open_count += 1

    def _closed(self, key: tuple[Any, ...], event: dict[str, Any], kind: str | None) -> None:
        begin, opened = self._open[key].pop()
        if not self._open[key]:
            del self._open[key]
        self._open_count -= 1
        args = {**(opened.get("args") or {}), **(event.get("args") or {})}
        self._range({**opened, "args": args}, begin, _nanoseconds(event["ts"]), kind)

    def event(self, event: dict[str, Any]) -> None:
        """One event; raises what BAD lists for one that cannot be used."""
        kind = event.get("ph")
        if kind == "X":
            begin = _nanoseconds(event["ts"])
            duration = _nanoseconds(event.get("dur", 0))
            if duration < 0:
                raise ValueError("a duration below zero")
            self._range(event, begin, begin + duration)
        elif kind in ("B", "E"):
            key: tuple[Any, ...] = ("B", event.get("pid"), event.get("tid"))
            if kind == "B":
                self._opened(key, event)
            else:
                self._closed(key, event, None)
        elif kind in ("b", "e"):
            key = (
                "b",
                event.get("pid"),
                text_of(event.get("cat", "")),
                text_of(event.get("id", event.get("id2", ""))),
            )
            if kind == "b":
                self._opened(key, event)
            else:
                self._closed(key, event, "startend")
        elif kind == "C":
            self._counter(event)
        elif kind == "M":
            self._names.metadata(event)
        elif kind == "i" and event.get("name") == _ENDED:
            self._into.note_limit()

    def _counter(self, event: dict[str, Any]) -> None:
        at, process = _nanoseconds(event["ts"]), self._names.number(event.get("pid", self._into.number))
        if not self._filters.keeps_moment(at, at):
            return
        if len(self._into.counters) >= self._into.bounds.ranges // _RANGES_PER_COUNT:
            self.counts_left_out += 1
            return
        name = text_of(event["name"])
        for series, value in (event.get("args") or {}).items():
            plain = series in ("value", name) or len(event["args"]) == 1
            label = name if plain else f"{name}: {text_of(series)}"
            self._into.counters.add(label, process, at, real(value))

    @property
    def open_ranges(self) -> int:
        return self._open_count


def _limit(value: Any) -> float | None:
    """A measured limit; None where the value is none."""
    try:
        return real(value) if value > 0 else None
    except BAD:
        return None


def _limits(header: dict[str, Any], into: Collector) -> None:
    """Facts and measured limits of `otherData`."""
    other = header.get("otherData")
    for key, value in (other if isinstance(other, dict) else {}).items():
        limit = _limit(value) if key in ("peak_gflops", "bandwidth_gbs") else None
        if limit is not None:
            into.limits[key] = limit
        elif len(into.source.facts) < 50 and isinstance(value, (str, int, float, bool)):
            into.source.facts[text_of(key)[:100]] = text_of(str(value))[:200]
    for key in ("traceName", "host_name"):
        if isinstance(header.get(key), str):
            into.source.facts[key] = text_of(header[key])[:200]


def read(path: Path, into: Collector, filters: Filters) -> None:
    """Reads event by event."""
    reader = _Reader(into, filters)
    cut: list[str] = []
    with open_unpacked(path, cut.append) as stream:
        events = TraceEvents(stream, str(path), into.bounds.record_bytes)
        for event in events:
            try:
                reader.event(event)
            except BAD:
                reader.bad += 1
    reader.count_threads()
    _limits(events.header, into)
    if events.cut and not cut:
        cut.append("the file ends before its list of events does (a crash?)")
    for what in cut:
        into.note_cut(what)
    if events.more:
        into.note("what stands behind the trace's end, another trace perhaps, was passed over")
    if events.broken or reader.bad:
        into.note(f"{events.broken + reader.bad:,} events were broken and passed over")
    if reader.open_ranges:
        into.note(f"{reader.open_ranges:,} ranges were begun and not ended; they are left out")
    if reader.counts_left_out:
        into.note(
            f"{reader.counts_left_out:,} events of counters beyond a quarter of the bound of "
            f"{into.bounds.ranges:,} ranges were left out (--max-ranges); --filter-time chooses others"
        )
