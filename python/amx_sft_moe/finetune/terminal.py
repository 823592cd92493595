"""What the command says: few lines, aligned, on standard output; progress bars go to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from .tables import Row, duration, plain_table

LABEL = 20  # columns


def seconds_since_start() -> float:
    """How long this process has been running: imports, which take seconds, count too."""
    return time.time() - psutil.Process().create_time()


class Terminal:
    """Numbered stages, facts under them, tables. Keeps how long each stage took."""

    def __init__(self, stages: int):
        self.stages = stages
        self.seconds = {"start": seconds_since_start()}  # by stage, in order
        self._refused: OSError | None = None

    def line(self, text: str) -> None:
        """One line, at once: someone is watching. Where standard output does not take it, a full disk or a
        reader that has gone, the rest goes unsaid until `end`: no hour of training is lost for it."""
        if self._refused is not None:
            return
        try:
            sys.stdout.write(f"{text.rstrip(' ')}\n")
            sys.stdout.flush()
        except OSError as error:
            self._refused = error

    def end(self) -> None:
        """Raises the OSError of a standard output that has not taken all."""
        if self._refused is not None:
            raise self._refused

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A numbered heading; what is said inside belongs to it. Its time is kept under `title`."""
        self.line(f"\n[{len(self.seconds)}/{self.stages}] {title}")
        began = time.perf_counter()
        yield
        self.seconds[title] = time.perf_counter() - began

    def fact(self, label: str, text: str) -> None:
        """One line: a label and what there is to say about it."""
        self.line(f"  {label:<{LABEL}}{text}")

    def table(self, table: tuple[Row, list[Row]]) -> None:
        """A table with an empty line before it."""
        self.line("\n" + plain_table(*table))

    def text(self, text: str) -> None:
        """Lines as they are, indented, with an empty line before them."""
        self.line("\n" + "\n".join(f"  {line}".rstrip() for line in text.splitlines()))

    def total(self) -> str:
        """The time since the process started."""
        return duration(seconds_since_start())
