"""Two timelines, before and after: how much each step changed and which phase contributed which share of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .errors import TimelineError
from .libraries import pandas
from .nesting import nest
from .reports import Report, displayed_names
from .table import CPU_KINDS, GPU_KINDS, Timeline

if TYPE_CHECKING:
    import pandas as pd

REST = "(outside phases)"
TOTAL = "total"
_COLUMNS = ["Step", "Phase", "Before", "After", "Change", "Change (%)", "Share of change (%)"]


def _means(timeline: Timeline, step: str) -> pd.Series:
    """Mean time of each phase per pass of a kind, and what of the pass lies in no phase. Means, for they add
    up."""
    passes = timeline.passes[timeline.passes["step"] == step]
    mine = timeline.phases[timeline.phases["pass"].isin(passes.index)]
    means = mine.groupby("phase", observed=True, sort=False)["wall_ns"].sum() / len(passes)
    means.index = means.index.astype(object)
    means[REST] = passes["total_ns"].mean() - means.sum()
    return means


def _self_times(timeline: Timeline) -> pd.Series:
    """Time by name without the time of children, which adds up to the time of all ranges."""
    ranges = timeline.ranges
    nested = nest(ranges[ranges["kind"].isin(CPU_KINDS)])
    own = nested["end_ns"] - nested["begin_ns"] - nested["dur_child_ns"]
    sums = own.groupby(displayed_names(nested).astype(str)).sum()
    others = ranges[ranges["kind"].isin((*GPU_KINDS, "osrt"))]
    more = (others["end_ns"] - others["begin_ns"]).groupby(others["name"].astype(str)).sum()
    return sums.add(more, fill_value=0.0)


def _rows(step: str, before: pd.Series, after: pd.Series) -> pd.DataFrame:
    """Before, after and change of each phase, largest change first, and in the last row of their total."""
    table = pandas().DataFrame({"Before": before, "After": after}).fillna(0.0)
    table["Change"] = table["After"] - table["Before"]
    table = table[(table["Before"] != 0) | (table["After"] != 0)]
    table = table.sort_values("Change", key=abs, ascending=False, kind="stable")
    total = table.sum()
    whole = total["Change"]
    # Where all changes cancel each other a share would mean nothing.
    counts = abs(whole) > 1e-6 * max(abs(total["Before"]), abs(total["After"]))
    # Below whatever a phase may be called.
    table = pandas().concat([table, total.to_frame(TOTAL).T])
    table["Share of change (%)"] = (table["Change"] * 100.0 / whole).round(1) if counts else math.nan
    table["Change (%)"] = (table["Change"] * 100.0 / table["Before"].where(table["Before"] > 0)).round(1)
    table["Step"], table["Phase"] = step, [str(name) for name in table.index]
    return table[_COLUMNS].reset_index(drop=True)


def _only(timeline: Timeline, compared: list[str], side: str) -> str:
    """Names the kinds of steps that are not compared because the other side has none."""
    counts = timeline.passes["step"].value_counts(sort=False)
    kinds = [f"{step} ({count:,})" for step, count in counts.items() if count and step not in compared]
    return f"; only {side}: {', '.join(kinds)}" if kinds else ""


def compare(before: Timeline, after: Timeline) -> Report:
    """Step by step where both have steps of a kind, else by the self time of ranges.

    Raises:
        TimelineError: the two have nothing in common to compare.
    """
    pd = pandas()
    times = ("Before", "After", "Change")
    kinds = [step for step in before.passes["step"].unique() if step in set(after.passes["step"].unique())]
    if kinds:
        table = pd.concat(
            [_rows(str(s), _means(before, s), _means(after, s)) for s in kinds], ignore_index=True
        )
        counts = "; ".join(
            f"{s}: {(before.passes['step'] == s).sum():,} before, {(after.passes['step'] == s).sum():,} after"
            for s in kinds
        )
        note = f"mean times per pass ({counts}); shares of a step's change sum to 100 %"
        note += _only(before, kinds, "before") + _only(after, kinds, "after")
        return Report("compare", "Before and after", table, times, note)
    if len(before.passes) and len(after.passes):
        raise TimelineError(
            "nothing to compare: steps before are "
            f"{', '.join(map(str, before.passes['step'].unique()))}; after "
            f"{', '.join(map(str, after.passes['step'].unique()))}"
        )
    if not (len(before.ranges) and len(after.ranges)):
        raise TimelineError("nothing to compare: one side has no ranges and the other no steps")
    table = _rows("(all ranges)", _self_times(before), _self_times(after))
    note = "no steps: total self time of ranges (without the ranges inside them), over the whole files"
    return Report("compare", "Before and after", table, times, note)
