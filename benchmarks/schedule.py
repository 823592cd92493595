"""Tasks on simulated threads, by the operator's rule (parallel/tasks.hpp).

Each goes to the next free thread: products with weights to those of even number from the front of the list and
to the others from their back, the rest in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A task's work: ``ns`` of a core, ``bytes`` of memory meanwhile. The last job of a group to end goes on
    with the group's ``after`` (Countdown)."""

    ns: float
    bytes: float = 0.0
    group: int = -1


@dataclass(frozen=True)
class Outcome:
    wall_ns: float
    busy_ns: float  # of all threads, the wait for memory included

    def idle(self, threads: int) -> float:
        """Share of the threads' time without a task."""
        return 1.0 - self.busy_ns / (threads * self.wall_ns) if self.wall_ns else 0.0


class TaskQueue:
    """TaskQueue of parallel/tasks.hpp."""

    IN_ORDER_PER_THREAD = 2

    def __init__(self, jobs: Sequence[Job], threads: int, products: int) -> None:
        self._jobs = jobs
        self._from_both = max(min(products, len(jobs) - self.IN_ORDER_PER_THREAD * threads), 0)
        self._taken = self._front = self._back = 0

    def take(self, thread: int) -> Job | None:
        taken = self._taken
        if taken == len(self._jobs):
            return None
        self._taken += 1
        if taken >= self._from_both:
            return self._jobs[taken]
        if thread % 2:
            self._back += 1
            return self._jobs[self._from_both - self._back]
        self._front += 1
        return self._jobs[self._front - 1]


def group_sizes(jobs: Sequence[Job]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for job in jobs:
        if job.group >= 0:
            sizes[job.group] = sizes.get(job.group, 0) + 1
    return sizes


def run(
    jobs: Sequence[Job], threads: int, after: Callable[[int], Job] | None = None, *, products: int = 0
) -> Outcome:
    """Without a limit on memory: a job takes its ns. The first ``products`` jobs are taken from both ends."""
    left = group_sizes(jobs)
    queue = TaskQueue(jobs, threads, products)
    free = [(0.0, thread) for thread in range(threads)]
    pending: list[tuple[float, int, int]] = []  # (end, thread, group) of jobs whose group may go on
    busy = wall = 0.0

    def finish_until(now: float) -> None:
        nonlocal busy, wall
        while pending and pending[0][0] <= now:
            end, thread, group = heapq.heappop(pending)
            left[group] -= 1
            extra = after(group).ns if after is not None and left[group] == 0 else 0.0
            busy += extra
            wall = max(wall, end + extra)
            heapq.heappush(free, (end + extra, thread))

    for _ in jobs:
        while True:
            next_free = free[0][0] if free else float("inf")
            if pending and pending[0][0] <= next_free:
                finish_until(pending[0][0])
                continue
            break
        start, thread = heapq.heappop(free)
        job = queue.take(thread)
        assert job is not None
        end = start + job.ns
        busy += job.ns
        if job.group >= 0:
            heapq.heappush(pending, (end, thread, job.group))
        else:
            wall = max(wall, end)
            heapq.heappush(free, (end, thread))
    finish_until(float("inf"))
    return Outcome(wall, busy)


class _Running:
    """A job on a thread, by the share of it that is left."""

    __slots__ = ("demand", "job", "left", "thread")

    def __init__(self, job: Job, thread: int) -> None:
        self.job = job
        self.thread = thread
        self.left = max(job.ns, 1e-3)
        self.demand = job.bytes / self.left  # bytes per ns at full speed

    def rate(self, fair: float) -> float:
        return 1.0 if self.demand <= fair else fair / self.demand


def _fair_share(running: Sequence[_Running], bandwidth: float) -> float:
    """Bytes per ns that each may have at most so that all together have `bandwidth`: those who want less leave
    the rest to the others."""
    left, threads = bandwidth, len(running)
    for demand in sorted(r.demand for r in running):
        if demand * threads > left:
            return left / threads
        left -= demand
        threads -= 1
    return float("inf")


def run_with_memory(
    jobs: Sequence[Job],
    threads: int,
    bandwidth: float,
    after: Callable[[int], Job] | None = None,
    *,
    products: int = 0,
) -> Outcome:
    """The same with memory that all threads share, `bandwidth` in bytes per ns (GB/s): what wants more than its
    fair share slows down to it."""
    left = group_sizes(jobs)
    queue = TaskQueue(jobs, threads, products)
    now = busy = 0.0
    running = [_Running(job, thread) for thread in range(threads) if (job := queue.take(thread)) is not None]
    while running:
        fair = _fair_share(running, bandwidth)
        step = min(r.left / r.rate(fair) for r in running)
        now += step
        busy += step * len(running)
        still: list[_Running] = []
        for r in running:
            r.left -= step * r.rate(fair)
            if r.left > 1e-6 * max(r.job.ns, 1e-3):
                still.append(r)
                continue
            group = r.job.group
            if group >= 0:
                left[group] -= 1
                if left[group] == 0 and after is not None:
                    still.append(_Running(after(group), r.thread))
                    continue
            following = queue.take(r.thread)
            if following is not None:
                still.append(_Running(following, r.thread))
        running = still
    return Outcome(now, busy)
