"""What ``SftMoe.last_forward_times()`` and ``last_backward_times()`` return, as a timeline: passes, phases and
the threads' waiting, without positions in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import TimelineError
from ..names import is_total, step_of_group
from ..table import NOT_KNOWN, UNKNOWN, Bounds, Collector, Source, Timeline
from .json_lines import BAD, real, whole

_NS_PER_MS = 1e6


def _add(times: Mapping[str, Any], into: Collector, at: int) -> int:
    """One pass, beginning at `at`; returns its end."""
    phases = {name: real(ms) * _NS_PER_MS for name, ms in times["phases"].items() if not is_total(name)}
    threads = times.get("threads", [])
    busy: dict[str, float] = {}
    for thread in threads:
        for name, ms in thread.get("phases", {}).items():
            busy[name] = busy.get(name, 0.0) + real(ms) * _NS_PER_MS
    step = next(filter(None, map(step_of_group, times["groups"])), "step")
    total = real(times["total_ms"]) * _NS_PER_MS
    end = whole(at + whole(total))
    number = len(into.passes)
    index = whole(times["index"]) if "index" in times else into.next_index(step)
    counted = [whole(times.get(key, UNKNOWN)) for key in ("tokens", "routed_rows")]
    into.passes.add(
        0,
        0,
        0,
        step,
        index,
        "",
        "",
        *counted,
        len(threads) or UNKNOWN,
        at,
        end,
        total,
        whole(times.get("sync_points", UNKNOWN)),
    )
    flop, size = times.get("flop", {}), times.get("bytes", {})
    for name, ns in phases.items():
        into.phases.add(
            number,
            name,
            ns,
            busy.get(name, 0.0),
            real(flop[name]) if name in flop else NOT_KNOWN,
            real(size[name]) if name in size else NOT_KNOWN,
        )
    for place, thread in enumerate(threads):
        own, wait = real(thread.get("busy_ms", 0)) * _NS_PER_MS, real(thread.get("waiting_ms", 0)) * _NS_PER_MS
        into.add_thread_wait(0, whole(thread.get("thread", place)), step, own, wait, own + wait)
    waits = sum(real(thread.get("waiting_ms", 0)) for thread in threads) * _NS_PER_MS
    into.waits.add(number, step, waits, total * len(threads), 0.0)
    return end


def from_times(times: Iterable[Mapping[str, Any]]) -> Timeline:
    """Dicts of ``last_forward_times()`` and ``last_backward_times()`` as a timeline of passes laid one after
    the other; empty dicts (nothing recorded yet) are passed over.

    Raises:
        TimelineError: not such a dict, or nothing in any of them.
    """
    into = Collector(Source("last_..._times()", "Python dict"), Bounds())
    at = 0
    for one in times:
        if not one:
            continue
        try:
            at = _add(one, into, at)
        except BAD as error:
            raise TimelineError(f"not what last_backward_times() returns: {error!r}") from error
    if not len(into.passes):
        raise TimelineError("no pass has been recorded yet")
    into.laid_out = True
    return into.timeline()
