"""Key figures beside their targets, and what bounds each phase.

A phase's roof is what the machine allows at its intensity: the smaller of peak and intensity times bandwidth.
The limits are measured ones, from the file or from the command line; without them nothing is judged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .analysis import overlap, waiting_share
from .libraries import pandas
from .names import PHASES_OF_GROUPS, is_gemm
from .reports import Report
from .table import Timeline

if TYPE_CHECKING:
    import pandas as pd

GEMM_TARGET = 0.85  # of peak, products with the base weights
BANDWIDTH_TARGET = 0.80  # of measured bandwidth, phases that memory bounds
OVERLAP_TARGET = 0.60
WAITING_TARGET = 0.10  # of thread time, at most
_NEAR = 0.5  # of its roof: below, something else than the roof bounds a phase
_WAITING_MATTERS = 0.25  # of thread time of the phase's group


def phase_table(timeline: Timeline) -> pd.DataFrame:
    """One row per phase over all passes: wall_ns, per_pass_ns, share, busy_ns, flop, bytes, gflops, gbs,
    intensity,
    roof_gflops, of_roof, bound.

    Rates count only passes that have both, time and work.
    """
    phases = timeline.phases
    known = phases.assign(
        flop_wall=phases["wall_ns"].where(phases["flop"].notna()),
        byte_wall=phases["wall_ns"].where(phases["bytes"].notna()),
    )
    columns = ["wall_ns", "busy_ns", "flop", "bytes", "flop_wall", "byte_wall"]
    grouped = known.groupby("phase", observed=True, sort=False)
    table = grouped[columns].sum(min_count=1)
    table["passes"] = grouped["pass"].nunique()
    table["share"] = table["wall_ns"] / table["wall_ns"].sum()
    table["gflops"] = table["flop"] / table["flop_wall"].where(table["flop_wall"] > 0)
    table["gbs"] = table["bytes"] / table["byte_wall"].where(table["byte_wall"] > 0)
    table["intensity"] = table["flop"] / table["bytes"].where(table["bytes"] > 0)
    peak, bandwidth = (
        timeline.limits.get("peak_gflops", math.nan),
        timeline.limits.get("bandwidth_gbs", math.nan),
    )
    table["of_peak"] = table["gflops"] / peak
    table["of_bandwidth"] = table["gbs"] / bandwidth
    table["roof_gflops"] = (table["intensity"] * bandwidth).clip(upper=peak)
    waits = _waiting_of_phases(timeline)
    table["bound"] = [_bound(row, peak, bandwidth, waits.get(str(name), 0.0)) for name, row in table.iterrows()]
    return table.sort_values("wall_ns", ascending=False, kind="stable")


def _waiting_of_phases(timeline: Timeline) -> dict[str, float]:
    """Waiting share of the group that each phase lies in, where the ranges tell which that is."""
    groups = timeline.waits.groupby("group", observed=True)[["wait_ns", "thread_ns"]].sum()
    shares = {
        str(g): w / t
        for g, w, t in zip(groups.index, groups["wait_ns"], groups["thread_ns"], strict=True)
        if t > 0
    }
    return {
        phase: shares[group]
        for group, phases in PHASES_OF_GROUPS.items()
        if group in shares
        for phase in phases
    }


def _bound(row: Any, peak: float, bandwidth: float, waiting: float) -> str:
    """What keeps a phase from being faster, in words."""
    compute, memory = row["of_peak"], row["of_bandwidth"]
    if math.isnan(row["flop"]) and math.isnan(row["bytes"]):
        return "unknown: no flop or bytes in the file"
    if row["wall_ns"] <= 0:
        return "takes no time"
    if row["flop"] > 0 and not math.isnan(row["intensity"]) and not math.isnan(peak * bandwidth):
        by_memory = row["intensity"] < peak / bandwidth
    elif not row["flop"] > 0 and not math.isnan(memory):
        by_memory = True
    elif not math.isnan(compute):
        by_memory = False
    else:
        return "unknown: no measured limits"
    share = memory if by_memory else compute
    what = "memory" if by_memory else "compute"
    if math.isnan(share):
        return "unknown: no measured limits"
    if share >= _NEAR:
        return f"{what} ({share:.0%} of its limit)"
    if waiting >= _WAITING_MATTERS:
        return f"waiting ({waiting:.0%} of thread time; {share:.0%} of the {what} limit)"
    return f"neither limit is near ({share:.0%} of {what}): overhead, latency or too little work"


def phase_sum(timeline: Timeline) -> Report:
    """Phases with their rates beside the machine's limits."""
    table = phase_table(timeline)
    result = pandas().DataFrame(
        {
            "Time (%)": (table["share"] * 100).round(1),
            "Wall": table["wall_ns"],
            "Passes": table["passes"],
            "Wall/Pass": table["wall_ns"] / table["passes"],
            "Busy": table["busy_ns"],
            "GFLOP": (table["flop"] * 1e-9).round(3),
            "GFLOP/s": table["gflops"].round(1),
            "GB/s": table["gbs"].round(2),
            "FLOP/byte": table["intensity"].round(2),
            "Peak (%)": (table["of_peak"] * 100).round(1),
            "Bandwidth (%)": (table["of_bandwidth"] * 100).round(1),
            "Phase": [str(name) for name in table.index],
            "Bound by": table["bound"],
        }
    )
    note = "wall: up to the slowest thread, shared regions divided by busy time; busy: summed over threads"
    # Columns of which nothing is known say nothing.
    empty = [
        c
        for c in ("Busy", "GFLOP", "GFLOP/s", "GB/s", "FLOP/byte", "Peak (%)", "Bandwidth (%)")
        if result[c].isna().all()
    ]
    result = result.drop(columns=empty).reset_index(drop=True)
    return Report("phase_sum", "Phases", result, ("Wall", "Wall/Pass", "Busy"), note)


def _row(figure: str, value: float, target: float, over: bool, remark: str) -> tuple[str, str, str, str, str]:
    sign = ">" if over else "<"
    if math.isnan(value):
        return figure, "not known", f"{sign} {target:.0%}", "-", remark
    met = value > target if over else value < target
    return figure, f"{value:.1%}", f"{sign} {target:.0%}", "yes" if met else "no", remark


def _gemm(timeline: Timeline, table: pd.DataFrame) -> tuple[float, str]:
    gemms = table[[is_gemm(str(name)) for name in table.index]]
    if not len(gemms) or not gemms["flop_wall"].sum() > 0:
        return math.nan, "no GEMM phase with flop in the file"
    peak = timeline.limits.get("peak_gflops")
    rate = gemms["flop"].sum() / gemms["flop_wall"].sum()
    if peak is None:
        return math.nan, f"{rate:,.0f} GFLOP/s, but no peak: --measure or --peak-gflops"
    return rate / peak, f"{rate:,.0f} of {peak:,.0f} GFLOP/s over {', '.join(map(str, gemms.index))}"


def _bandwidth(timeline: Timeline, table: pd.DataFrame) -> tuple[float, str]:
    limit, peak = timeline.limits.get("bandwidth_gbs"), timeline.limits.get("peak_gflops")
    moved = table[(table["byte_wall"] > 0) & table["bytes"].notna()]
    if not len(moved):
        return math.nan, "no phase with bytes in the file"
    if limit is None:
        return math.nan, "no measured bandwidth: --measure or --bandwidth"
    bound = moved[~(moved["intensity"] >= peak / limit)] if peak else moved[~(moved["flop"] > 0)]
    if not len(bound):
        return math.nan, "no phase is bound by memory"
    rate = bound["bytes"].sum() / bound["byte_wall"].sum()
    return rate / limit, f"{rate:,.1f} of {limit:,.1f} GB/s over the phases that memory bounds: " + ", ".join(
        map(str, bound.index)
    )


def _overlap(timeline: Timeline, pair: tuple[str, str] | None) -> tuple[float, str]:
    if pair is None:
        kinds = set(timeline.ranges["kind"].unique())
        if not {"kernel", "copy"} <= kinds:
            return math.nan, "no two kinds to compare: --overlap A B"
        pair = ("kind:copy", "kind:kernel")
    table = overlap(timeline, *pair).table
    return float(table["Overlap (%)"].iloc[0]) / 100, f"of the time of {pair[0]}, also in {pair[1]}"


def key_figures(timeline: Timeline, pair: tuple[str, str] | None = None) -> Report:
    """GEMM share of peak, bandwidth, overlap and waiting beside their targets.

    Args:
        timeline: with phases.
        pair: the two kinds of ranges whose overlap is judged; copies and kernels by default.
    """
    table = phase_table(timeline)
    gemm, bandwidth, both = _gemm(timeline, table), _bandwidth(timeline, table), _overlap(timeline, pair)
    waiting = waiting_share(timeline)
    rows = [
        _row("GEMM, share of peak", gemm[0], GEMM_TARGET, True, gemm[1]),
        _row("bandwidth, share of measured", bandwidth[0], BANDWIDTH_TARGET, True, bandwidth[1]),
        _row("overlap", both[0], OVERLAP_TARGET, True, both[1]),
        _row(
            "waiting, share of thread time",
            waiting,
            WAITING_TARGET,
            False,
            "no parallel region" if math.isnan(waiting) else "in parallel regions",
        ),
    ]
    columns = ["Figure", "Value", "Target", "Met", "Remark"]
    return Report("key_figures", "Key figures", pandas().DataFrame(rows, columns=columns))


def configuration(timeline: Timeline) -> Report:
    """What was measured: files, kernel, threads, sizes, limits."""
    passes = timeline.passes
    rows: list[tuple[str, str]] = []
    for source in timeline.sources:
        size = f", {source.size_bytes / 1e6:,.1f} MB" if source.size_bytes else ""
        rows.append(("file", f"{source.path} ({source.form}{size})"))
        rows += [(f"  {key}", value) for key, value in source.facts.items()]
    for column in ("kernel", "layer", "tokens", "routed_rows", "threads", "operator", "process"):
        values = [str(v) for v in passes[column].unique() if v not in ("", -1)]
        if values:
            shown = ", ".join(values[:8]) + (f", ... ({len(values)} in all)" if len(values) > 8 else "")
            rows.append((column.replace("_", " "), shown))
    steps = passes["step"].value_counts(sort=False)
    rows.append(("steps", ", ".join(f"{count:,} {name}" for name, count in steps.items() if count) or "none"))
    rows.append(("ranges", f"{len(timeline.ranges):,}"))
    for key, unit in (("peak_gflops", "GFLOP/s"), ("bandwidth_gbs", "GB/s")):
        value = timeline.limits.get(key)
        rows.append((key.partition("_")[0], f"{value:,.1f} {unit}" if value else "not known"))
    return Report("configuration", "Configuration", pandas().DataFrame(rows, columns=["What", "Value"]))
