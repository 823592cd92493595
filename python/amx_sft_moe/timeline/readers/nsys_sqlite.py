"""SQLite exports of Nsight Systems (``nsys export --type sqlite``), read in batches of rows.

Tables come and go with what was traced, columns with the version of the tool: what is missing is done without.
Opened read-only and immutable, so that nothing is written beside the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import TimelineError
from ..filters import Filters
from ..names import DOMAIN, GROUPS, PHASES, step_kind, step_of_group
from ..table import NOT_KNOWN, UNKNOWN, Collector
from .json_lines import whole

_BATCH = 5_000
_PUSH_POP = (59, 70)  # NVTX and NVTXT
_START_END = (60, 71)
_DOMAIN_CREATE = 75
_OS_CALL = 27  # eventClass of a call; other classes of OSRT_API are marks without length
_TABLES = (
    "NVTX_EVENTS",
    "OSRT_API",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
)
_COPIES = {
    0: "Unknown",
    1: "Host-to-Device",
    2: "Device-to-Host",
    8: "Device-to-Device",
    9: "Host-to-Host",
    10: "Peer-to-Peer",
}  # where the file has no table of them
_PASSES = ("forward", "backward")


def process_of(global_id: int) -> int:
    """The process in a serialised GlobalId."""
    return (global_id >> 24) & 0xFFFFFF


def thread_of(global_id: int) -> int:
    """The thread in a serialised GlobalId."""
    return global_id & 0xFFFFFF


class _Export:
    """One opened export: its tables, their columns, and rows in batches."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        names = self.connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.tables = {name for (name,) in names}

    def columns(self, table: str) -> set[str]:
        return {row[1] for row in self.connection.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, table: str, wanted: Sequence[str], names: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """The wanted columns, NULL for those that are missing; those of `names` are ids whose strings are
        looked
        up."""
        have = self.columns(table)
        strings = "StringIds" in self.tables
        selected, joins = [], []
        for column in wanted:
            if column not in have:
                selected.append("NULL")
            elif column in names:
                if strings:
                    joins.append(f'LEFT JOIN StringIds AS "s_{column}" ON "s_{column}".id = t."{column}"')
                    selected.append(f'"s_{column}".value')
                else:
                    selected.append("NULL")
            else:
                selected.append(f't."{column}"')
        cursor = self.connection.execute(f'SELECT {", ".join(selected)} FROM "{table}" AS t {" ".join(joins)}')
        while batch := cursor.fetchmany(_BATCH):
            yield from batch


class _Reader:
    def __init__(self, export: _Export, into: Collector, filters: Filters) -> None:
        self._export, self._into, self._filters = export, into, filters
        self.bad = 0
        self.unended = 0

    def _add(
        self,
        kind: str,
        name: str,
        category: str,
        process: int,
        thread: int,
        begin: int,
        end: int,
        size: float = NOT_KNOWN,
    ) -> None:
        if end < begin:
            raise ValueError("ends before it begins")  # one of the rows that cannot be used
        if self._filters.keeps_for_passes(kind, name, thread, begin, end):
            self._into.add_range(
                kind, name, category, process, thread, begin, end, UNKNOWN, "", NOT_KNOWN, size
            )

    def _each(self, table: str, use: Any, wanted: Sequence[str], names: Sequence[str] = ()) -> None:
        """Hands each row of a table to `use`; rows that cannot be used are counted."""
        if table not in self._export.tables:
            return
        for row in self._export.rows(table, wanted, names):
            try:
                use(*row)
            except (TypeError, ValueError, OverflowError):
                self.bad += 1

    def domains(self) -> dict[tuple[int, int], str]:
        """Names of NVTX domains by process and number."""
        found: dict[tuple[int, int], str] = {}

        def use(kind: Any, tid: Any, domain: Any, text: Any, text_id: Any) -> None:
            if kind == _DOMAIN_CREATE and (text_id or text) and len(found) < 10_000:
                found.setdefault((process_of(whole(tid)), whole(domain)), str(text_id or text)[:200])

        self._each("NVTX_EVENTS", use, ("eventType", "globalTid", "domainId", "text", "textId"), ("textId",))
        return found

    def nvtx(self) -> None:
        domains = self.domains()

        def use(kind: Any, start: Any, end: Any, tid: Any, domain_id: Any, text: Any, text_id: Any) -> None:
            if kind not in _PUSH_POP and kind not in _START_END:
                return
            if end is None:
                self.unended += 1
                return
            tid = whole(tid)
            process, name = process_of(tid), str(text_id if text_id is not None else text or "")
            domain = domains.get((process, whole(domain_id)), "") if domain_id is not None else ""
            style = "nvtx" if kind in _PUSH_POP else "startend"
            if domain == DOMAIN and style == "nvtx":
                self._ours(name, process, thread_of(tid), whole(start), whole(end))
            else:
                self._add(style, name, domain, process, thread_of(tid), whole(start), whole(end))

        wanted = ("eventType", "start", "end", "globalTid", "domainId", "text", "textId")
        self._each("NVTX_EVENTS", use, wanted, ("textId",))

    def _ours(self, name: str, process: int, thread: int, begin: int, end: int) -> None:
        """A range of this package. backward_routing_weights is a group and a phase: see passes.derive."""
        kind = "group" if step_of_group(name) else "phase" if name in PHASES else "nvtx"
        if step_kind(name) in _PASSES and name not in GROUPS and kind == "nvtx":
            kind = "step" if name.split(" ")[0] in _PASSES else "nvtx"
        self._add(kind, name, DOMAIN, process, thread, begin, end)

    def os_calls(self) -> None:
        def use(start: Any, end: Any, tid: Any, name: Any, event_class: Any) -> None:
            if event_class is not None and event_class != _OS_CALL:
                return
            tid = whole(tid)
            self._add(
                "osrt", str(name or "(unknown)"), "", process_of(tid), thread_of(tid), whole(start), whole(end)
            )

        self._each("OSRT_API", use, ("start", "end", "globalTid", "nameId", "eventClass"), ("nameId",))

    def kernels(self) -> None:
        def use(start: Any, end: Any, pid: Any, device: Any, stream: Any, long: Any, short: Any) -> None:
            process = process_of(whole(pid)) if pid is not None else 0
            name = str(long or short or "(unknown)")
            self._add("kernel", name, f"device {device}", process, whole(stream), whole(start), whole(end))

        wanted = ("start", "end", "globalPid", "deviceId", "streamId", "demangledName", "shortName")
        self._each("CUPTI_ACTIVITY_KIND_KERNEL", use, wanted, ("demangledName", "shortName"))

    def copies(self) -> None:
        labels = dict(_COPIES)
        self._each(
            "ENUM_CUDA_MEMCPY_OPER", lambda n, label: labels.update({whole(n): str(label)}), ("id", "label")
        )

        def copy(start: Any, end: Any, pid: Any, device: Any, stream: Any, size: Any, kind: Any) -> None:
            name = f"[CUDA memcpy {labels.get(whole(kind), f'kind {kind}')}]"
            process = process_of(whole(pid)) if pid is not None else 0
            self._add(
                "copy",
                name,
                f"device {device}",
                process,
                whole(stream),
                whole(start),
                whole(end),
                float(size or 0),
            )

        def clear(start: Any, end: Any, pid: Any, device: Any, stream: Any, size: Any) -> None:
            process = process_of(whole(pid)) if pid is not None else 0
            self._add(
                "copy",
                "[CUDA memset]",
                f"device {device}",
                process,
                whole(stream),
                whole(start),
                whole(end),
                float(size or 0),
            )

        wanted = ("start", "end", "globalPid", "deviceId", "streamId", "bytes")
        self._each("CUPTI_ACTIVITY_KIND_MEMCPY", copy, (*wanted, "copyKind"))
        self._each("CUPTI_ACTIVITY_KIND_MEMSET", clear, wanted)

    def thread_names(self) -> None:
        """Names of the threads that have ranges; the table lists every thread of the machine."""

        def use(tid: Any, name: Any) -> None:
            if name and len(self._into.thread_names) < 100_000:
                tid = whole(tid)
                self._into.thread_names[process_of(tid), thread_of(tid)] = f"{thread_of(tid)} {name}"[:100]

        self._each("ThreadNames", use, ("globalTid", "nameId"), ("nameId",))

    def facts(self) -> None:
        """Which tool wrote the file."""
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            self._each(table, self._fact, ("name", "value"))

    def _fact(self, name: Any, value: Any) -> None:
        if name in ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION"):
            self._into.source.facts[name.removeprefix("EXPORT_").lower().replace("_", " ")] = str(value)[:100]


def _origin(export: _Export) -> int | None:
    """When the first range of any table begins: rows come table by table, so the first row is not the
    earliest."""
    first = []
    for table in _TABLES:
        if table in export.tables and "start" in export.columns(table):
            (start,) = export.connection.execute(f'SELECT MIN(start) FROM "{table}"').fetchone()
            if isinstance(start, int):
                first.append(start)
    return min(first, default=None)


def read(path: Path, into: Collector, filters: Filters) -> None:
    """Reads the tables that there are."""
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True)
    try:
        export = _Export(connection)
        if not export.tables.intersection(_TABLES):
            found = ", ".join(sorted(export.tables)[:6]) or "none"
            raise TimelineError(
                f"{path} is an SQLite file but no export of Nsight Systems with ranges: it has none of "
                f"the tables {', '.join(_TABLES)} (tables: {found})"
            )
        filters.origin = _origin(export)
        if filters.scouting:
            return
        reader = _Reader(export, into, filters)
        for part in (
            reader.facts,
            reader.nvtx,
            reader.os_calls,
            reader.kernels,
            reader.copies,
            reader.thread_names,
        ):
            part()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from messages about damaged names
        if not len(into.ranges):
            raise TimelineError(f"{path} cannot be read as SQLite: {error}") from error
        into.note_cut(f"the file is damaged ({error})")
        return
    finally:
        connection.close()
    if reader.bad:
        into.note(f"{reader.bad:,} rows could not be used")
    if reader.unended:
        into.note(f"{reader.unended:,} NVTX ranges were not ended; they are left out")
