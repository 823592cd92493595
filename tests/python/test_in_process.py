"""How benchmarks/in_process.py counts a thread's waiting in the kernel."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import in_process

# Of twenty: one that is preempted as it falls asleep counts as no voluntary switch.
MANY = 15


class Sleeper:
    def __init__(self, times: int) -> None:
        self.times = times

    def step(self) -> float:
        for _ in range(self.times):
            time.sleep(0.001)
        return 0.0


class WithThread(Sleeper):
    """Another thread than the caller's sleeps, the caller waits for it once more."""

    def step(self) -> float:
        thread = threading.Thread(target=super().step)
        thread.start()
        thread.join()
        return 0.0


def test_each_sleep_of_a_step_counts() -> None:
    """Of all threads of the process, as is meant: the operator's and torch's. Those of a test runner wait for
    messages, and can but add to what is counted: the upper bound is for steps of microseconds, most of which
    nobody wakes in."""
    median, most = in_process.sleeps(Sleeper(20), 3)
    assert MANY <= median <= most
    assert in_process.sleeps(Sleeper(0), 9)[0] < 5


def test_those_of_other_threads_too() -> None:
    assert in_process.sleeps(WithThread(20), 3)[0] >= MANY
