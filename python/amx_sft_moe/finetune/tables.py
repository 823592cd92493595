"""Tables as text, for the terminal and for Markdown, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def _widths(header: Row, rows: Sequence[Row]) -> list[int]:
    return [max(map(len, column)) for column in zip(header, *rows, strict=True)]


def plain_table(header: Row, rows: Sequence[Row], indent: str = "  ") -> str:
    """Columns two spaces apart; the first is aligned to the left, numbers (all others) to the right."""
    widths = _widths(header, rows)

    def line(cells: Row) -> str:
        first, *rest = cells
        cells = [
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)),
        ]
        return (indent + "  ".join(cells)).rstrip()

    return "\n".join([line(header), indent + "  ".join("-" * width for width in widths), *map(line, rows)])


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """The same table in Markdown."""
    widths = _widths(header, rows)
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Row) -> str:
        first, *rest = cells
        cells = [
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)),
        ]
        return f"| {' | '.join(cells)} |"

    return "\n".join([line(header), line(rule), *map(line, rows)])


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with no more digits than mean something."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def duration(seconds: float) -> str:
    """`42 s`, or `3 min 07 s`."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def loss(nats: float) -> str:
    """A loss to four decimals."""
    return f"{nats:.4f}"
