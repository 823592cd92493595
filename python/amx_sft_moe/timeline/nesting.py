"""Which range lies in which: push/pop ranges of one thread nest, so a stack finds parents in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .libraries import pandas

if TYPE_CHECKING:
    import pandas as pd


def nest(ranges: pd.DataFrame) -> pd.DataFrame:
    """The ranges sorted by thread and begin, with columns added.

    Added: ``level`` (0: in no other), ``parent`` (row of the result, -1: none), ``dur_child_ns`` and
    ``num_child`` of the direct children. A range that begins in another and ends after it (two clocks, a broken
    file) counts as following it, not as its child.
    """
    keys = ["source", "process", "thread"]
    table = ranges.assign(_length=ranges["end_ns"] - ranges["begin_ns"])
    table = table.sort_values(
        [*keys, "begin_ns", "_length"], ascending=[True] * (len(keys) + 1) + [False], kind="stable"
    ).reset_index(drop=True)
    parents, levels = [-1] * len(table), [0] * len(table)
    stack: list[int] = []
    ends = table["end_ns"].tolist()
    last = None
    threads = zip(*(table[key].tolist() for key in keys), strict=True)
    for row, (thread, begin, end) in enumerate(zip(threads, table["begin_ns"].tolist(), ends, strict=True)):
        if thread != last:
            stack.clear()
            last = thread
        while stack and (ends[stack[-1]] <= begin or ends[stack[-1]] < end):
            # An empty range at the very end of another still belongs to it.
            if ends[stack[-1]] == begin == end:
                break
            stack.pop()
        if stack:
            parents[row] = stack[-1]
            levels[row] = len(stack)
        stack.append(row)
    pd = pandas()
    table["level"] = pd.Series(levels, dtype="int64")
    table["parent"] = pd.Series(parents, dtype="int64")
    children = table[table["parent"] >= 0].groupby("parent")["_length"].agg(["sum", "count"])
    table["dur_child_ns"] = children["sum"].reindex(table.index, fill_value=0).astype("int64")
    table["num_child"] = children["count"].reindex(table.index, fill_value=0).astype("int64")
    return table.drop(columns="_length")
