"""What every reader produces: one table of ranges, and tables of passes, phases and waiting beside it.

Tables grow as typed arrays of machine numbers with strings stored once, some 75 bytes a range, so that a large
file costs memory in proportion to the ranges that were asked for and nothing else. `Bounds` caps those.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import TimelineError
from .libraries import pandas

if TYPE_CHECKING:
    import pandas as pd

# Kinds of ranges. Those of CPU_KINDS nest on their thread as push/pop ranges do.
CPU_KINDS = ("step", "group", "phase", "nvtx", "range")
GPU_KINDS = ("kernel", "copy")
PASS_KINDS = (*CPU_KINDS, "member")  # of which passes, phases and waiting are worked out
TEAM_KINDS = ("step", "group", "member", "phase")  # of our own passes, in which a team of threads takes part

# Column types: q 64-bit integer, d double, s string stored once. Ranges and waiting by thread also get a column
# "source" (row of Timeline.sources) once they are read: processes of two machines may have the same number.
RANGES = {
    # step, group, phase, nvtx, range, startend, osrt, kernel, copy, runtime, member (a thread's part of a
    # group)
    "kind": "s",
    "name": "s",
    "category": "s",  # forward or backward; the NVTX domain; the cat of a Chrome trace
    "process": "q",
    "thread": "q",  # of the team in our files, where each caller has a thousand numbers and the main thread the
    # first; the system's elsewhere, the stream for kernels and copies
    "begin_ns": "q",
    "end_ns": "q",
    "step": "q",  # row of the table of passes; -1: in none
    "layer": "s",
    "flop": "d",  # not a number: not known
    "bytes": "d",
}
PASSES = {
    "source": "q",  # row of Timeline.sources
    "process": "q",
    "operator": "q",
    "step": "s",  # forward, backward, or the name of the range that makes a step
    "index": "q",
    "layer": "s",
    "kernel": "s",
    "tokens": "q",  # -1: not known, as in routed_rows, threads and sync_points
    "routed_rows": "q",
    "threads": "q",
    "begin_ns": "q",
    "end_ns": "q",
    "total_ns": "d",
    "sync_points": "q",
}
# One row per pass and phase. wall_ns: up to the slowest thread, shared regions divided by busy time.
PHASES = {"pass": "q", "phase": "s", "wall_ns": "d", "busy_ns": "d", "flop": "d", "bytes": "d"}
# One row per pass and group. thread_ns: threads times wall time of the group's parallel regions.
WAITS = {"pass": "q", "group": "s", "wait_ns": "d", "thread_ns": "d", "serial_ns": "d"}
# One row per thread and group, summed over all passes.
THREAD_WAITS = {"process": "q", "thread": "q", "group": "s", "busy_ns": "d", "wait_ns": "d", "region_ns": "d"}
COUNTERS = {"name": "s", "process": "q", "begin_ns": "q", "value": "d"}

UNKNOWN = -1
NOT_KNOWN = float("nan")
_LONGEST_NAME = 1_000
_OTHER_NAMES = "(other names)"


@dataclass(frozen=True)
class Bounds:
    """How much is kept. The readers stop keeping ranges at `ranges` and say so; sums per pass go on where the
    file has them, and end with the last whole pass where they are worked out from the ranges."""

    ranges: int = 2_000_000  # some 150 MB of tables, up to 800 MB while reports are made
    names: int = 200_000  # distinct strings a column; the rest is "(other names)"
    record_bytes: int = 16 << 20  # one line, one event: what is longer is passed over

    def __post_init__(self) -> None:
        if self.ranges < 1:
            raise TimelineError(f"ranges: expected 1 or more, got {self.ranges}")


class Columns:
    """A growing table with one typed array per column."""

    def __init__(self, schema: Mapping[str, str], most_names: int = Bounds.names) -> None:
        self._most_names = most_names
        self._arrays: dict[str, array[Any]] = {}
        self._strings: dict[str, dict[str, int]] = {}
        self._append: list[Callable[[Any], None]] = []
        for name, kind in schema.items():
            if kind == "s":
                self._arrays[name] = array("i")
                self._strings[name] = {}
                self._append.append(self._string_appender(name))
            else:
                self._arrays[name] = array(kind)
                self._append.append(self._arrays[name].append)

    def _string_appender(self, column: str) -> Callable[[str], None]:
        codes, known, most = self._arrays[column], self._strings[column], self._most_names

        def append(value: str) -> None:
            code = known.get(value)
            if code is None:
                if len(value) > _LONGEST_NAME:
                    value = value[: _LONGEST_NAME - 1] + "…"
                if len(known) >= most:
                    value = _OTHER_NAMES
                code = known.setdefault(value, len(known))
            codes.append(code)

        return append

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def add(self, *values: Any) -> None:
        """One row, in the order of the schema. Values have to be of the columns' types: the readers see to
        it."""
        for append, value in zip(self._append, values, strict=True):
            append(value)

    def put(self, column: str, row: int, value: float) -> None:
        """A number that became known after its row was added."""
        self._arrays[column][row] = value

    def frame(self) -> pd.DataFrame:
        """The table; strings become categories."""
        pd = pandas()
        data: dict[str, Any] = {}
        for name, values in self._arrays.items():
            if name in self._strings:
                categories = pd.Index(list(self._strings[name]), dtype=object)
                data[name] = pd.Categorical.from_codes(values, categories=categories)
            else:
                data[name] = pd.Series(values, dtype="int64" if values.typecode == "q" else "float64")
        return pd.DataFrame(data, copy=False)


@dataclass
class Source:
    """One file that was read, or one list of Python dicts."""

    path: str
    form: str  # "JSON lines", "Chrome trace", "Nsight Systems SQLite", "text dump", "Python dict"
    size_bytes: int = 0
    facts: dict[str, str] = field(default_factory=dict)  # what the file says about itself


@dataclass
class Timeline:
    """Everything read from one or more files, as pandas tables (columns: see the top of this module)."""

    ranges: pd.DataFrame
    passes: pd.DataFrame
    phases: pd.DataFrame
    waits: pd.DataFrame
    thread_waits: pd.DataFrame
    counters: pd.DataFrame
    sources: list[Source]
    notes: list[str] = field(default_factory=list)  # what was left out, laid out or assumed
    limits: dict[str, float] = field(default_factory=dict)  # peak_gflops, bandwidth_gbs where known
    thread_names: dict[tuple[int, int, int], str] = field(default_factory=dict)  # by source, process, thread
    laid_out: bool = False  # positions of phases inside their regions are not measured
    left_out_from: dict[int, int] = field(default_factory=dict)  # see Collector; of one file only
    colours: dict[str, str] = field(default_factory=dict)  # of names that are none of our phases; see style

    def thread_label(self, process: int, thread: int, source: int = 0) -> str:
        """The file's name for a thread, else its number."""
        return self.thread_names.get((source, process, thread), f"{thread}")


class Collector:
    """What a reader writes into: the tables of one source, and what there is to say about it."""

    def __init__(self, source: Source, bounds: Bounds, number: int = 0) -> None:
        self.source = source
        self.bounds = bounds
        self.number = number
        self.ranges = Columns(RANGES, bounds.names)
        self.passes = Columns(PASSES, bounds.names)
        self.phases = Columns(PHASES, bounds.names)
        self.waits = Columns(WAITS, bounds.names)
        self.thread_waits: dict[tuple[int, int, str], list[float]] = {}
        self.counters = Columns(COUNTERS, bounds.names)
        self.limits: dict[str, float] = {}
        self.notes: list[str] = []
        self.thread_names: dict[tuple[int, int], str] = {}
        self.laid_out = False
        self.left_out = 0  # ranges beyond the bound
        self.left_out_from: dict[int, int] = {}  # by process, when the first of those that make passes begins
        self._kept = 0
        self._limited = False
        self._indices: dict[tuple[Any, ...], int] = {}

    def add_range(self, *values: Any) -> None:
        """One range, in the order of RANGES, unless the bound is reached."""
        if self._kept >= self.bounds.ranges:
            self._leave_out(*values)
            return
        self._kept += 1
        self.ranges.add(*values)

    def _leave_out(
        self, kind: str, _name: str, _category: str, process: int, _thread: int, begin: int, *_rest: Any
    ) -> None:
        self.left_out += 1
        # The files of some programs are not in order of time.
        if kind in PASS_KINDS and begin < self.left_out_from.get(process, begin + 1):
            self.left_out_from[process] = begin

    def next_index(self, *of: Any) -> int:
        """0, 1, 2, ... for each combination: the number of a pass where the file does not say it."""
        self._indices[of] = self._indices.get(of, -1) + 1
        return self._indices[of]

    def add_thread_wait(
        self, process: int, thread: int, group: str, busy: float, wait: float, region: float
    ) -> None:
        """Adds one thread's part of one region to its totals."""
        sums = self.thread_waits.setdefault((process, thread, group), [0.0, 0.0, 0.0])
        for place, value in enumerate((busy, wait, region)):
            sums[place] += value

    def note(self, text: str) -> None:
        """Something the reader of a report has to know about this source."""
        self.notes.append(f"{self.source.path}: {text}")

    def note_cut(self, what: str) -> None:
        """A source that cannot be read to its end, and why."""
        self.note(f"{what}; what was read up to there is used")

    def note_limit(self) -> None:
        """A source with the recorder's end mark; several, of files put together, are said once."""
        if not self._limited:
            self.note("the recording reached its limit (AMX_SFT_MOE_TRACE_LIMIT); later steps are not in it")
        self._limited = True

    def timeline(self) -> Timeline:
        """The tables. Called once, when the source has been read."""
        if self.left_out:
            self.note(
                f"{self.left_out:,} ranges beyond the bound of {self.bounds.ranges:,} were left out of the "
                "table of ranges (--max-ranges); --filter-time and --filter-name choose others"
            )
        threads = Columns(THREAD_WAITS)
        for (process, thread, group), sums in sorted(self.thread_waits.items()):
            threads.add(process, thread, group, *sums)
        return Timeline(
            self._of_this_source(self.ranges),
            self.passes.frame(),
            self.phases.frame(),
            self.waits.frame(),
            self._of_this_source(threads),
            self.counters.frame(),
            [self.source],
            self.notes,
            self.limits,
            {(self.number, *key): name for key, name in self.thread_names.items()},
            self.laid_out,
            self.left_out_from,
        )

    def _of_this_source(self, columns: Columns) -> pd.DataFrame:
        table = columns.frame()
        table["source"] = pandas().Series(self.number, index=table.index, dtype="int32")
        return table


def concatenate(parts: list[Timeline]) -> Timeline:
    """Several files as one timeline; numbers of passes are shifted accordingly."""
    if len(parts) == 1:
        return parts[0]
    pd = pandas()
    shift = 0
    shifted = []
    for part in parts:
        ranges = part.ranges.assign(
            step=part.ranges["step"].where(part.ranges["step"] < 0, part.ranges["step"] + shift)
        )
        shifted.append(
            (
                ranges,
                part.phases.assign(**{"pass": part.phases["pass"] + shift}),
                part.waits.assign(**{"pass": part.waits["pass"] + shift}),
            )
        )
        shift += len(part.passes)
    limits: dict[str, float] = {}
    for part in parts:
        for name, value in part.limits.items():
            limits[name] = max(value, limits.get(name, value))
    return Timeline(
        _stack(pd, [ranges for ranges, _, _ in shifted]),
        _stack(pd, [part.passes for part in parts]),
        _stack(pd, [phases for _, phases, _ in shifted]),
        _stack(pd, [waits for _, _, waits in shifted]),
        _stack(pd, [part.thread_waits for part in parts]),
        _stack(pd, [part.counters for part in parts]),
        [source for part in parts for source in part.sources],
        [note for part in parts for note in part.notes],
        limits,
        {key: name for part in parts for key, name in part.thread_names.items()},
        any(part.laid_out for part in parts),
    )


def _stack(pd: Any, frames: list[pd.DataFrame]) -> pd.DataFrame:
    """One frame under the other; categories are united, for pandas would make strings of them."""
    from pandas.api.types import union_categoricals

    columns = {}
    for name in frames[0].columns:
        parts = [frame[name] for frame in frames]
        if parts[0].dtype == "category":
            # Some were made of plain strings, of which pandas makes another type of categories.
            parts = [part.cat.rename_categories(part.cat.categories.astype(object)) for part in parts]
            columns[name] = union_categoricals(parts)
        else:
            columns[name] = pd.concat(parts, ignore_index=True)
    return pd.DataFrame(columns)
