"""Which ranges of a file are kept: by name, by thread, by time. Applied while reading, so that a small part of
a large file needs little memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .errors import TimelineError
from .table import TEAM_KINDS

_TIME = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*(ns|us|ms|s)?", re.IGNORECASE)
_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


def parse_time(text: str) -> int:
    """``"1.5s"``, ``"20ms"``, ``"300"`` (nanoseconds) as nanoseconds."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise TimelineError(f"a time is a number with ns, us, ms or s, such as 1.5s; got {text!r}")
    nanoseconds = float(found[1]) * _NS[(found[2] or "ns").lower()]
    if not math.isfinite(nanoseconds):
        raise TimelineError(f"expected a finite time, got {text!r}")
    return round(nanoseconds)


def parse_window(text: str) -> tuple[int | None, int | None]:
    """``"BEGIN/END"``, either may be empty, as nanoseconds after the first range of the file."""
    begin, slash, end = text.partition("/")
    if not slash or "/" in end:
        raise TimelineError(f"a time window is BEGIN/END, such as 1s/1.5s or /200ms; got {text!r}")
    first = parse_time(begin) if begin.strip() else None
    last = parse_time(end) if end.strip() else None
    if first is not None and last is not None and first >= last:
        raise TimelineError(f"the time window {text!r} ends before it begins")
    return first, last


def parse_threads(text: str) -> frozenset[int]:
    """``"0,2,4-7"`` as a set of thread numbers."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,18})(?:\s*-\s*(\d{1,18}))?\s*", part)
        if found is None:
            raise TimelineError(f"threads are numbers and spans such as 0,2,4-7; got {text[:100]!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last <= first + 1_000_000:
            raise TimelineError(f"{part.strip()} is not a span of threads")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def parse_name(text: str) -> re.Pattern[str]:
    """A regular expression that is searched for in the names of ranges."""
    try:
        return re.compile(text)
    except re.error as error:
        raise TimelineError(f"{text!r} is not a regular expression: {error}") from error


@dataclass
class Filters:
    """What is kept. Time is counted from where the earliest range of each file begins."""

    name: re.Pattern[str] | None = None
    threads: frozenset[int] | None = None
    begin: int | None = None
    end: int | None = None
    origin: int | None = None  # of the file being read
    scouting: bool = False  # looks for the origin; keeps nothing

    def for_new_file(self) -> Filters:
        """The same filters for another file, whose origin is not known yet."""
        return Filters(self.name, self.threads, self.begin, self.end)

    @property
    def any(self) -> bool:
        """Whether anything is filtered at all."""
        return self.name is not None or self.threads is not None or self.window

    @property
    def window(self) -> bool:
        """Whether time is filtered, for which the origin has to be known first."""
        return self.begin is not None or self.end is not None

    def keeps_time(self, begin_ns: int, end_ns: int) -> bool:
        """Whether a range or pass touches the window. Scouting asks about each: in a file they stand in the
        order in which they end, or in none."""
        if self.scouting:
            self.origin = begin_ns if self.origin is None else min(self.origin, begin_ns)
            return False
        return self.keeps_moment(begin_ns, end_ns)

    def keeps_moment(self, begin_ns: int, end_ns: int) -> bool:
        """The same for what is no range, and no beginning of time."""
        if self.scouting or not self.window:
            return not self.scouting
        if self.origin is None:
            return False
        if self.begin is not None and end_ns - self.origin < self.begin:
            return False
        return self.end is None or begin_ns - self.origin <= self.end

    def keeps_name(self, name: str) -> bool:
        """Whether a range or phase of that name is kept."""
        return self.name is None or self.name.search(name) is not None

    def keeps_thread(self, thread: int) -> bool:
        """Whether anything of that thread is kept."""
        return self.threads is None or thread in self.threads

    def keeps(self, name: str, thread: int, begin_ns: int, end_ns: int) -> bool:
        """Whether a range is kept."""
        # Time is asked first: it has to see every range of the file, whatever its name.
        return self.keeps_time(begin_ns, end_ns) and self.keeps_thread(thread) and self.keeps_name(name)

    def keeps_for_passes(self, kind: str, name: str, thread: int, begin_ns: int, end_ns: int) -> bool:
        """Whether a range is kept until passes are worked out. Those of our own passes are, of all threads, for
        phases and waiting are the whole team's; `passes.derive` then drops the threads not asked for."""
        if kind not in TEAM_KINDS:
            return self.keeps(name, thread, begin_ns, end_ns)
        return self.keeps_time(begin_ns, end_ns) and self.keeps_name(name)
