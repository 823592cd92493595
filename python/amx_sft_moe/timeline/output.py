"""Reports as text columns, CSV or JSON, in the unit of time that was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from .errors import TimelineError
from .reports import Report

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("column", "csv", "json")
TIME_UNITS = {
    **dict.fromkeys(("ns", "nsec", "nanoseconds"), ("ns", 1.0)),
    **dict.fromkeys(("us", "usec", "microseconds"), ("us", 1e3)),
    **dict.fromkeys(("ms", "msec", "milliseconds"), ("ms", 1e6)),
    **dict.fromkeys(("s", "sec", "seconds"), ("s", 1e9)),
}
_BATCH = 10_000
_LARGEST = 1 << 53  # up to here a double holds whole numbers
_WIDEST = 60  # of a name in text columns; CSV and JSON have it whole
DIGITS = {"ns": 1, "us": 3, "ms": 3, "s": 6}


def time_unit(text: str) -> tuple[str, float]:
    """The unit's short name and how many nanoseconds it has, from nsys's words for it."""
    try:
        return TIME_UNITS[text]
    except KeyError:
        raise TimelineError(f"expected a unit of time ({', '.join(TIME_UNITS)}), got {text!r}") from None


def in_unit(report: Report, unit: str) -> pd.DataFrame:
    """The report's table with times in `unit` and the unit in their headers, as nsys has them."""
    short, divisor = time_unit(unit)
    table = report.table.copy(deep=False)
    times = [column for column in report.times if column in table]
    for column in times:
        values = table[column]
        if divisor != 1.0:
            table[column] = values / divisor
        elif values.dtype == "float64" and (values.dropna() % 1 == 0).all() and values.abs().max() < _LARGEST:
            # Whole nanoseconds; None for what is not known, which an integer column cannot hold.
            table[column] = values.astype("Int64").astype(object).where(values.notna(), None)
    return table.rename(columns={column: f"{column} ({short})" for column in times})


def _cell(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, str):
        return value if len(value) <= _WIDEST else value[: _WIDEST - 1] + "…"
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _columns(report: Report, unit: str, rows: int, out: IO[str]) -> None:
    """Aligned text, at most `rows` of it (0: all)."""
    table = in_unit(report, unit)
    head = table.head(rows) if rows else table
    digits = {
        column: DIGITS[time_unit(unit)[0]] if column not in report.table.columns else 1 for column in table
    }
    for column in ("GFLOP", "FLOP/byte", "GB/s", "Ratio"):
        digits[column] = 2
    plain = ("PID", "TID", "Lvl", "Index", "Step", "RangeId", "ParentId")  # numbers that are names
    cells = [
        [str(value) if column in plain else _cell(value, digits[column]) for value in head[column].tolist()]
        for column in table
    ]
    left = [not len(head) or isinstance(head[column].iloc[0], str) for column in table]
    widths = [max(map(len, [str(column), *texts])) for column, texts in zip(table, cells, strict=True)]
    out.write(f"\n ** {report.title} ({report.name})\n")
    if report.note:
        out.write(f"    {report.note}\n")
    out.write("\n")

    def line(texts: Any) -> str:
        aligned = (
            t.ljust(w) if to_left else t.rjust(w) for t, w, to_left in zip(texts, widths, left, strict=True)
        )
        return (" " + "  ".join(aligned)).rstrip() + "\n"

    out.write(line(map(str, table)))
    out.write(line("-" * width for width in widths))
    for row in zip(*cells, strict=True):
        out.write(line(row))
    if len(head) < len(table):
        out.write(f" ... {len(table) - len(head):,} more rows (--rows 0 shows all)\n")


def _batches(table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    for first in range(0, len(table), _BATCH):
        yield table.iloc[first : first + _BATCH]


def _csv(report: Report, unit: str, out: IO[str]) -> None:
    table = in_unit(report, unit)
    table.head(0).to_csv(out, index=False)
    for batch in _batches(table):
        batch.to_csv(out, index=False, header=False)


def _json(report: Report, unit: str, out: IO[str]) -> None:
    """An array of objects with the headers as keys, a row a line; what is not known is null."""
    table = in_unit(report, unit)
    # Elsewhere characters that the stream lacks would become escapes that JSON does not know.
    escaped = not (getattr(out, "encoding", None) or "utf-8").lower().startswith("utf")
    out.write("[")
    first = True
    for batch in _batches(table):
        rows = batch.astype(object).where(batch.notna(), None).to_dict("records")
        for row in rows:
            out.write(("\n" if first else ",\n") + json.dumps(row, ensure_ascii=escaped, default=str))
            first = False
    out.write("\n]\n")


def write(report: Report, form: str, unit: str, rows: int, out: IO[str]) -> None:
    """One report to an open text file.

    Args:
        form: one of FORMATS.
        unit: nanoseconds by any of nsys's words, and so on.
        rows: most rows of text columns, 0 for all; CSV and JSON are always whole.
    """
    if form == "csv":
        _csv(report, unit, out)
    elif form == "json":
        _json(report, unit, out)
    else:
        _columns(report, unit, rows, out)
