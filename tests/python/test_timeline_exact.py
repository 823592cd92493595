"""Numbers that are small, large, or none: what is known of a pass is told as exactly as it is known."""

from __future__ import annotations

import json

import pytest

from amx_sft_moe import timeline
from amx_sft_moe.timeline import TimelineError, key_figures
from amx_sft_moe.timeline.html import page
from amx_sft_moe.timeline.reports import Report
from timelines import write_lines

pd = pytest.importorskip("pandas")


def test_short_phases_of_lines_are_exact(tmp_path):
    """Milliseconds with three decimals are not, where the same line has nanoseconds."""
    thread = {"thread": 0, "begin_ns": 0, "end_ns": 2800, "busy_ns": {"route": 700, "gather": 700}}
    region = {"group": "forward_gather", "begin_ns": 0, "end_ns": 2800, "parallel": True, "threads": [thread]}
    line = {
        "step": "forward",
        "begin_ns": 0,
        "end_ns": 5000,
        "phases_ms": {"D2_quantize": 0.0, "gather": 0.001, "route": 0.001, "sum_tokens": 0.002},
        "phases_bytes": {"route": 14_000},
        "regions": [region],
    }
    read = timeline.read(write_lines(tmp_path / "f", [line]))
    walls = dict(zip(map(str, read.phases["phase"]), read.phases["wall_ns"], strict=True))
    assert walls == {"D2_quantize": 0, "gather": 1400, "route": 1400, "sum_tokens": 2000}
    table = key_figures.phase_sum(read).table
    assert table.loc[table["Phase"] == "route", "GB/s"].tolist() == [10]


def test_short_times_in_seconds_are_on_the_page():
    table = pd.DataFrame({"Total Time": [412_345.0, 2_000_000_000.0], "GB/s": [0.0001234, 12.5]})
    report = Report("r", "R", table, times=("Total Time",))
    cells = {unit: page("t", [report], [], [], [], unit) for unit in ("s", "ms", "us", "ns")}
    assert "<td>0.000412</td><td>0</td>" in cells["s"]
    assert "<td>2</td><td>12.5</td>" in cells["s"]
    assert "<td>0.412</td>" in cells["ms"]
    assert "<td>412.345</td>" in cells["us"]
    assert "<td>412,345</td>" in cells["ns"]


def times_of(**changes):
    threads = [{"thread": n, "busy_ms": 1.0, "waiting_ms": 0.5, "phases": {"D3_gemm": 1.0}} for n in (0, 3)]
    own = {"total_ms": 2.0, "groups": {"backward_down": 2.0}, "phases": {"D3_gemm": 2.0}, "threads": threads}
    return own | changes


def test_python_dicts_say_their_numbers():
    read = timeline.from_times([times_of(index=7), times_of(index=9)])
    assert read.passes["index"].tolist() == [7, 9]
    assert sorted(read.thread_waits["thread"]) == [0, 3]
    bare = times_of(threads=[{"busy_ms": 1.0}, {"busy_ms": 1.0}])
    read = timeline.from_times([bare, times_of(groups={"forward_down": 1.0}), bare])
    assert read.passes["index"].tolist() == [0, 0, 1]
    assert set(read.thread_waits["thread"]) == {0, 1, 3}


@pytest.mark.parametrize("ms", [1e300, 1e305, -1e300, 10**400, float("nan")])
def test_python_dicts_with_times_that_are_none(ms):
    with pytest.raises(TimelineError, match=r"^not what last_backward_times\(\) returns: "):
        timeline.from_times([times_of(), times_of(total_ms=ms)])


@pytest.mark.parametrize("key", ["bytes", "flop"])
@pytest.mark.parametrize("value", ["many", [1], None, True, 10**400])
def test_amounts_of_a_trace_that_are_none(tmp_path, key, value):
    """The event counts; that it has no such number is all that is lost."""
    event = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    other = "flop" if key == "bytes" else "bytes"
    path = tmp_path / "f"
    path.write_text(json.dumps([event | {"args": {key: value, other: 5}}]))
    read = timeline.read(path)
    assert not read.notes
    assert read.ranges[key].isna().all()
    assert read.ranges[other].tolist() == [5]
