"""Threads of one process that call at the same time: each has a team of its own."""

from __future__ import annotations

import pytest

import timelines
from amx_sft_moe import timeline
from amx_sft_moe.timeline import Filters, analysis
from amx_sft_moe.timeline.nesting import nest

pd = pytest.importorskip("pandas")

OTHER = 4_711_000


def two_callers(**changes):
    """Of two threads, in the order in which they end: the second one's passes begin within the first one's."""
    first = timelines.passes_of(2)
    second = [shifted(record, 3_000_000) | changes for record in timelines.passes_of(2, seed=2)]
    return sorted(first + second, key=lambda record: record["end_ns"])


def shifted(record, ns):
    """The same pass later."""

    def moved(value):
        if isinstance(value, list):
            return [moved(one) for one in value]
        if not isinstance(value, dict):
            return value
        result = {key: moved(one) for key, one in value.items()}
        for key in {"begin_ns", "end_ns"} & result.keys():
            result[key] += ns
        if "spans" in result:
            result["spans"] = [
                [name, begin + ns, end + ns, tasks] for name, begin, end, tasks in result["spans"]
            ]
        return result

    return moved(record)


def test_callers_have_threads_of_their_own(tmp_path):
    """Parents, gaps and waiting are those of each caller alone."""
    both = timeline.read(timelines.write_lines(tmp_path / "both", two_callers(caller=OTHER)))
    assert set(both.ranges["thread"]) == {0, 1, 2, OTHER, OTHER + 1, OTHER + 2}
    assert not both.notes
    for caller, name in ((0, "first"), (OTHER, "second")):
        lines = [record for record in two_callers(caller=OTHER) if record["caller"] == caller]
        alone = timeline.read(timelines.write_lines(tmp_path / name, lines))
        own = both.ranges["thread"] // 1000 == caller // 1000
        levels, of_both = (nest(ranges)["level"].tolist() for ranges in (alone.ranges, both.ranges[own]))
        assert levels == of_both
        waits = both.thread_waits[both.thread_waits["thread"] // 1000 == caller // 1000]
        pd.testing.assert_frame_equal(
            alone.thread_waits.astype({"group": str}), waits.reset_index(drop=True).astype({"group": str})
        )
        gaps, of_both = analysis.gaps(alone).table, analysis.gaps(both).table
        assert len(gaps) == (of_both["TID"].astype(int) // 1000 == caller // 1000).sum()


def test_they_are_those_of_the_trace(tmp_path):
    lines = two_callers(caller=OTHER)
    ours = timeline.read(
        timelines.write_lines(tmp_path / "lines", lines), Filters(threads=frozenset([OTHER + 1]))
    )
    assert set(ours.ranges["thread"]) == {OTHER + 1} == set(ours.thread_waits["thread"])
    step = timeline.read(tmp_path / "lines", step_range="^backward$")
    assert not any("overlap in time" in note for note in step.notes)


@pytest.mark.parametrize("overlap", [True, False])
def test_older_lines_do_not_say_who_called(tmp_path, overlap):
    lines = two_callers() if overlap else timelines.passes_of(2)
    for line in lines:
        del line["caller"]
    read = timeline.read(timelines.write_lines(tmp_path / "f", lines))
    assert any("passes of one process overlap in time" in note for note in read.notes) == overlap
    for number, line in enumerate(lines):
        line["pid"] = number
    read = timeline.read(timelines.write_lines(tmp_path / "f", lines))
    assert not read.notes, "processes may"
