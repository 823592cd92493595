"""What a command does when nobody takes what it prints: a pipe whose reader has gone, a full disk, a closed
stream, an encoding that lacks its characters."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper


def printing(run: Callable[[], int]) -> int:
    """The exit status of ``run``, which prints; 1 where standard output is closed or does not take it (standard
    error says so). A reader that has gone has had enough (``| head``): the status is that of ``run``, or 0
    where this was in the middle of it. What a strict encoding lacks is printed escaped: names of files and
    values of the environment may have any bytes."""
    if sys.stdout is None:
        sys.stderr.write("error: standard output: closed\n")
        return 1
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    status = 0
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        if error.filename is not None:
            raise
        sys.stderr.write(f"error: standard output: {error.strerror or error}\n")
        _drop_output()
        return 1
    return status


def _drop_output() -> None:
    """What is left in the buffer goes nowhere: the interpreter would try to flush it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
