"""One HTML file with everything in it: key figures, pictures as data URIs, tables. No network, no scripts."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .output import DIGITS, in_unit, time_unit
from .reports import Report
from .style import png

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DOCTYPE = "<!DOCTYPE html>"
MOST_ROWS = 200
_LONGEST_CELL = 120
_DIGITS = 3  # of what is no time
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2933; margin: 2rem auto;
  max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0 .6rem; color: #52606d; } img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 12.5px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #e4e9ee; text-align: right; white-space: nowrap; }
th { background: #f5f7fa; } td.text, th.text { text-align: left; white-space: normal; }
.yes { color: #1a7f37; font-weight: 600; } .no { color: #c2410c; font-weight: 600; }
li { color: #52606d; overflow-wrap: anywhere; }
"""


def _cell(value: object, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:,.{digits}f}".rstrip("0").rstrip(".")
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def _table(frame: pd.DataFrame, digits: Mapping[str, int]) -> str:
    """A table; numbers to the right, with the digits of their column at most, yes and no in colour."""
    head = frame.head(MOST_ROWS)
    text = {column: not len(head) or isinstance(head[column].iloc[0], str) for column in head}
    parts = ["<div class=wide><table><tr>"]
    parts += [f"<th{' class=text' if text[c] else ''}>{html.escape(str(c))}</th>" for c in head]
    parts.append("</tr>\n")
    for row in zip(*(head[column].tolist() for column in head), strict=True):
        parts.append("<tr>")
        for column, value in zip(head, row, strict=True):
            shown = str(value) if column in ("PID", "TID", "Index") else _cell(value, digits[column])
            kind = shown if column == "Met" and shown in ("yes", "no") else "text" if text[column] else ""
            parts.append(f"<td{f' class={kind}' if kind else ''}>{html.escape(shown)}</td>")
        parts.append("</tr>\n")
    parts.append("</table></div>\n")
    if len(head) < len(frame):
        parts.append(f"<p>{len(frame) - len(head):,} more rows: see the report as CSV.</p>\n")
    return "".join(parts)


def _section(report: Report, unit: str) -> str:
    note = f"<p>{html.escape(report.note)}</p>\n" if report.note else ""
    name = f"<h2 id={report.name}>{html.escape(report.title)} <small>({report.name})</small></h2>\n"
    table = in_unit(report, unit)
    of_times = DIGITS[time_unit(unit)[0]]
    return name + note + _table(table, {c: _DIGITS if c in report.table.columns else of_times for c in table})


def _picture(title: str, figure: Figure) -> str:
    data = base64.b64encode(png(figure)).decode("ascii")
    return (
        f'<h2>{html.escape(title)}</h2>\n<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">\n'
    )


def page(
    title: str,
    first: Sequence[Report],
    pictures: Sequence[tuple[str, Figure | None, str]],
    reports: Sequence[Report],
    notes: Sequence[str],
    unit: str = "ms",
) -> str:
    """The whole page.

    Args:
        title: its heading.
        first: reports above the pictures: configuration, key figures.
        pictures: title, figure, and what to say where there is none.
        reports: tables below the pictures.
        notes: what was left out or assumed.
        unit: of times in the tables.
    """
    parts = [
        f"{DOCTYPE}\n<html lang=en>\n<head>\n<meta charset=utf-8>\n",
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n",
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n",
    ]
    if notes:
        parts += ["<ul>\n", *(f"<li>{html.escape(note)}</li>\n" for note in notes), "</ul>\n"]
    parts += [_section(report, unit) for report in first]
    for name, figure, missing in pictures:
        if figure is not None:
            parts.append(_picture(name, figure))
        else:
            parts.append(f"<h2>{html.escape(name)}</h2>\n<p>{html.escape(missing)}</p>\n")
    parts += [_section(report, unit) for report in reports if len(report.table)]
    parts.append("</body>\n</html>\n")
    return "".join(parts)
