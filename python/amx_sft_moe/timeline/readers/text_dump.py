"""The text form of a dump (``[BWD TIMER] backward_down: 193.885 ms (total: 193.885 ms)``), also among other
lines of a log. It has times of phases and groups but no times of day: passes are laid one after the other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..filters import Filters
from ..names import PHASES, PHASES_OF_GROUPS, is_total
from ..table import NOT_KNOWN, UNKNOWN, Collector
from .json_lines import lines, open_unpacked, whole

_LINE = re.compile(
    r"\[(FWD TIMER|BWD TIMER|GATHER|GU|DOWN|SUM|ACT|RW)\] (\S+): "
    r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ms(?: \((.*)\))?\s*$"
)
_ENDED = "[TIMER] ended: "  # of the last line of a recording that reached its limit
_STEPS = {"FWD TIMER": "forward", "BWD TIMER": "backward"}
_NS_PER_MS = 1e6


@dataclass
class _Pass:
    step: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    groups: dict[str, float] = field(default_factory=dict)

    def lines(self) -> set[str]:
        """What it has lines of."""
        return self.groups.keys() | self.phases.keys()


def _passes(
    path: Path, longest: int, note_cut: Callable[[str], None], note_limit: Callable[[], None]
) -> Iterator[_Pass]:
    """Puts lines together to passes: a pass ends where a group comes a second time or the direction changes.
    Lines of other programs are passed over."""
    one = _Pass()
    waiting: dict[str, float] = {}  # phases whose group's line has not come yet
    with open_unpacked(path, note_cut) as stream:
        for line in lines(stream, longest):
            text = line.decode("utf-8", "replace") if line is not None else ""
            found = _LINE.search(text)
            if found is None:
                if text.lstrip().startswith(_ENDED):
                    note_limit()
                continue
            name, ms = found[2], float(found[3]) * _NS_PER_MS
            step = _STEPS.get(found[1])
            if step is None:
                if not is_total(name):
                    waiting[name] = ms
                continue
            if one.step and (step != one.step or name in one.groups):
                yield one
                one = _Pass()
            one.step = step
            one.groups[name] = ms
            # A group of one phase has its group's line only.
            one.phases.update(_of_group(waiting, name) or {name: ms})
            waiting = {}
    if one.step:
        yield one


def _of_group(waiting: dict[str, float], group: str) -> dict[str, float]:
    """The phases that may be the group's: others are left of a group whose own line is missing."""
    own = PHASES_OF_GROUPS.get(group, ())
    return {name: ns for name, ns in waiting.items() if name in own or name not in PHASES}


class _Expected:
    """Knows passes that lack lines which all others of their kind have, as the first and the last one of a file
    may, and the last one of a process that was killed."""

    def __init__(self, passes: Iterable[_Pass]) -> None:
        self._passes: Counter[str] = Counter()
        self._with: dict[str, Counter[str]] = {}
        for one in passes:
            self._passes[one.step] += 1
            self._with.setdefault(one.step, Counter()).update(one.lines())

    def is_whole(self, one: _Pass) -> bool:
        of_all_others = self._passes[one.step] - 1
        own = one.lines()
        others = self._with.get(one.step, Counter())  # none where the file has grown since
        return all(count < of_all_others for name, count in others.items() if name not in own)


class _Reader:
    """Lays passes one after the other."""

    def __init__(self, into: Collector, filters: Filters) -> None:
        self._into, self._filters = into, filters
        self._at = 0
        self._counts: dict[str, int] = {}
        self.bad = 0

    def add(self, done: _Pass) -> None:
        """One pass."""
        into, number = self._into, len(self._into.passes)
        begin, at = self._at, self._at
        try:
            end = self._at = whole(begin + sum(done.groups.values()))
        except ValueError:
            self.bad += 1
            return
        index = self._counts.get(done.step, 0)
        self._counts[done.step] = index + 1
        if not self._filters.keeps_time(begin, end):
            return
        into.passes.add(
            into.number,
            into.number,
            0,
            done.step,
            index,
            "",
            "",
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            begin,
            end,
            float(end - begin),
            UNKNOWN,
        )
        spans = [("step", done.step, begin, end)]
        for name, ns in done.groups.items():
            spans.append(("group", name, at, at + round(ns)))
            at += round(ns)
        for kind, name, span_begin, span_end in spans:
            if self._filters.keeps(name, 0, span_begin, span_end):
                into.add_range(
                    kind,
                    name,
                    done.step,
                    into.number,
                    0,
                    span_begin,
                    span_end,
                    number,
                    "",
                    NOT_KNOWN,
                    NOT_KNOWN,
                )
        for name, ns in done.phases.items():
            if self._filters.keeps_name(name):
                into.phases.add(number, name, ns, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)


def read(path: Path, into: Collector, filters: Filters) -> None:
    """Reads the file twice: which lines a pass should have is known when all have been seen."""
    longest = into.bounds.record_bytes
    expected = _Expected(_passes(path, longest, lambda what: None, lambda: None))
    reader = _Reader(into, filters)
    parts = 0
    for one in _passes(path, longest, into.note_cut, into.note_limit):
        if expected.is_whole(one):
            reader.add(one)
        else:
            parts += 1
    if reader.bad:
        into.note(f"{reader.bad:,} passes could not be used: their times are too long for any recording")
    if parts:
        into.note(
            f"{parts:,} passes are left out: they lack lines that all others of their kind have, as where a "
            "file begins or ends within a pass"
        )
    into.laid_out = True
    into.note("a text dump has no times of day: groups and passes are laid one after the other")
