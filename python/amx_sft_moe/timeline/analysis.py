"""What nsys does not answer: gaps, waiting, overlap of two kinds of ranges, steps that fall out of line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .filters import parse_name
from .libraries import pandas
from .reports import Report, summary
from .table import CPU_KINDS, GPU_KINDS, Timeline

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MOST_GAPS = 1000
OUTLIER_SCORE = (
    3.5  # deviations from the median, in units of the scaled median deviation (Iglewicz and Hoaglin)
)
FEWEST_STEPS = 5  # for a median that means something
_MAD_TO_SIGMA = 1.4826
_LEAST_SPREAD = 0.01  # of the median: below, clocks and rounding speak


def _gap_table(timeline: Timeline) -> pd.DataFrame:
    """Each stretch in which a thread that had ranges before and after had none."""
    ranges = timeline.ranges
    ranges = ranges[ranges["kind"].isin(CPU_KINDS + GPU_KINDS)]
    ranges = ranges.sort_values(["source", "process", "thread", "begin_ns"], kind="stable")
    threads = [ranges["source"], ranges["process"], ranges["thread"]]
    latest = ranges["end_ns"].groupby(threads).cummax()
    # The range that the thread was in last: the one that set the latest end.
    rows = pandas().Series(range(len(ranges)), index=ranges.index, dtype="float64")
    holder = rows.where(ranges["end_ns"] == latest).groupby(threads).ffill().groupby(threads).shift()
    before_end = latest.groupby(threads).shift()
    gap = ranges["begin_ns"] - before_end
    found = gap > 0
    names = ranges["name"]
    table = pandas().DataFrame(
        {
            "Start": before_end[found].astype("int64"),
            "Duration": gap[found].astype("int64"),
            "PID": ranges["process"][found],
            "TID": ranges["thread"][found],
            "Step": ranges["step"][found],
            "After": names.iloc[holder[found].astype("int64")].set_axis(ranges.index[found]).astype(str),
            "Before": names[found].astype(str),
        }
    )
    return _with_files(table, ranges["source"][found], timeline)


def _with_files(table: pd.DataFrame, sources: pd.Series, timeline: Timeline) -> pd.DataFrame:
    """The table with the file of each row in front, where there are several with processes of one number."""
    if len(timeline.sources) > 1:
        table.insert(0, "File", [timeline.sources[number].path for number in sources])
    return table


def gaps(timeline: Timeline) -> Report:
    """The longest gaps."""
    table = _gap_table(timeline).sort_values("Duration", ascending=False, kind="stable").head(MOST_GAPS)
    note = "stretches of a thread between two of its ranges, longest first; Step: the pass that follows"
    return Report("gaps", "Gaps", table.reset_index(drop=True), ("Start", "Duration"), note, trace=True)


def gap_sum(timeline: Timeline) -> Report:
    """Gaps by what came before and after, over all threads."""
    table = _gap_table(timeline)
    between = table["After"] + " -> " + table["Before"]
    return Report(
        "gap_sum",
        "Gaps between ranges of a thread",
        summary(table["Duration"], between, "Gaps", "Between"),
        ("Total Time", "Avg", "Med", "Min", "Max", "StdDev"),
    )


def waiting_sum(timeline: Timeline) -> Report:
    """Waiting by group: the time between a thread's last work in a parallel region and the region's end."""
    groups = timeline.waits.groupby("group", observed=True)[["wait_ns", "thread_ns", "serial_ns"]].sum()
    busy = timeline.thread_waits.groupby("group", observed=True)["busy_ns"].sum().reindex(groups.index)
    rest = (groups["thread_ns"] - groups["wait_ns"] - busy).clip(lower=0)
    table = pandas().DataFrame(
        {
            "Waiting (%)": _percent(groups["wait_ns"], groups["thread_ns"]),
            "Late start (%)": _percent(rest, groups["thread_ns"]),
            "Waiting": groups["wait_ns"],
            "Thread Time": groups["thread_ns"],
            "Serial": groups["serial_ns"],
            "Group": [str(name) for name in groups.index],
        }
    )
    table = table.sort_values("Waiting", ascending=False, kind="stable", ignore_index=True)
    note = (
        "share of threads x wall time of parallel regions; late start: neither at work nor waiting for others, "
        "mostly threads that came late; serial: wall time of the caller alone"
    )
    return Report("waiting_sum", "Waiting by group", table, ("Waiting", "Thread Time", "Serial"), note)


def waiting_by_thread(timeline: Timeline) -> Report:
    """Busy and waiting time of each thread, all parallel regions together."""
    keys = ["source", "process", "thread"]
    threads = timeline.thread_waits.groupby(keys)[["busy_ns", "wait_ns", "region_ns"]].sum().reset_index()
    table = pandas().DataFrame(
        {
            "PID": threads["process"],
            "TID": threads["thread"],
            "Busy (%)": _percent(threads["busy_ns"], threads["region_ns"]),
            "Waiting (%)": _percent(threads["wait_ns"], threads["region_ns"]),
            "Busy": threads["busy_ns"],
            "Waiting": threads["wait_ns"],
            "Regions": threads["region_ns"],
        }
    )
    table = _with_files(table, threads["source"], timeline)
    return Report("waiting_by_thread", "Waiting by thread", table, ("Busy", "Waiting", "Regions"))


def waiting_share(timeline: Timeline) -> float:
    """Waiting of all threads in all parallel regions as a share of their time; not a number without any."""
    whole = timeline.waits["thread_ns"].sum()
    return float(timeline.waits["wait_ns"].sum() / whole) if whole > 0 else math.nan


def _percent(part: Any, whole: Any) -> pd.Series:
    return (part * 100.0 / whole.where(whole > 0)).round(1)


def select(timeline: Timeline, selector: str) -> pd.DataFrame:
    """Ranges of ``kind:copy`` (a kind), else those whose name the regular expression finds."""
    kind, colon, rest = selector.partition(":")
    if colon and kind == "kind":
        return timeline.ranges[timeline.ranges["kind"] == rest]
    pattern = parse_name(selector)
    names = timeline.ranges["name"]
    wanted = [name for name in names.cat.categories if pattern.search(name)]
    return timeline.ranges[names.isin(wanted)]


def union(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intervals as the shortest list of disjoint ones, in order."""
    import numpy as np

    if not len(begins):
        return begins, ends
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    starts = np.concatenate(([True], begins[1:] > ends[:-1]))
    return begins[starts], ends[np.concatenate((starts[1:], [True]))]


def _union_of(ranges: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    return union(ranges["begin_ns"].to_numpy(), ranges["end_ns"].to_numpy())


def _unions(ranges: pd.DataFrame) -> dict[Any, tuple[np.ndarray, np.ndarray]]:
    """The union of the ranges of each process of each file."""
    return {process: _union_of(mine) for process, mine in ranges.groupby(["source", "process"])}


def covered(at: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How much of disjoint intervals lies before each point of time."""
    import numpy as np

    if not len(begins):
        return np.zeros(len(at))
    origin = begins[0]
    edges = np.stack((begins, ends), axis=1).ravel() - origin
    lengths = np.stack((np.zeros(len(begins)), ends - begins), axis=1).ravel()
    return np.interp(np.asarray(at, dtype="float64") - origin, edges.astype("float64"), np.cumsum(lengths))


def overlap(timeline: Timeline, first: str, second: str) -> Report:
    """How much of the time of one kind of ranges another kind runs too, process by process and together.

    Times are of the union over all threads: two threads at the same work count once.
    """
    one, two = _unions(select(timeline, first)), _unions(select(timeline, second))
    nothing = _union_of(timeline.ranges.iloc[:0])
    sums = [0.0, 0.0, 0.0]
    for process in sorted({*one, *two}):
        a, b = one.get(process, nothing), two.get(process, nothing)
        both = covered(a[1], *b).sum() - covered(a[0], *b).sum()
        for place, value in enumerate(((a[1] - a[0]).sum(), (b[1] - b[0]).sum(), both)):
            sums[place] += float(value)
    rows = [
        (first, second, round(100.0 * sums[2] / own, 1) if own else math.nan, own, sums[2])
        for first, second, own in ((first, second, sums[0]), (second, first, sums[1]))
    ]
    table = pandas().DataFrame(rows, columns=["Ranges", "Overlapped by", "Overlap (%)", "Time", "Overlapped"])
    return Report("overlap", "Overlap of two kinds of ranges", table, ("Time", "Overlapped"))


def outliers(timeline: Timeline, score: float = OUTLIER_SCORE) -> Report:
    """Steps far from the median of their kind and layer, and the phase that made most of the difference."""
    pd = pandas()
    rows = []
    too_few = 0
    for _, passes in timeline.passes.groupby(["step", "layer"], observed=True):
        if len(passes) < FEWEST_STEPS:
            too_few += 1
            continue
        times = passes["total_ns"]
        median = times.median()
        spread = max(_MAD_TO_SIGMA * (times - median).abs().median(), _LEAST_SPREAD * median)
        scores = (times - median) / spread if spread > 0 else times * 0.0
        far = scores.abs() > score
        if not far.any():
            continue
        mine = timeline.phases[timeline.phases["pass"].isin(passes.index)]
        walls = mine.pivot_table(index="pass", columns="phase", values="wall_ns", aggfunc="sum", observed=True)
        usual = walls.median()
        for number in times.index[far]:
            phase, change = _largest_change(walls, usual, number, times[number] - median)
            one = passes.loc[number]
            rows.append(
                (
                    one["step"],
                    one["layer"],
                    one["index"],
                    one["begin_ns"],
                    times[number],
                    median,
                    round(times[number] / median, 2),
                    round(scores[number], 1),
                    phase,
                    change,
                )
            )
    columns = ["Step", "Layer", "Index", "Start", "Time", "Med", "Ratio", "Score", "Phase", "Phase Change"]
    table = pd.DataFrame(rows, columns=columns).sort_values(
        "Score", ascending=False, kind="stable", ignore_index=True
    )
    note = (
        f"more than {score:g} scaled median deviations from the median of the same step and layer; "
        "phase: the one that changed most"
    )
    if too_few:
        note += f"; {too_few} kinds of steps have fewer than {FEWEST_STEPS} passes and are not judged"
    return Report("outliers", "Steps out of line", table, ("Start", "Time", "Med", "Phase Change"), note)


def _largest_change(walls: pd.DataFrame, usual: pd.Series, number: int, excess: float) -> tuple[str, float]:
    """The phase that changed most in the direction of a step's excess."""
    if number not in walls.index:
        return "", math.nan
    change = (walls.loc[number].fillna(0.0) - usual) * (1 if excess >= 0 else -1)
    phase = change.idxmax()
    return str(phase), float(change[phase]) * (1 if excess >= 0 else -1)


def step_sum(timeline: Timeline) -> Report:
    """Times of steps by kind and layer."""
    passes = timeline.passes
    label = passes["step"].astype(object).astype(str)
    layers = passes["layer"].astype(object).astype(str)
    label = label.where(layers == "", label + " " + layers)
    table = summary(passes["total_ns"], label, "Steps", "Step")
    return Report("step_sum", "Steps", table, ("Total Time", "Avg", "Med", "Min", "Max", "StdDev"))
