"""How pictures look: colours that mean the same phase in every picture, units, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from io import BytesIO
from typing import TYPE_CHECKING

from .libraries import matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
_OTHERS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf",
    "#98df8a", "#ff9896", "#c5b0d5", "#c49c94", "#9edae5",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_QUIET_NAMES = ("other", "(in no range)", "(outside phases)")
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: our phases their own, others in order of appearance."""
    free = iter(_OTHERS * 100)
    return {name: OTHER if name in _QUIET_NAMES else _PHASES.get(name) or next(free) for name in names}


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
