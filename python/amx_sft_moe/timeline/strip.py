"""The timeline strip: what each thread did, over one typical pass of each kind or over the whole of a file.

The picture is an image of threads by columns of time. Each cell has the colour of what took most of its work,
the paler the longer nothing ran. So it costs the same for ten ranges and for a million, and no thread looks
idle that had something to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .analysis import covered, union
from .libraries import matplotlib
from .nesting import nest
from .style import INK, QUIET, WAITING, colours, new_figure, shortened, shown, styled, unit
from .table import GPU_KINDS, Timeline

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 1600
MOST_ROWS = 128
_MOST_NAMES = 18
_MOST_PANELS = 3
_MOST_GROUPS = 60  # boxes above the threads; more would be a grey bar
_FAINTEST = 0.3  # of a colour, where a cell has anything at all
_LABEL_POINTS = 5.2  # width of a character of the groups' names


@dataclass
class _Panel:
    """One window of time and what is in it."""

    title: str
    begin: int
    end: int
    ranges: pd.DataFrame  # drawn, with a column "row"
    groups: pd.DataFrame
    rows: list[str]
    left_out: int  # threads beyond MOST_ROWS


def _drawn(ranges: pd.DataFrame) -> pd.DataFrame:
    """Phases where there are any, else the outermost ranges inside the steps; kernels and copies in any
    case."""
    gpu = ranges["kind"].isin(GPU_KINDS)
    phases = ranges["kind"] == "phase"
    if phases.any():
        return ranges[phases | gpu]
    cpu = nest(ranges[ranges["kind"].isin(("nvtx", "range"))])
    import pandas as pd

    whole = ranges["begin_ns"].min(), ranges["end_ns"].max()
    # A range over everything (a step, a driver's loop) would hide what is in it.
    frame = (cpu["begin_ns"] <= whole[0]) & (cpu["end_ns"] >= whole[1]) & (cpu["num_child"] > 0)
    top = cpu["level"] == 0
    inner = cpu["parent"].isin(cpu.index[frame & top])
    return pd.concat([cpu[(top & ~frame) | inner], ranges[gpu]])


def _panel(
    timeline: Timeline, title: str, begin: int, end: int, process: tuple[int, int] | None
) -> _Panel | None:
    """What runs from begin to end, of one source and process or of all."""
    ranges = timeline.ranges
    inside = (ranges["end_ns"] > begin) & (ranges["begin_ns"] < end)
    if process is not None:
        inside &= (ranges["source"] == process[0]) & (ranges["process"] == process[1])
    window = ranges[inside]
    if window.empty:
        return None
    drawn = _drawn(window)
    if drawn.empty:
        return None
    gpu = drawn["kind"].isin(GPU_KINDS)
    key_of = list(zip(gpu, drawn["source"], drawn["process"], drawn["thread"], strict=True))
    keys = sorted(set(key_of))
    row_of = {key: row for row, key in enumerate(keys[:MOST_ROWS])}
    files, processes = drawn["source"].nunique() > 1, drawn["process"].nunique() > 1
    rows = []
    for on_gpu, source, pid, thread in keys[:MOST_ROWS]:
        label = f"stream {thread}" if on_gpu else timeline.thread_label(pid, thread, source)
        whose = [f"file {source + 1}"] * files + [f"{pid}"] * processes
        rows.append(shortened(": ".join([*whose, label]), 24))
    drawn = drawn.assign(row=[row_of.get(key, -1) for key in key_of])
    groups = window[window["kind"] == "group"].sort_values("begin_ns")
    return _Panel(title, begin, end, drawn[drawn["row"] >= 0], groups, rows, len(keys) - len(rows))


def _placed(timeline: Timeline) -> Timeline:
    """What has places in time: text dumps have none."""
    untimed = [number for number, source in enumerate(timeline.sources) if source.form == "text dump"]
    if not untimed:
        return timeline
    ranges, passes = (table[~table["source"].isin(untimed)] for table in (timeline.ranges, timeline.passes))
    return replace(timeline, ranges=ranges, passes=passes)


def _typical(timeline: Timeline) -> list[_Panel]:
    """For each kind of step the pass whose time is nearest the median, among those with ranges."""
    have = set(timeline.ranges["step"].unique())
    passes = timeline.passes[timeline.passes.index.isin(have)]
    panels = []
    for step, mine in passes.groupby("step", observed=True, sort=False):
        one = mine.loc[(mine["total_ns"] - mine["total_ns"].median()).abs().idxmin()]
        layer = f" of {shortened(one['layer'])}" if one["layer"] else ""
        name = f"{shortened(str(step))} {one['index']}{layer}"
        title = f"{name}: {shown(one['total_ns'])}, nearest to the median of {len(mine):,}"
        process = int(one["source"]), int(one["process"])
        panel = _panel(timeline, title, int(one["begin_ns"]), int(one["end_ns"]), process)
        if panel is not None:
            panels.append(panel)
    return panels[:_MOST_PANELS]


def _cells(panel: _Panel, names: list[str], colour_of: dict[str, str]) -> np.ndarray:
    """The image [rows, columns, red green blue], from how much of each cell's time each name has."""
    import numpy as np

    # From the panel's begin on, as integers: nanoseconds since 1970 are too long for a float.
    def spans_of(ranges: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        return union(*(ranges[name].to_numpy() - panel.begin for name in ("begin_ns", "end_ns")))

    edges, width = np.linspace(0, panel.end - panel.begin, COLUMNS + 1, retstep=True)
    to_rgb = matplotlib("colors").to_rgb
    palette = np.array([to_rgb(WAITING), *(to_rgb(colour_of[name]) for name in names)])
    image = np.ones((len(panel.rows), COLUMNS, 3))
    in_group = np.diff(covered(edges, *spans_of(panel.groups)))
    code_of = {name: code for code, name in enumerate(names)}
    codes = panel.ranges["name"].astype(object).map(code_of).fillna(len(names) - 1).astype("int64")
    for row, mine in panel.ranges.assign(code=codes).groupby("row"):
        amounts = np.zeros((len(names) + 1, COLUMNS))
        for code, ranges in mine.groupby("code"):
            amounts[code + 1] = np.diff(covered(edges, *spans_of(ranges)))
        if (mine["kind"] == "phase").any():
            amounts[0] = np.clip(in_group - amounts.sum(axis=0), 0, None)
        taken = amounts.sum(axis=0) / width
        strength = np.where(taken > 1e-9, np.clip(taken, _FAINTEST, 1), 0)[:, None]
        image[row] = 1 - strength * (1 - palette[amounts.argmax(axis=0)])
    return image


def _names(panels: list[_Panel]) -> list[str]:
    """The names that get a colour of their own, by time; the rest is "other"."""
    import pandas as pd

    drawn = pd.concat([panel.ranges for panel in panels])
    times = (drawn["end_ns"] - drawn["begin_ns"]).groupby(drawn["name"].astype(object)).sum()
    names = [str(name) for name in times.sort_values(ascending=False).index]
    return names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], "other"]


def _group_row(axes: Axes, panel: _Panel, divisor: float, width_points: float) -> None:
    """The groups as boxes, with their names where these have room."""
    whole = panel.end - panel.begin
    axes.set_ylim(0, 1)
    axes.axis("off")
    merged: list[list[Any]] = []
    for name, begin, end in zip(
        panel.groups["name"], panel.groups["begin_ns"], panel.groups["end_ns"], strict=True
    ):
        if merged and merged[-1][0] == name and begin - merged[-1][2] < 0.02 * whole:
            merged[-1][2] = max(merged[-1][2], end)
        else:
            merged.append([name, begin, end])
    for name, begin, end in merged:
        left, length = (begin - panel.begin) / divisor, (end - begin) / divisor
        axes.broken_barh([(left, length)], (0.1, 0.8), facecolor="#e4e9ee", edgecolor=QUIET, linewidth=0.6)
        if (end - begin) / whole * width_points > _LABEL_POINTS * len(name):
            axes.text(
                left + length / 2, 0.47, name, ha="center", va="center", fontsize=8, color=INK, clip_on=True
            )


def _draw(
    axes: Axes, panel: _Panel, names: list[str], colour_of: dict[str, str], divisor: float, label: str
) -> None:
    extent = (0, (panel.end - panel.begin) / divisor, len(panel.rows) - 0.5, -0.5)
    axes.imshow(_cells(panel, names, colour_of), aspect="auto", interpolation="nearest", extent=extent)
    every = max(1, -(-len(panel.rows) // 16))
    axes.set_yticks(range(0, len(panel.rows), every), panel.rows[::every])
    axes.set_ylabel("thread" if len(panel.rows) > 1 else "")
    axes.set_xlabel(f"time, {label}")
    for edge in range(1, len(panel.rows) if len(panel.rows) <= 32 else 0):
        axes.axhline(edge - 0.5, color="white", linewidth=1.5)


def strip(timeline: Timeline, whole: bool = False) -> Figure | None:
    """The strip as a figure; None where no range has a thread and a place in time.

    Args:
        timeline: with ranges.
        whole: everything that was kept rather than typical passes, for a window that was chosen.
    """
    timeline = _placed(timeline)
    ranges = timeline.ranges
    if not len(ranges):
        return None
    panels = [] if whole else _typical(timeline)
    if not panels:
        placed = ranges[ranges["kind"].isin(("phase", "nvtx", "range", *GPU_KINDS))]
        if placed.empty:
            return None
        begin, end = int(placed["begin_ns"].min()), int(placed["end_ns"].max())
        panel = _panel(timeline, f"all ranges: {shown(end - begin)}", begin, end, None) if end > begin else None
        if panel is None:
            return None
        panels = [panel]
    names = _names(panels)
    colour_of = colours(timeline, names)
    heights = [max(0.9, min(0.3 * len(panel.rows), 0.05 * len(panel.rows) + 1.2, 4.4)) for panel in panels]
    with styled():
        legend = 0.3 + 0.2 * (len(names) + 1)
        figure = new_figure(11.5, max(sum(heights) + 1.15 * len(panels), legend))
        parts = figure.subfigures(len(panels), 1, height_ratios=[h + 1.15 for h in heights], squeeze=False)[
            :, 0
        ]
        for part, panel, height in zip(parts, panels, heights, strict=True):
            divisor, label = unit(panel.end - panel.begin)
            if 0 < len(panel.groups) <= _MOST_GROUPS:
                top, axes = part.subplots(2, 1, sharex=True, height_ratios=[0.22, height])
                _group_row(top, panel, divisor, 8.3 * 72)
            else:
                top = axes = part.subplots()
            more = f" ({panel.left_out} more threads not drawn)" if panel.left_out else ""
            top.set_title(panel.title + more)
            _draw(axes, panel, names, colour_of, divisor, label)
        _legend(figure, panels, names, colour_of)
    return figure


def _legend(figure: Figure, panels: list[_Panel], names: list[str], colour_of: dict[str, str]) -> None:
    patch = matplotlib("patches").Patch
    entries = [patch(color=colour_of[name], label=shortened(name)) for name in names]
    if any(len(panel.groups) for panel in panels):
        entries.append(patch(facecolor=WAITING, label="waiting, or not yet at work"))
    figure.legend(handles=entries, loc="outside right upper")
