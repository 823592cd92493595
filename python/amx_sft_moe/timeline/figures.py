"""The other pictures: phases per step, roofline, histogram of step times, change by phase. Each is a matplotlib
figure, or None where a file does not have what it shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .key_figures import BANDWIDTH_TARGET, GEMM_TARGET, phase_table
from .reports import Report
from .strip import strip
from .style import ACCENT, INK, MAIN, QUIET, colours, new_figure, shortened, shown, styled, unit
from .table import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["change", "histogram", "roofline", "stacked", "strip"]

MOST_BARS = 120
_MOST_PHASES = 14
_MOST_PANELS = 4
_REST = "(outside phases)"
_LEAST_CHANGE = 0.002  # of the largest: what is smaller has no bar to be seen
_MARKERS = "osD^vP*X<>hp"


def _kinds(timeline: Timeline) -> list[str]:
    """Kinds of steps, those that take most time first, in the order in which they come."""
    times = timeline.passes.groupby("step", observed=True, sort=False)["total_ns"].sum()
    chosen = set(times.sort_values(ascending=False).index[:_MOST_PANELS])
    return [str(kind) for kind in timeline.passes["step"].unique() if kind in chosen]


def _phase_matrix(timeline: Timeline, kind: str) -> pd.DataFrame:
    """Passes in order of time by phases, nanoseconds; what lies outside phases is a column of its own."""
    passes = timeline.passes[timeline.passes["step"] == kind].sort_values("begin_ns", kind="stable")
    mine = timeline.phases[timeline.phases["pass"].isin(passes.index)]
    matrix = mine.pivot_table(index="pass", columns="phase", values="wall_ns", aggfunc="sum", observed=True)
    matrix.columns = [str(name) for name in matrix.columns]
    matrix = matrix.reindex(passes.index).fillna(0.0)
    order = matrix.sum().sort_values(ascending=False).index
    result = matrix[order[:_MOST_PHASES]].copy()
    if len(order) > _MOST_PHASES:
        result["other"] = matrix[order[_MOST_PHASES:]].sum(axis=1)
    outside = (passes["total_ns"] - matrix.sum(axis=1)).clip(lower=0)
    if outside.sum() > 0.005 * passes["total_ns"].sum():
        result[_REST] = outside
    result = result.loc[:, result.sum() > 0]
    return result.reset_index(drop=True)


def _bars(axes: Axes, matrix: pd.DataFrame, kind: str, colour_of: dict[str, str]) -> None:
    """One panel: a bar per pass, or per group of consecutive passes where there are many."""
    size = -(-len(matrix) // MOST_BARS)
    means = matrix.groupby(matrix.index // size).mean()
    divisor, label = unit(means.sum(axis=1).max())
    bottom = 0.0 * means.index
    places = means.index * size + (size - 1) / 2
    for name in means.columns:
        values = means[name].to_numpy() / divisor
        axes.bar(
            places,
            values,
            width=0.85 * size,
            bottom=bottom,
            color=colour_of[name],
            label=shortened(name),
            linewidth=0,
        )
        bottom = bottom + values
    axes.set_title(
        f"{shortened(kind)}: {len(matrix):,} passes" + (f", each bar the mean of {size}" if size > 1 else "")
    )
    axes.set_ylabel(f"wall time, {label}")
    axes.grid(axis="y")
    axes.set_xlim(-0.75 * size, len(matrix) - 1 + 0.75 * size)
    axes.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.005, 1.03))


def stacked(timeline: Timeline) -> Figure | None:
    """Phases of each step, one panel per kind of step."""
    matrices = {kind: _phase_matrix(timeline, kind) for kind in _kinds(timeline)}
    matrices = {kind: matrix for kind, matrix in matrices.items() if len(matrix.columns)}
    if not matrices:
        return None
    colour_of = colours(timeline, (name for matrix in matrices.values() for name in matrix.columns))
    with styled():
        figure = new_figure(11.5, 0.4 + 2.9 * len(matrices))
        panels = figure.subplots(len(matrices), 1, squeeze=False)[:, 0]
        for axes, (kind, matrix) in zip(panels, matrices.items(), strict=True):
            _bars(axes, matrix, kind, colour_of)
        panels[-1].set_xlabel("pass, in order of time")
    return figure


def _histogram_panel(axes: Axes, times: pd.Series, kind: str) -> None:
    import numpy as np

    median, p95 = times.median(), times.quantile(0.95)
    # A few very slow steps must not press all others into one bin.
    high = min(times.max(), median + 12 * max(times.quantile(0.9) - median, 0.02 * median))
    shown_times = times[times <= high]
    divisor, label = unit(high)
    bins: Any = np.histogram_bin_edges(shown_times, bins="auto")
    bins = len(bins) - 1 if 5 <= len(bins) - 1 <= 60 else min(60, max(5, len(bins) - 1))
    axes.hist(shown_times / divisor, bins=bins, color=MAIN, alpha=0.85, edgecolor="white", linewidth=0.4)
    top = axes.get_ylim()[1]  # lines end below the legend
    axes.plot([median / divisor] * 2, [0, top], color=INK, linewidth=1.4, label=f"median {shown(median)}")
    if len(times) >= 20:
        axes.plot(
            [p95 / divisor] * 2, [0, top], "--", color=ACCENT, linewidth=1.4, label=f"95 % below {shown(p95)}"
        )
    beyond = len(times) - len(shown_times)
    if beyond:
        axes.plot([], [], " ", label=f"{beyond:,} beyond, up to {shown(times.max())}")
    axes.set_title(f"{shortened(kind)}: {len(times):,} passes")
    axes.set_xlabel(f"time of a pass, {label}")
    axes.grid(axis="y")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.locator_params(axis="x", nbins=6)
    axes.set_ylim(0, top * (1.16 + 0.09 * (len(times) >= 20) + 0.09 * bool(beyond)))  # room for the legend
    axes.legend(loc="upper right", borderaxespad=0.2)


def histogram(timeline: Timeline) -> Figure | None:
    """How the times of steps are spread, one panel per kind of step."""
    kinds = _kinds(timeline)
    if not kinds:
        return None
    with styled():
        figure = new_figure(max(5.2, 4.6 * len(kinds)), 3.4)
        panels = figure.subplots(1, len(kinds), squeeze=False)[0]
        for axes, kind in zip(panels, kinds, strict=True):
            _histogram_panel(axes, timeline.passes.loc[timeline.passes["step"] == kind, "total_ns"], kind)
        panels[0].set_ylabel("passes")
    return figure


def _roof(axes: Axes, peak: float, bandwidth: float, low: float, high: float) -> None:
    """The two limits and the targets below them."""
    ridge = peak / bandwidth
    axes.plot(
        [low, ridge, high],
        [low * bandwidth, peak, peak],
        color=INK,
        linewidth=1.6,
        label=f"peak {peak:,.0f} GFLOP/s, memory {bandwidth:,.1f} GB/s",
    )
    aims = f"targets: {GEMM_TARGET:.0%} of peak, {BANDWIDTH_TARGET:.0%} of bandwidth"
    aim_ridge = GEMM_TARGET * peak / (BANDWIDTH_TARGET * bandwidth)
    axes.plot(
        [low, aim_ridge, high],
        [low * bandwidth * BANDWIDTH_TARGET, peak * GEMM_TARGET, peak * GEMM_TARGET],
        color=QUIET,
        linewidth=1.1,
        linestyle="--",
        label=aims,
    )


def roofline(timeline: Timeline) -> Figure | None:
    """Rate over intensity of each phase, below what the machine allows; without limits just the phases."""
    table = phase_table(timeline) if len(timeline.phases) else None
    if table is None:
        return None
    points = table[(table["intensity"] > 0) & (table["gflops"] > 0)]
    if not len(points):
        return None
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    peak, bandwidth = timeline.limits.get("peak_gflops"), timeline.limits.get("bandwidth_gbs")
    with styled():
        figure = new_figure(9.6, 4.9)
        axes = figure.subplots()
        intensities = [*points["intensity"], *([peak / bandwidth] if peak and bandwidth else [])]
        low, high = min(intensities) / 3, max(intensities) * 3
        if peak and bandwidth:
            _roof(axes, peak, bandwidth, low, high)
        elif peak:
            axes.axhline(peak, color=INK, linewidth=1.6, label=f"peak {peak:,.0f} GFLOP/s")
        elif bandwidth:
            axes.plot(
                [low, high],
                [low * bandwidth, high * bandwidth],
                color=INK,
                label=f"memory {bandwidth:,.1f} GB/s",
            )
        colour_of = colours(timeline, map(str, points.index))
        for place, (name, point) in enumerate(points.iterrows()):
            roof = point["roof_gflops"]
            share = f", {point['gflops'] / roof:.0%} of its roof" if not math.isnan(roof) else ""
            axes.plot(
                point["intensity"],
                point["gflops"],
                _MARKERS[place % len(_MARKERS)],
                color=colour_of[str(name)],
                markersize=8,
                markeredgecolor=INK,
                markeredgewidth=0.5,
                linestyle="none",
                label=f"{shortened(str(name))}: {point['gflops']:,.3g} GFLOP/s{share}",
            )
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        for axis in (axes.xaxis, axes.yaxis):  # matplotlib's own minor labels touch one another
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        missing = [
            option for option, limit in (("--peak-gflops", peak), ("--bandwidth", bandwidth)) if not limit
        ]
        limits = ["", f" (no {''.join(missing)})", " (limits not known)"][len(missing)]
        axes.set_title("Roofline of the phases" + limits)
        axes.set_xlabel("intensity, FLOP per byte")
        axes.set_ylabel("rate, GFLOP/s")
        axes.grid(which="major")
        left_out = len(table[table["wall_ns"] > 0]) - len(points)
        if left_out > 0:
            axes.plot([], [], " ", label=f"{left_out} without flop or bytes not drawn")
        figure.legend(loc="outside right upper")
    return figure


def change(comparison: Report) -> Figure | None:
    """The change of each phase from before to after, one panel per kind of step."""
    table = comparison.table
    phases = table["Step"].duplicated(keep="last")  # below them is their total
    table = table[phases & (table["Change"] != 0)]
    kinds = list(dict.fromkeys(table["Step"]))[:_MOST_PANELS]
    if not kinds:
        return None
    parts = [table[table["Step"] == kind] for kind in kinds]
    least = [_LEAST_CHANGE * part["Change"].abs().max() for part in parts]
    parts = [
        p[p["Change"].abs() >= few].head(_MOST_PHASES).iloc[::-1] for p, few in zip(parts, least, strict=True)
    ]
    with styled():
        figure = new_figure(9.6, sum(0.95 + 0.27 * len(part) for part in parts))
        panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=[len(p) + 2 for p in parts])[:, 0]
        for axes, kind, part in zip(panels, kinds, parts, strict=True):
            divisor, label = unit(part["Change"].abs().max())
            values = part["Change"].to_numpy() / divisor
            axes.barh(
                range(len(part)),
                values,
                height=0.65,
                color=[ACCENT if value > 0 else MAIN for value in values],
            )
            axes.set_yticks(range(len(part)), [shortened(name) for name in part["Phase"]])
            reach = abs(values).max()
            for row, (value, share) in enumerate(zip(values, part["Share of change (%)"], strict=True)):
                text = f"{value:+,.3g}" + ("" if math.isnan(share) else f" ({share:.0f} %)")
                axes.annotate(
                    text,
                    (value, row),
                    (4 if value > 0 else -4, 0),
                    textcoords="offset points",
                    va="center",
                    ha="left" if value > 0 else "right",
                    fontsize=8,
                )
            low, high = min(values.min(), 0), max(values.max(), 0)
            axes.set_xlim(low - (0.28 * reach if low < 0 else 0), high + (0.28 * reach if high > 0 else 0))
            axes.axvline(0, color=QUIET, linewidth=0.8)
            axes.set_title(f"{shortened(kind)}: change by phase, share of the whole change")
            axes.set_xlabel(f"mean change per pass, {label}" if kind != "(all ranges)" else f"change, {label}")
            axes.tick_params(axis="y", length=0)
    return figure
