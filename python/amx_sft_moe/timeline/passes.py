"""Passes, phases and waiting of files that have only ranges: Chrome traces and exports of Nsight Systems.

A pass is a range of kind "step"; else a sequence of our groups; else a range whose name says so (torch's
ProfilerStep#3, full_train_loop, --step-range). Phases of our passes follow the rule of the recorder: the wall
time of a group is divided among its phases in proportion to their busy time, so they sum to it. Phases of other
passes are the ranges directly inside them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .errors import TimelineError
from .libraries import pandas
from .names import DRIVER_RANGES, step_kind, step_of_group
from .nesting import nest
from .readers.chrome_trace import LANE
from .table import CPU_KINDS, NOT_KNOWN, PASSES, PHASES, UNKNOWN, WAITS, Columns, Timeline

if TYPE_CHECKING:
    import pandas as pd

_STEP_NAMES = re.compile(r"ProfilerStep#\d+")
_NUMBER = re.compile(r"#(\d{1,18})$")  # more is no index, but part of a name
_AMBIGUOUS = "backward_routing_weights"  # a group and its only phase
_REST = "(in no range)"
_OWN_SUMS = ("JSON lines", "text dump")  # say themselves what each pass took, whatever becomes of its ranges


def derive(
    timeline: Timeline, step_range: re.Pattern[str] | None = None, threads: frozenset[int] | None = None
) -> bool:
    """Fills the tables of passes, phases and waiting of one file from the ranges where a reader could not. In
    place.

    Args:
        timeline: as read; what it says of its passes itself is left alone where `step_range` is not given.
        step_range: names of ranges that are the steps, whatever else the file has.
        threads: whose ranges and waiting are kept; all by default.

    Returns:
        Whether there is any pass, also one that goes beyond the bound of ranges and is left out.
    """
    known = step_range is None and len(timeline.passes) > 0
    if step_range is not None:
        _forget_passes(timeline)
        _keep_threads(timeline, threads)  # now: a step is a range of one thread, no matter of a team
    found = known
    told = known and (len(timeline.phases) > 0 or timeline.sources[0].form in _OWN_SUMS)
    if len(timeline.ranges) and not told:
        found = _work_out(timeline, known, step_range, threads)
    _keep_threads(timeline, threads)
    return found


def _forget_passes(timeline: Timeline) -> None:
    """Empties what was said about passes that others take the place of."""
    for name in ("passes", "phases", "waits", "thread_waits"):
        setattr(timeline, name, getattr(timeline, name).iloc[:0])
    timeline.ranges["step"] = UNKNOWN


def _asked(rows: pd.DataFrame, threads: frozenset[int] | None) -> pd.Series:
    """Whether each row is of one of the threads; all are where none were named."""
    return pandas().Series(True, index=rows.index) if threads is None else rows["thread"].isin(threads)


def _keep_threads(timeline: Timeline, threads: frozenset[int] | None) -> None:
    if threads is not None:
        timeline.ranges = timeline.ranges[_asked(timeline.ranges, threads)].reset_index(drop=True)


def _work_out(
    timeline: Timeline, known: bool, step_range: re.Pattern[str] | None, threads: frozenset[int] | None
) -> bool:
    """Passes, where they are not known, their phases and waiting; returns whether there are any."""
    ranges = timeline.ranges.copy(deep=False)
    ranges["kind"] = _resolve_ambiguous(ranges)
    ranges["lane"] = _lanes(ranges, timeline)
    if known:
        timeline.passes = _whole(timeline.passes, timeline)
        spans, found = _known_spans(ranges, timeline), True
    else:
        spans = _spans(ranges, step_range).sort_values("begin_ns", kind="stable")
        spans, found = _whole(spans, timeline), len(spans) > 0
    if spans.empty:
        return found
    if not known:
        timeline.passes = _pass_table(spans, timeline)
    ranges["step"] = _containing(ranges, spans)
    timeline.ranges = ranges.drop(columns="lane")
    _overlap_note(spans, timeline)
    groups = ranges[(ranges["kind"] == "group") & (ranges["step"] >= 0)]
    if len(groups) and step_range is None:
        _phases_of_groups(ranges, groups, timeline, threads)
    else:
        _phases_of_children(ranges, spans, timeline)
    return found


def _whole(passes: pd.DataFrame, timeline: Timeline) -> pd.DataFrame:
    """The passes that were over when the first range began that the bound left out: of others parts are
    missing. Numbered anew, with a note about those that are dropped."""
    never = int(passes["end_ns"].max()) if len(passes) else 0
    first = [timeline.left_out_from.get(process, never) for process in passes["process"]]
    cut = passes["end_ns"] > first
    if cut.any():
        timeline.notes.append(
            f"{timeline.sources[0].path}: {cut.sum():,} of {len(passes):,} passes were not over when the first "
            "range began that was left out; nothing is said about them"
        )
    return passes[~cut].reset_index(drop=True)


def _lanes(ranges: pd.DataFrame, timeline: Timeline) -> pd.Series:
    """Which caller's team a thread belongs to: our files give each caller a thousand numbers of its own."""
    ours = timeline.sources[0].form in ("Chrome trace", "JSON lines") and (ranges["kind"] == "step").any()
    return ranges["thread"] // LANE if ours else ranges["thread"] * 0


def _known_spans(ranges: pd.DataFrame, timeline: Timeline) -> pd.DataFrame:
    """The passes that the reader found, with the thread and the lane of their range, in order of time."""
    keys = ["process", "begin_ns", "end_ns"]
    steps = ranges.loc[ranges["kind"] == "step", [*keys, "thread", "lane"]].drop_duplicates(keys)
    passes = timeline.passes.reset_index(names="row").merge(steps, on=keys)
    return passes.set_index("row").sort_values("begin_ns", kind="stable")


def _resolve_ambiguous(ranges: pd.DataFrame) -> pd.Series:
    """The kinds, where a range that bears a group's and a phase's name is a phase if it lies in a group."""
    kinds = ranges["kind"]
    asked = (kinds == "group") & (ranges["name"] == _AMBIGUOUS)
    if not asked.any():
        return kinds
    kinds = kinds.cat.set_categories(kinds.cat.categories.union(["phase"], sort=False))
    groups = ranges[kinds == "group"].sort_values("begin_ns", kind="stable")
    for process, mine in ranges[asked].groupby("process"):
        outer = groups[groups["process"] == process]
        latest_end = outer["end_ns"].cummax().to_numpy()
        # Any group that began strictly before and still runs.
        before = outer["begin_ns"].searchsorted(mine["begin_ns"].to_numpy(), side="left") - 1
        inside = (before >= 0) & (latest_end[before.clip(min=0)] >= mine["end_ns"].to_numpy())
        kinds.loc[mine.index[inside]] = "phase"
    return kinds


def _spans(ranges: pd.DataFrame, step_range: re.Pattern[str] | None) -> pd.DataFrame:
    """One row per pass: process, thread, lane, begin_ns, end_ns, step, index, layer."""
    cpu = ranges["kind"].isin(CPU_KINDS)
    if step_range is None:
        steps = ranges[ranges["kind"] == "step"]
        if len(steps):
            return _from_ranges(steps, [step_kind(str(name)) for name in steps["name"]])
        groups = ranges[ranges["kind"] == "group"]
        if len(groups):
            return _from_groups(groups)
        names = ranges["name"].cat.categories
        wanted = [n for n in names if _STEP_NAMES.fullmatch(n)] or [n for n in names if n in DRIVER_RANGES[:2]]
        wanted = wanted or [n for n in names if n in DRIVER_RANGES]
    else:
        wanted = [name for name in ranges["name"].cat.categories if step_range.search(name)]
    chosen = ranges[cpu & ranges["name"].isin(wanted)]
    return _from_ranges(chosen, [_NUMBER.sub("", str(name)) for name in chosen["name"]])


def _from_ranges(chosen: pd.DataFrame, steps: list[str]) -> pd.DataFrame:
    spans = chosen[["process", "thread", "lane", "begin_ns", "end_ns", "layer"]].copy()
    spans["step"] = steps
    numbers = [_NUMBER.search(str(name)) for name in chosen["name"]]
    spans = spans.sort_values("begin_ns", kind="stable") if not any(numbers) else spans
    counted = spans.groupby(["process", "step", "layer"], observed=True).cumcount()
    spans["index"] = [int(found[1]) for found in numbers if found] if all(numbers) and numbers else counted
    return spans


def _from_groups(groups: pd.DataFrame) -> pd.DataFrame:
    """Passes from the sequence of groups on a thread: a pass ends where the direction changes or the first
    group
    comes back after a later one."""
    rows: list[dict[str, Any]] = []
    for (process, thread), mine in groups.sort_values("begin_ns", kind="stable").groupby(["process", "thread"]):
        current: dict[str, Any] | None = None
        counts: dict[str, int] = {}
        past_first = False
        for name, begin, end in zip(mine["name"], mine["begin_ns"], mine["end_ns"], strict=True):
            step = step_of_group(str(name)) or step_kind(str(name))
            first = name in ("forward_gather", "backward_down")
            if current is None or step != current["step"] or (first and past_first):
                current = {
                    "process": process,
                    "thread": thread,
                    "lane": 0,
                    "begin_ns": begin,
                    "end_ns": end,
                    "layer": "",
                    "step": step,
                    "index": counts.get(step, 0),
                }
                counts[step] = counts.get(step, 0) + 1
                past_first = False
                rows.append(current)
            past_first |= not first
            current["end_ns"] = max(current["end_ns"], end)
    return pandas().DataFrame(rows)


def _pass_table(spans: pd.DataFrame, timeline: Timeline) -> pd.DataFrame:
    columns = Columns(PASSES)
    kernel = next((s.facts["kernel"] for s in timeline.sources if "kernel" in s.facts), "")
    for span in spans.itertuples():
        columns.add(
            0,
            span.process,
            0,
            span.step,
            span.index,
            str(span.layer),
            kernel,
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            span.begin_ns,
            span.end_ns,
            float(span.end_ns - span.begin_ns),
            UNKNOWN,
        )
    return columns.frame()


def _containing(ranges: pd.DataFrame, spans: pd.DataFrame) -> pd.Series:
    """The row of `spans` that each range begins in, by time within its process and lane; -1 for none."""
    pd = pandas()
    result = pd.Series(UNKNOWN, index=ranges.index, dtype="int64")
    for (process, lane), mine in spans.groupby(["process", "lane"]):
        own = ranges.index[(ranges["process"] == process) & (ranges["lane"] == lane)]
        begins = ranges["begin_ns"].loc[own]
        at = mine["begin_ns"].searchsorted(begins, side="right") - 1
        inside = (at >= 0) & (begins.to_numpy() < mine["end_ns"].to_numpy()[at.clip(min=0)])
        result.loc[own[inside]] = mine.index.to_numpy()[at[inside]]
    return result


def _overlap_note(spans: pd.DataFrame, timeline: Timeline) -> None:
    for _, mine in spans.groupby(["process", "lane"]):
        if (mine["begin_ns"].iloc[1:].to_numpy() < mine["end_ns"].cummax().iloc[:-1].to_numpy()).any():
            timeline.notes.append(
                f"{timeline.sources[0].path}: passes of one process overlap in time; ranges count for "
                "the one that began last"
            )
            return


def _phases_of_groups(
    ranges: pd.DataFrame, groups: pd.DataFrame, timeline: Timeline, threads: frozenset[int] | None
) -> None:
    """The recorder's rule, and waiting: the time from a thread's own end in a group to the group's end."""
    groups = groups.sort_values("begin_ns", kind="stable").reset_index(drop=True)
    phases = ranges[(ranges["kind"] == "phase") & (ranges["step"] >= 0)]
    group_of = _containing(phases, groups)
    columns = ["process", "thread", "name", "begin_ns", "end_ns", "flop", "bytes"]
    phases = phases[columns].assign(group=group_of, busy=phases["end_ns"] - phases["begin_ns"])
    phases = phases[phases["group"] >= 0]
    sums = phases.groupby(["group", "name"], sort=False, observed=True)
    table = sums["busy"].sum().to_frame()
    for amount in ("flop", "bytes"):
        table[amount] = sums[amount].sum(min_count=1)
    table = table.reset_index()
    all_busy = table.groupby("group")["busy"].transform("sum")
    length = (groups["end_ns"] - groups["begin_ns"]).astype("float64")
    table["wall"] = table["group"].map(length) * table["busy"] / all_busy.where(all_busy > 0, 1)
    table["pass"] = table["group"].map(groups["step"])
    found = Columns(PHASES)
    per_pass = table.groupby(["pass", "name"], sort=False, observed=True)
    amounts = {amount: per_pass[amount].sum(min_count=1) for amount in ("wall", "busy", "flop", "bytes")}
    for (number, name), *values in zip(amounts["wall"].index, *amounts.values(), strict=True):
        found.add(number, name, *map(float, values))
    empty = groups[~groups.index.isin(phases["group"])]
    for number, name, begin, end in zip(
        empty["step"], empty["name"], empty["begin_ns"], empty["end_ns"], strict=True
    ):
        found.add(number, str(name), float(end - begin), NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)
    timeline.phases = found.frame()
    members = ranges[(ranges["kind"] == "member") & (ranges["step"] >= 0)]
    members = members[["thread", "end_ns"]].assign(group=_containing(members, groups))
    # Where phases are missing or were filtered out, nobody's work is known, nor anybody's waiting.
    members = members[members["group"].isin(phases["group"])]
    _waits_of_groups(groups, _threads_of_groups(groups, phases, members), timeline, threads)


def _threads_of_groups(groups: pd.DataFrame, phases: pd.DataFrame, members: pd.DataFrame) -> pd.DataFrame:
    """A row for each thread of a group: group, thread, busy, and wait: from the thread's end to the group's.

    Where a trace has a range for each thread's part, those and the caller are the threads, also the ones that
    found nothing to do, and the ends are theirs. Only the caller's end is that of its last phase, as the group
    itself is its range; what it did after or without one is not known and counts as no waiting. Elsewhere the
    threads are those that have phases.
    """
    keys = ["group", "thread"]
    found = phases.groupby(keys)["busy"].sum().to_frame().assign(wait=_from_last_end(phases, groups))
    if len(members):
        own = _from_last_end(members, groups)
        callers = groups["thread"].loc[own.index.unique("group")]
        index = found.index.union(own.index)
        index = index.union(pandas().MultiIndex.from_arrays([callers.index, callers.to_numpy()], names=keys))
        found = found.reindex(index)
        found["wait"] = own.reindex(index).fillna(found["wait"])
    return found.fillna(0.0).reset_index()


def _from_last_end(rows: pd.DataFrame, groups: pd.DataFrame) -> pd.Series:
    """Nanoseconds from the last end of each thread's rows in a group to the end of the group."""
    left = (rows["group"].map(groups["end_ns"]) - rows["end_ns"]).clip(lower=0).astype("float64")
    return rows[["group", "thread"]].assign(left=left).groupby(["group", "thread"])["left"].min()


def _waits_of_groups(
    groups: pd.DataFrame, per_thread: pd.DataFrame, timeline: Timeline, threads: frozenset[int] | None
) -> None:
    """Waiting of the threads that were asked for; which group is parallel is a matter of the whole team."""
    team = per_thread.groupby("group")["thread"].transform("count")
    length = groups["end_ns"] - groups["begin_ns"]
    per_thread["region"] = per_thread["group"].map(length).astype("float64")
    per_thread["pass"] = per_thread["group"].map(groups["step"])
    per_thread["source"] = per_thread["group"].map(groups["source"])
    per_thread["process"] = per_thread["group"].map(groups["process"])
    per_thread["name"] = per_thread["group"].map(groups["name"].astype(object))
    shared = per_thread[team > 1]
    asked = _asked(shared, threads)
    alone = per_thread[team == 1].groupby(["pass", "name"], sort=False)["region"].sum()
    of_asked = shared[["wait", "region"]].mul(asked, axis=0)
    waits = of_asked.groupby([shared["pass"], shared["name"]], sort=False).sum()
    columns = Columns(WAITS)
    for number, name in waits.index.union(alone.index, sort=False):
        wait, region = waits.loc[(number, name)] if (number, name) in waits.index else (0.0, 0.0)
        columns.add(number, name, float(wait), float(region), float(alone.get((number, name), 0.0)))
    timeline.waits = columns.frame()
    keys = ["source", "process", "thread", "name"]
    totals = shared[asked].groupby(keys)[["busy", "wait", "region"]].sum().reset_index()
    timeline.thread_waits = totals.rename(
        columns={"name": "group", "busy": "busy_ns", "wait": "wait_ns", "region": "region_ns"}
    ).astype({"busy_ns": "float64", "wait_ns": "float64", "group": "category"})


def _phases_of_children(ranges: pd.DataFrame, spans: pd.DataFrame, timeline: Timeline) -> None:
    """Phases are what lies directly inside a step on its thread; the rest of the step is a phase of its own."""
    nested = nest(ranges[ranges["kind"].isin(CPU_KINDS)])
    keys = ["process", "thread", "begin_ns", "end_ns"]
    steps = nested.reset_index(names="row").merge(spans.reset_index(names="pass")[["pass", *keys]], on=keys)
    # Two ranges of exactly the same extent: the outer one is the step.
    steps = steps.sort_values("row").drop_duplicates("pass")
    of_step = dict(zip(steps["row"], steps["pass"], strict=True))
    children = nested[nested["parent"].isin(of_step)]
    children = children.assign(
        owner=children["parent"].map(of_step), length=children["end_ns"] - children["begin_ns"]
    )
    columns = Columns(PHASES)
    covered: dict[int, float] = {}
    for (owner, name), length in children.groupby(["owner", "name"], observed=True)["length"].sum().items():
        columns.add(owner, str(name), float(length), float(length), NOT_KNOWN, NOT_KNOWN)
        covered[owner] = covered.get(owner, 0.0) + length
    for number, total in enumerate(timeline.passes["total_ns"]):
        columns.add(number, _REST, max(total - covered.get(number, 0.0), 0.0), NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)
    timeline.phases = columns.frame()


def skip_first(timeline: Timeline, count: int) -> None:
    """Leaves the first `count` passes of each kind, operator and layer out of everything said about steps; the
    table
    of ranges keeps theirs. In place.

    Raises:
        TimelineError: nothing would be left.
    """
    if not count or not len(timeline.passes):
        return
    ordered = timeline.passes.sort_values("begin_ns", kind="stable")
    keys = ["source", "process", "operator", "step", "layer"]
    keep = ordered.groupby(keys, observed=True).cumcount() >= count
    left = timeline.passes[keep.reindex(timeline.passes.index)]
    if left.empty:
        raise TimelineError(f"--skip {count} leaves no pass of {len(timeline.passes):,}")
    _keep_passes(timeline, left)


def _keep_passes(timeline: Timeline, passes: pd.DataFrame) -> None:
    """Keeps some passes; their numbers (the index) stay. Waiting by thread is known for whole files only."""
    if len(passes) < len(timeline.passes):
        timeline.thread_waits = timeline.thread_waits.iloc[:0]
    timeline.passes = passes
    timeline.phases = timeline.phases[timeline.phases["pass"].isin(passes.index)]
    timeline.waits = timeline.waits[timeline.waits["pass"].isin(passes.index)]


def inside_range(timeline: Timeline, text: str) -> None:
    """Keeps what runs inside ranges of a name, on any thread of their process: ``name`` or ``name/index``. In
    place.

    Raises:
        TimelineError: there is no such range, or nothing runs inside.
    """
    name, slash, number = text.rpartition("/")
    indexed = bool(slash) and number.isdecimal() and len(number) <= 18  # more is no index, but part of a name
    name = name if indexed else text
    ranges = timeline.ranges
    outer = ranges[(ranges["name"] == name) & ranges["kind"].isin((*CPU_KINDS, "startend"))].sort_values(
        "begin_ns"
    )
    if indexed:
        outer = outer.iloc[int(number) : int(number) + 1]
    if outer.empty:
        raise TimelineError(f"there is no range {text!r} to look inside")
    kept = _inside(ranges, outer)
    timeline.ranges = ranges[kept]
    passes = timeline.passes
    _keep_passes(timeline, passes[_inside(passes, outer)])


def _inside(rows: pd.DataFrame, outer: pd.DataFrame) -> pd.Series:
    """Whether each row lies within one of the outer ranges of its process (their union, without joining
    neighbours)."""
    pd = pandas()
    result = pd.Series(False, index=rows.index)
    for (source, process), mine in outer.groupby(["source", "process"]):
        own = rows[(rows["source"] == source) & (rows["process"] == process)]
        begins, ends = mine["begin_ns"].to_numpy(), mine["end_ns"].cummax().to_numpy()
        at = begins.searchsorted(own["begin_ns"].to_numpy(), side="right") - 1
        result.loc[own.index] = (at >= 0) & (own["end_ns"].to_numpy() <= ends[at.clip(min=0)])
    return result
