"""The answers of ``nsys stats`` under its names, from any of the formats: sums and traces of ranges.

Columns and their order are those of Nsight Systems: the share, total, count, average, median, smallest, largest
and sample deviation of durations. Shares are of the sum of what is listed, not of wall time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .libraries import pandas
from .names import DOMAIN
from .nesting import nest
from .table import CPU_KINDS, Timeline

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Report:
    """One table. Columns in `times` hold nanoseconds until they are written in the unit that was asked for."""

    name: str
    title: str
    table: pd.DataFrame
    times: tuple[str, ...] = ()
    note: str = ""
    trace: bool = False  # one row per range: long, and only written when it is asked for


_SUM_TIMES = ("Total Time", "Avg", "Med", "Min", "Max", "StdDev")


def summary(durations: pd.Series, by: pd.Series, count: str, name: str) -> pd.DataFrame:
    """Statistics of durations by name, largest total first; the columns of an nsys sum."""
    grouped = durations.groupby(by, observed=True, sort=False)
    table = grouped.agg(["sum", "count", "mean", "median", "min", "max", "std"])
    table = table.sort_values("sum", ascending=False, kind="stable")
    whole = table["sum"].sum()
    result = pandas().DataFrame(
        {
            "Time (%)": (table["sum"] * 100.0 / whole if whole else table["sum"] * 0.0).round(1),
            "Total Time": table["sum"],
            count: table["count"],
            "Avg": table["mean"].round(1),
            "Med": table["median"].round(1),
            "Min": table["min"],
            "Max": table["max"],
            "StdDev": table["std"].fillna(0.0).round(1),
        }
    )
    result[name] = [str(label) for label in table.index]
    return result.reset_index(drop=True)


def displayed_names(ranges: pd.DataFrame) -> pd.Series:
    """Names with the NVTX domain in front (``domain:name``), as nsys writes them."""
    names = ranges["name"]
    nvtx = ranges["kind"].isin(("nvtx", "startend"))
    with_domain = (nvtx | (ranges["category"] == DOMAIN)) & (ranges["category"] != "")
    with_domain &= ~ranges["category"].isin(("user_annotation",))
    if not with_domain.any():
        return names
    # One string per pair that occurs, not one per range.
    pairs = ranges.loc[with_domain, ["category", "name"]].drop_duplicates()
    labels = {(c, n): f"{c}:{n}" for c, n in zip(pairs["category"], pairs["name"], strict=True)}
    known = list(dict.fromkeys([*names.cat.categories, *labels.values()]))
    place = {label: code for code, label in enumerate(known)}
    codes = names.cat.codes.astype("int32").copy()
    categories, plain = ranges["category"], names.cat.codes
    for (category, name), label in labels.items():
        of_pair = with_domain & (categories == category) & (plain == place[name])
        codes[of_pair] = place[label]
    return pandas().Series(pandas().Categorical.from_codes(codes, categories=known), index=ranges.index)


def _sum_report(
    ranges: pd.DataFrame, report: str, title: str, count: str, name: str, style: str = ""
) -> Report:
    durations = ranges["end_ns"] - ranges["begin_ns"]
    table = summary(durations, displayed_names(ranges), count, name)
    if style:
        table.insert(len(table.columns) - 1, "Style", style)
    return Report(report, title, table, _SUM_TIMES)


def _of_kind(timeline: Timeline, *kinds: str) -> pd.DataFrame:
    return timeline.ranges[timeline.ranges["kind"].isin(kinds)]


def nvtx_pushpop_sum(timeline: Timeline) -> Report:
    """Nested ranges by name: NVTX push/pop ranges, our steps, groups and phases, torch's operators."""
    ranges = _of_kind(timeline, *CPU_KINDS)
    return _sum_report(
        ranges, "nvtx_pushpop_sum", "NVTX Push/Pop Range Summary", "Instances", "Range", "PushPop"
    )


def nvtx_startend_sum(timeline: Timeline) -> Report:
    """Ranges that begin and end independently of each other."""
    ranges = _of_kind(timeline, "startend")
    return _sum_report(
        ranges, "nvtx_startend_sum", "NVTX Start/End Range Summary", "Instances", "Range", "StartEnd"
    )


def nvtx_pushpop_trace(timeline: Timeline) -> Report:
    """Each nested range with its place in the stack of its thread."""
    nested = nest(_of_kind(timeline, *CPU_KINDS))
    names = displayed_names(nested).astype(str)
    stacks: list[str] = []
    for row, parent in enumerate(nested["parent"]):
        stacks.append((stacks[parent] if parent >= 0 else "") + f":{row + 1}")
    length = nested["end_ns"] - nested["begin_ns"]
    parents = (nested["parent"] + 1).astype(object).where(nested["parent"] >= 0, None)
    table = (
        pandas()
        .DataFrame(
            {
                "Start": nested["begin_ns"],
                "End": nested["end_ns"],
                "Duration": length,
                "DurChild": nested["dur_child_ns"],
                "DurNonChild": length - nested["dur_child_ns"],
                "Name": names,
                "PID": nested["process"],
                "TID": nested["thread"],
                "Lvl": nested["level"],
                "NumChild": nested["num_child"],
                "RangeId": range(1, len(nested) + 1),
                "ParentId": parents,
                "RangeStack": stacks,
                "NameTree": ["--" * level + name for level, name in zip(nested["level"], names, strict=True)],
            }
        )
        .sort_values(["Start", "Duration"], kind="stable", ignore_index=True)
    )
    times = ("Start", "End", "Duration", "DurChild", "DurNonChild")
    return Report("nvtx_pushpop_trace", "NVTX Push/Pop Range Trace", table, times, trace=True)


def osrt_sum(timeline: Timeline) -> Report:
    """Calls into the operating system's libraries."""
    return _sum_report(_of_kind(timeline, "osrt"), "osrt_sum", "OS Runtime Summary", "Num Calls", "Name")


def cuda_gpu_kern_sum(timeline: Timeline) -> Report:
    """Kernels on the GPU."""
    return _sum_report(
        _of_kind(timeline, "kernel"), "cuda_gpu_kern_sum", "CUDA GPU Kernel Summary", "Instances", "Name"
    )


def cuda_gpu_mem_time_sum(timeline: Timeline) -> Report:
    """Copies from and to the GPU, by time."""
    copies = _of_kind(timeline, "copy")
    return _sum_report(
        copies, "cuda_gpu_mem_time_sum", "CUDA GPU MemOps Summary (by Time)", "Count", "Operation"
    )


def counter_sum(timeline: Timeline) -> Report:
    """Counter events of a Chrome trace."""
    grouped = timeline.counters.groupby("name", observed=True)["value"]
    table = grouped.agg(["count", "mean", "median", "min", "max", "std"]).reset_index()
    table.columns = ["Counter", "Samples", "Avg", "Med", "Min", "Max", "StdDev"]
    table["Counter"] = table["Counter"].astype(str)
    return Report("counter_sum", "Counters", table.fillna({"StdDev": 0.0}).round(3))


NSYS_REPORTS: dict[str, Callable[[Timeline], Report]] = {
    "nvtx_pushpop_sum": nvtx_pushpop_sum,
    "nvtx_pushpop_trace": nvtx_pushpop_trace,
    "nvtx_startend_sum": nvtx_startend_sum,
    "osrt_sum": osrt_sum,
    "cuda_gpu_kern_sum": cuda_gpu_kern_sum,
    "cuda_gpu_mem_time_sum": cuda_gpu_mem_time_sum,
    "counter_sum": counter_sum,
}
