"""How pictures look: colours that mean the same phase in every picture, units, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from colorsys import hsv_to_rgb
from contextlib import AbstractContextManager
from io import BytesIO
from typing import TYPE_CHECKING

from .libraries import matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .table import Timeline

INK = "#1f2933"
QUIET = "#9aa5b1"
GRID = "#eef1f4"
OTHER = "#c3ccd5"
WAITING = "#f6d5d5"
ACCENT = "#c2410c"
MAIN = "#2a6f97"
DPI = 130

_RC = {
    "font.size": 9,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "grid.color": GRID,
}
_PHASES = {
    "route": "#7b8794",
    "gather": "#9edae5",
    "lora_a(gate,up)": "#98df8a",
    "gemm(gate)+gemm(up)+activation": "#1f77b4",
    "lora_a(down)": "#2ca02c",
    "gemm(down)": "#17becf",
    "sum_tokens": "#bcbd22",
    "D1_scatter": "#c49c94",
    "D3_gemm": "#d62728",
    "D4_lora_grad": "#ff9896",
    "D5_weight_grad": "#8c1d1d",
    "silu_backward": "#e377c2",
    "base_pass(gate)+base_pass(up)": "#ff7f0e",
    "lora_pass(gate)": "#ffbb78",
    "lora_pass(up)": "#e0c341",
    "weight_grad(gate)": "#b35900",
    "weight_grad(up)": "#7f6a00",
    "GU4_sum_tokens": "#8c564b",
    "backward_routing_weights": "#9467bd",
}
# As far as can be from those of phases and from one another (in CIE Lab, of colours that are not glaring).
_OTHERS = (
    "#3f3fe0", "#1b6137", "#e03fe0", "#e03f6f", "#612c56", "#90e03f", "#3fe0c0", "#27318c",
    "#b8b86e", "#3f6fe0", "#1b6161", "#61613a", "#6e8c27", "#b86e8c", "#8333b8", "#8c2782",
    "#3fe06f", "#8c2746", "#5a548c", "#87abe0", "#b88553", "#e03fb0", "#33b876", "#6eb8a2",
    "#bbe065", "#6b8c54", "#c865e0", "#3fe03f", "#b85353", "#b83376", "#8790e0", "#612c36",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_QUIET_NAMES = ("other", "(in no range)", "(outside phases)")
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def colours(timeline: Timeline, names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: our phases their own, others one that no other name has in any picture of the
    timeline."""
    known = timeline.colours
    found = {}
    for name in names:
        if name in _QUIET_NAMES:
            found[name] = OTHER
        elif name in _PHASES:
            found[name] = _PHASES[name]
        else:
            found[name] = known.setdefault(name, _other(len(known)))
    return found


def _other(number: int) -> str:
    """Another colour for each number; beyond what pictures mostly need they may be alike."""
    if number < len(_OTHERS):
        return _OTHERS[number]
    rgb = hsv_to_rgb(number * 0.618034 % 1, 0.35 + 0.1 * (number % 5), 0.5 + 0.1 * (number % 4))
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def unit(largest_ns: float) -> tuple[float, str]:
    """The unit in which nanoseconds up to `largest_ns` are written, as divisor and name."""
    return next(((divisor, name) for divisor, name in _UNITS if largest_ns >= 2 * divisor), _UNITS[-1])


def shown(ns: float) -> str:
    """A time with about three digits and its unit."""
    divisor, name = unit(ns)
    value = ns / divisor
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {name}"


def shortened(name: str, most: int = 40) -> str:
    """A name that a legend has room for, and in which matplotlib finds nothing to interpret."""
    name = _CONTROL.sub(" ", name if len(name) <= most else name[: most - 1] + "…")
    # "$" begins mathematics, and labels that begin with "_" are left out of legends.
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def styled() -> AbstractContextManager[None]:
    """Our style while a picture is made; matplotlib's own settings are as before afterwards."""
    matplotlib("figure")  # says so where it is missing
    from matplotlib import rc_context

    return rc_context(_RC)


def new_figure(width: float, height: float) -> Figure:
    """A figure of that many inches; without pyplot, so without global state."""
    return matplotlib("figure").Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def png(figure: Figure) -> bytes:
    """The picture as the bytes of a PNG file."""
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
