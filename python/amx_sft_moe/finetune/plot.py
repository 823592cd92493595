"""The picture: how the losses fell, and where the time of a step goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only; no display is asked for

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from .options import OURS
from .results import Results
from .training import Curve

INK = "#1f2933"
QUIET = "#9aa5b1"
BATCH = "#d3e2f0"
TRAINING = "#2a6f97"
HELD_OUT = "#c2410c"
FORWARD = "#2a6f97"
BACKWARD = "#61a5c2"
REST = "#d5dce3"

STYLE = {
    "font.size": 10,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
}


def _running_mean(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values, of fewer at the beginning."""
    return [sum(values[max(end - width, 0) : end]) / min(end, width) for end in range(1, len(values) + 1)]


def _losses(axes: Axes, curve: Curve, title: str) -> None:
    """Single batches are noise around a line; the line and the held-out losses are what one looks for."""
    steps, losses = zip(*curve.held_out, strict=True)
    axes.plot(range(len(curve.losses)), curve.losses, color=BATCH, linewidth=0.8)
    mean = _running_mean(curve.losses, max(len(curve.losses) // 15, 1))
    axes.plot(range(len(mean)), mean, color=TRAINING, linewidth=1.6, label="training")
    axes.plot(steps, losses, color=HELD_OUT, linewidth=1.6, marker="o", markersize=4, label="held out")
    around = [withStroke(linewidth=3, foreground="white")]
    for index, offset, side in ((0, (8, 3), "left"), (-1, (2, 9), "right")):
        axes.annotate(
            f"{losses[index]:.2f}",
            (steps[index], losses[index]),
            offset,
            textcoords="offset points",
            color=HELD_OUT,
            ha=side,
            weight="bold",
            path_effects=around,
        )
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(axis="y", color="#eef1f4")
    axes.set_axisbelow(True)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.2 * (high - low))  # room for the legend above the curves
    axes.legend(loc="upper right", ncols=2, columnspacing=1.2, handlelength=1.6)


def _step_times(axes: Axes, results: Results) -> None:
    """One bar per implementation, milliseconds, split into the experts' forward and backward and the rest."""
    lanes = results.comparison or []
    labels = [
        f"{lane.name}\n(this package)" if lane.name == OURS else f"{lane.name}\n(torch, PEFT)" for lane in lanes
    ]
    forward = [lane.median("forward") * 1e3 for lane in lanes]
    backward = [lane.median("backward") * 1e3 for lane in lanes]
    step = [lane.median("step") * 1e3 for lane in lanes]
    rest = [whole - f - b for whole, f, b in zip(step, forward, backward, strict=True)]
    left = [0.0] * len(lanes)
    for name, values, color in (
        ("experts, forward", forward, FORWARD),
        ("experts, backward", backward, BACKWARD),
        ("all the rest", rest, REST),
    ):
        axes.barh(labels, values, left=left, color=color, label=name, height=0.5)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for index, (lane, whole) in enumerate(zip(lanes, step, strict=True)):
        axes.annotate(
            f"{whole:,.0f} ms, experts {lane.share:.0%}",
            (0, index),
            (2, 30),
            textcoords="offset points",
            va="center",
        )
    axes.set_title("Time of a LoRA step")
    axes.set_xlabel("milliseconds (median)")
    axes.set_ylim(len(lanes) - 0.4, -0.75)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=3, columnspacing=1.2, handlelength=1.2)


def draw(results: Results, path: Path) -> None:
    """Writes the picture as PNG, as a whole or not at all. Stages that did not run have no panel."""
    panels: list[Callable[[Axes], None]] = []
    if (base := results.base) is not None:
        panels.append(lambda axes: _losses(axes, base, "Base training: prose"))
    panels.append(lambda axes: _losses(axes, results.lora, "LoRA: experts and attention"))
    if results.comparison:
        panels.append(lambda axes: _step_times(axes, results))
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(
            1, len(panels), figsize=(4.9 * len(panels), 3.9), squeeze=False, dpi=150
        )
        for axes, panel in zip(all_axes[0], panels, strict=True):
            panel(axes)
        figure.tight_layout(w_pad=2.5)
        partial = path.with_name(f".{path.stem}.{os.getpid()}.partial.png")
        try:
            figure.savefig(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
            plt.close(figure)
