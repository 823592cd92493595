"""Reads timelines of steps and answers where the time went: ``python -m amx_sft_moe timeline FILE...``.

    timeline = amx_sft_moe.timeline.read(["steps.jsonl"])       # or a Chrome trace, an export of Nsight Systems
    timeline.phases                                             # pandas tables; see table.py
    reports.nvtx_pushpop_sum(timeline).table                    # of amx_sft_moe.timeline.reports; analysis, ...

pandas does the work and is imported when it is first needed; pictures need matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import readers
from .errors import TimelineError
from .filters import Filters
from .passes import derive
from .readers.python_dict import from_times
from .table import Bounds, Timeline, concatenate

__all__ = ["Bounds", "Filters", "Timeline", "TimelineError", "from_times", "read"]


def read(
    paths: Sequence[str | Path] | str | Path,
    filters: Filters | None = None,
    bounds: Bounds | None = None,
    step_range: str | None = None,
) -> Timeline:
    """Files as one timeline, with passes, phases and waiting worked out where a file has only ranges.

    Args:
        paths: files of any of the formats, also mixed.
        filters: what is kept while reading.
        bounds: how much is kept at most.
        step_range: regular expression; ranges of such names are the steps.

    Raises:
        TimelineError: a file cannot be read, is of no known format or holds nothing; an expression is none, or
            finds no step.
    """
    from .filters import parse_name

    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given:
        raise TimelineError("no file was given")
    pattern = parse_name(step_range) if step_range is not None else None
    parts = [readers.read_file(Path(path), filters, bounds, number) for number, path in enumerate(given)]
    found = [derive(part, pattern, filters.threads if filters else None) for part in parts]
    if pattern is not None and not any(found):
        raise TimelineError(f"--step-range: there is no range whose name {step_range!r} finds")
    whole = concatenate(parts)
    whole.passes["source"] = _sources(parts)
    return whole


def _sources(parts: list[Timeline]) -> list[int]:
    """For each pass the number of its file."""
    return [number for number, part in enumerate(parts) for _ in range(len(part.passes))]
