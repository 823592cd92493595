"""Text dumps that are not whole, and what else stands in them."""

from __future__ import annotations

import pytest

import timelines
from amx_sft_moe import timeline
from amx_sft_moe.timeline.readers import text_dump

pd = pytest.importorskip("pandas")


def dump_lines(steps: int) -> list[str]:
    return "".join(map(timelines.text_dump, timelines.passes_of(steps))).splitlines(keepends=True)


def times(read: timeline.Timeline) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each phase, by kind of pass, in order."""
    table = read.phases.merge(read.passes, left_on="pass", right_index=True)
    found: dict[tuple[str, str], list[float]] = {}
    for step, phase, ns in zip(table["step"], table["phase"], table["wall_ns"], strict=True):
        found.setdefault((step, phase), []).append(round(ns * 1e-6, 3))
    return found


def test_phases_belong_to_the_groups_that_have_them(tmp_path):
    path = tmp_path / "f"
    path.write_text(
        "[DOWN] D3_gemm: 40.000 ms\n[DOWN] a_name_of_others: 2.000 ms\n[GATHER] route: 1.000 ms\n"
        "[FWD TIMER] forward_gather: 3.000 ms (total: 3.000 ms)\n"
        "[DOWN] D3_gemm: 40.000 ms\n[FWD TIMER] forward_sum_tokens: 1.000 ms (total: 4.000 ms)\n"
    )
    assert times(timeline.read(path)) == {
        ("forward", "a_name_of_others"): [2.0],
        ("forward", "route"): [1.0],
        ("forward", "forward_sum_tokens"): [1.0],
    }


@pytest.mark.parametrize("end", [False, True])
def test_a_part_of_a_file_has_whole_passes_only(tmp_path, end):
    """Wherever it begins or ends."""
    path = tmp_path / "f"
    dumps = [timelines.text_dump(record) for record in timelines.passes_of(3)]
    path.write_text("".join(dumps))
    whole = timeline.read(path)
    lines = dump_lines(3)
    for cut in range(1, len(dump_lines(1)), 2):
        path.write_text("".join(lines[:-cut] if end else lines[cut:]))
        lost = 1 + (cut > len(dumps[-1 if end else 0].splitlines()))
        read = timeline.read(path)
        kept = whole.passes[: 6 - lost] if end else whole.passes[lost:]
        assert read.passes["step"].tolist() == kept["step"].tolist(), cut
        assert read.passes["total_ns"].tolist() == pytest.approx(kept["total_ns"].tolist(), abs=2), cut
        for name, ms in times(read).items():
            assert ms == (times(whole)[name][: len(ms)] if end else times(whole)[name][-len(ms) :]), cut


def test_both_ends_and_a_killed_process(tmp_path):
    path, lines = tmp_path / "f", dump_lines(3)
    each = len(lines) // 3
    path.write_text("".join(lines[2:-2]))  # of the first forward and the last backward lines are missing
    read = timeline.read(path)
    assert read.passes["step"].tolist() == ["backward", "forward", "backward", "forward"]
    assert any("2 passes are left out: they lack lines" in note for note in read.notes)
    path.write_text("".join(lines[: each - 2] + lines[each:]))  # in its middle
    read = timeline.read(path)
    assert read.passes["step"].tolist() == ["forward", "forward", "backward", "forward", "backward"]
    assert any("1 passes are left out" in note for note in read.notes)


def test_the_only_pass_of_its_kind_stays(tmp_path):
    path, lines = tmp_path / "f", dump_lines(1)
    path.write_text("".join(lines[3:-3]))
    read = timeline.read(path)
    assert read.passes["step"].tolist() == ["forward", "backward"]
    assert not any("lack lines" in note for note in read.notes)


def test_a_kind_of_pass_that_came_after_the_first_reading_is_whole():
    only_forwards = text_dump._Expected([text_dump._Pass("forward", {}, {"forward_down": 1.0})])
    assert only_forwards.is_whole(text_dump._Pass("backward", {}, {"backward_down": 1.0}))
