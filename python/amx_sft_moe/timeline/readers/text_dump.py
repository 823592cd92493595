"""The text form of a dump (``[BWD TIMER] backward_down: 193.885 ms (total: 193.885 ms)``), also among other
lines of a log. It has times of phases and groups but no times of day: passes are laid one after the other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ..filters import Filters
from ..names import is_total
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


class _Reader:
    """Puts lines together to passes: a pass ends where a group comes a second time or the direction changes."""

    def __init__(self, into: Collector, filters: Filters) -> None:
        self._into, self._filters = into, filters
        self._pass = _Pass()
        self._waiting: dict[str, float] = {}  # phases whose group's line has not come yet
        self._at = 0
        self._counts: dict[str, int] = {}
        self.bad = 0

    def line(self, text: str) -> None:
        found = _LINE.search(text)
        if found is None:
            if text.lstrip().startswith(_ENDED):
                self._into.note_limit()
            return
        prefix, name, ms = found[1], found[2], float(found[3]) * _NS_PER_MS
        step = _STEPS.get(prefix)
        if step is None:
            if not is_total(name):
                self._waiting[name] = ms
            return
        if self._pass.step and (step != self._pass.step or name in self._pass.groups):
            self.finish()
        self._pass.step = step
        self._pass.groups[name] = ms
        # A group of one phase has its group's line only.
        self._pass.phases.update(self._waiting or {name: ms})
        self._waiting = {}

    def finish(self) -> None:
        """Adds the pass collected so far."""
        done, self._pass = self._pass, _Pass()
        if not done.step:
            return
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
    """Reads line by line; lines of other programs are passed over."""
    reader = _Reader(into, filters)
    with open_unpacked(path, into.note_cut) as stream:
        for line in lines(stream, into.bounds.record_bytes):
            if line is not None:
                reader.line(line.decode("utf-8", "replace"))
    reader.finish()
    if reader.bad:
        into.note(f"{reader.bad:,} passes could not be used: their times are too long for any recording")
    into.laid_out = True
    into.note("a text dump has no times of day: groups and passes are laid one after the other")
