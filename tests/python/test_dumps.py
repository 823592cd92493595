"""Dumps of steps: text, JSON lines, Chrome traces and the dict say the same; files are bounded, whole, shared
by operators and threads, and readable after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from amx_sft_moe.kernels import load_onednn
from cases import Sizes
from reference import make_layer, run

SIZES = Sizes(experts=6, hidden=64, intermediate=48, ranks=(4, 8, 4), tokens=40)
KEYS = (
    "format step index name kernel pid caller operator tokens routed_rows threads begin_ns end_ns total_ms "
    "sync_points phases_ms groups_ms phases_flop phases_bytes regions"
)


def events_of(path: Path) -> list[dict[str, Any]]:
    """A trace is an array without its end; what was cut off inside of an event is not there."""
    text = path.read_text()
    return json.loads(text[: text.rindex("},\n") + 1] + "]")


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in events_of(path) if event.get("cat") == "step"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """JSON lines and a trace of every operator made from now on."""
    paths = {"json": tmp_path / "steps.jsonl", "trace": tmp_path / "trace.json"}
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "json")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", str(paths["json"]))
    monkeypatch.setenv("AMX_SFT_MOE_TRACE", str(paths["trace"]))
    return paths


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def busy_by_phase(line: dict[str, Any]) -> Counter[tuple[int, str]]:
    busy: Counter[tuple[int, str]] = Counter()
    for region in line["regions"]:
        for thread in region["threads"]:
            for phase, ns in thread["busy_ns"].items():
                busy[thread["thread"], phase] += ns
    return busy


def test_the_schema_of_a_line(files: dict[str, Path]) -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(num_threads=2, name="layers.3")
    for _ in range(2):
        run(op, layer)
    lines = lines_of(files["json"])
    assert [(line["step"], line["index"]) for line in lines] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
    ]
    for line in lines:
        assert list(line) == KEYS.split()
        assert line["format"] == "amx_sft_moe.step/1"
        assert (line["name"], line["kernel"], line["pid"]) == ("layers.3", op.kernel, os.getpid())
        assert (line["tokens"], line["routed_rows"], line["threads"]) == (40, 80, 2)
        assert line["operator"] == lines[0]["operator"] >= 1
        assert set(line["phases_ms"]) == set(line["phases_flop"]) == set(line["phases_bytes"])
        assert line["sync_points"] == sum(region["parallel"] for region in line["regions"])
        end = line["begin_ns"]
        for region in line["regions"]:
            assert list(region) == ["group", "begin_ns", "end_ns", "parallel", "threads"]
            assert region["begin_ns"] == end
            assert region["group"] in line["groups_ms"]
            end = region["end_ns"]
            for thread in region["threads"]:
                assert list(thread) == ["thread", "begin_ns", "end_ns", "busy_ns", "spans", "spans_dropped"]
                spans = thread["spans"]
                assert [thread["begin_ns"], *(span[2] for span in spans)] == [
                    *(span[1] for span in spans),
                    thread["end_ns"],
                ]
                assert all(tasks >= 1 for *_, tasks in spans)
                assert all(a[0] != b[0] for a, b in pairwise(spans)), "not merged"
                assert thread["spans_dropped"] == 0
        assert end <= line["end_ns"]


def test_json_trace_and_dict_agree(files: dict[str, Path]) -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(num_threads=2)
    run(op, layer)
    for line, times in zip(
        lines_of(files["json"]), (op.last_forward_times(), op.last_backward_times()), strict=True
    ):
        assert (line["begin_ns"], line["end_ns"]) == (times["begin_ns"], times["end_ns"])
        assert line["phases_flop"] == times["flop"]
        assert line["phases_bytes"] == times["bytes"]
        for written, kept in ((line["phases_ms"], times["phases"]), (line["groups_ms"], times["groups"])):
            assert written == {name: pytest.approx(ms, abs=5.1e-4) for name, ms in kept.items()}
        spans = [
            (thread["thread"], *span)
            for region in line["regions"]
            for thread in region["threads"]
            for span in thread["spans"]
        ]
        of_dict = [(thread["thread"], *span) for thread in times["threads"] for span in thread["spans"]]
        assert sorted(spans) == sorted(of_dict)
        slices = [
            event
            for event in events_of(files["trace"])
            if event["ph"] == "X" and times["begin_ns"] <= round(event["ts"] * 1e3) < times["end_ns"]
        ]
        assert slices[0]["args"]["flop"] == sum(
            flop for name, flop in times["flop"].items() if times["kinds"][name] != "total"
        )
        of_trace = [
            (event["tid"], event["name"], round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3))
            for event in slices
            if event["cat"] == "phase"
        ]
        assert sorted(of_trace) == sorted((thread, *span[:3]) for thread, *span in spans)
        for (thread, phase), ns in busy_by_phase(line).items():
            assert ns == sum(end - begin for t, name, begin, end in of_trace if (t, name) == (thread, phase))
        # The parts of the work that spans have sum to the whole.
        for key in ("flop", "bytes"):
            parts = Counter({event["name"]: 0 for event in slices})
            for event in slices:
                parts[event["name"]] += event["args"][key] if event["cat"] == "phase" else 0
            for phase, whole in times[key].items():
                if times["phases"][phase] > 0 and times["kinds"][phase] != "total":
                    assert parts[phase] == pytest.approx(whole, abs=len(slices))


def test_text_and_dict_agree_on_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "text")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", str(tmp_path / "text"))
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = ""
    for _ in range(2):
        run(op, layer)
        expected += op.dump_times()
    assert (tmp_path / "text").read_text() == expected
    assert all(not thread["spans"] for thread in op.last_backward_times()["threads"]), "nobody asked for spans"


def test_spans_where_they_are_asked_for() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(record_spans=True, num_threads=2)
    run(op, layer)
    for times in (op.last_forward_times(), op.last_backward_times()):
        for thread in times["threads"]:
            busy: Counter[str] = Counter()
            tasks: Counter[str] = Counter()
            for phase, begin, end, count in thread["spans"]:
                busy[phase] += end - begin
                tasks[phase] += count
            assert {phase: ns * 1e-6 for phase, ns in busy.items()} == pytest.approx(thread["phases"])
            assert tasks == thread["tasks"]


def test_the_clock_is_pythons() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    before = time.monotonic_ns()
    run(op, layer)
    after = time.monotonic_ns()
    assert before <= op.last_forward_times()["begin_ns"] <= op.last_backward_times()["end_ns"] <= after


def test_names_and_numbers_of_operators(files: dict[str, Path]) -> None:
    layer = make_layer(SIZES)
    name = 'a "name"\n\twith \\ everything \x01 and ünïcode'
    for op in (SIZES.operator(name=name), SIZES.operator()):
        run(op, layer)
    lines = lines_of(files["json"])
    assert [line["name"] for line in lines] == [name, name, "", ""]
    assert lines[0]["operator"] == lines[1]["operator"] < lines[2]["operator"]
    steps = steps_of(files["trace"])
    assert [event["name"] for event in steps] == [f"{name} forward", f"{name} backward", "forward", "backward"]
    assert steps[0]["args"]["layer"] == name
    with pytest.raises(TypeError, match="name: expected a str, got int"):
        SIZES.operator(name=3)


def test_operators_of_all_modules_have_numbers_of_their_own(files: dict[str, Path]) -> None:
    if load_onednn()[0] is None:
        pytest.skip("kernel onednn is not there")
    layer = make_layer(SIZES)
    for kernel in ("portable", "onednn", "onednn", "portable"):
        run(SIZES.operator(kernel=kernel), layer)
    numbers = [line["operator"] for line in lines_of(files["json"])[::2]]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert [event["args"]["operator"] for event in steps_of(files["trace"])[::2]] == numbers


def test_operators_and_threads_share_files(files: dict[str, Path]) -> None:
    layer = make_layer(SIZES)
    operators = [SIZES.operator(num_threads=2, name=f"layer {n}") for n in range(4)]
    threads = [threading.Thread(target=lambda op=op: [run(op, layer) for _ in range(8)]) for op in operators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = lines_of(files["json"])
    assert Counter((line["name"], line["step"]) for line in lines) == {
        (op.name, step): 8 for op in operators for step in ("forward", "backward")
    }
    for op in operators:
        indices = [line["index"] for line in lines if (line["name"], line["step"]) == (op.name, "backward")]
        assert indices == list(range(8))
    events = events_of(files["trace"])
    tracks: dict[int, set[str]] = {}
    for event in events:
        if event.get("cat") == "group":
            tracks.setdefault(event["tid"], set()).add(event["args"]["layer"])
    assert all(len(layers) == 1 for layers in tracks.values()), "callers have tracks of their own"
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(tracks) <= named
    callers = {line["name"]: line["caller"] for line in lines}
    assert {event["args"]["layer"]: event["tid"] for event in events if event.get("cat") == "step"} == callers
    assert len(set(callers.values())) == len(operators)


def test_files_end_at_their_limit(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_TRACE_LIMIT", "0.1")
    layer = make_layer(SIZES)
    operators = [SIZES.operator(), SIZES.operator()]
    for _ in range(20):
        for op in operators:
            run(op, layer)
    assert [path.stat().st_size for path in files.values()] == [100_000, 100_000]
    lines = lines_of(files["json"])
    assert [line["format"] for line in lines].count("amx_sft_moe.end/1") == 1
    assert lines[-1] == {"format": "amx_sft_moe.end/1", "limit_bytes": 100_000}
    events = events_of(files["trace"])
    assert [event["name"] for event in events].count("amx_sft_moe trace ended") == 1
    assert (events[-1]["ph"], events[-1]["pid"]) == ("i", os.getpid())
    last = steps_of(files["trace"])[-1]
    assert last["ts"] + last["dur"] < events[-1]["ts"] <= time.monotonic_ns() / 1000


@pytest.mark.parametrize("limit", ["0", "-3", "many", "1 MB"])
def test_a_limit_that_is_none(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_TRACE_LIMIT", limit)
    with pytest.raises(
        ValueError, match=re.escape(f"AMX_SFT_MOE_TRACE_LIMIT: expected a number of MB above 0, got {limit}")
    ):
        run(SIZES.operator(), make_layer(SIZES))


_ENDLESS = """
import sys
sys.path.insert(0, {tests!r})
from test_dumps import SIZES, make_layer, run
layer, op = make_layer(SIZES), SIZES.operator(name="layers.0")
while True:
    run(op, layer)
"""


def test_files_of_a_killed_process(files: dict[str, Path]) -> None:
    script = _ENDLESS.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 120
        while not files["trace"].exists() or files["trace"].stat().st_size < 200_000:
            assert process.poll() is None
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    text = files["json"].read_text()
    whole = [json.loads(line) for line in text[: text.rindex("\n")].splitlines()]
    assert {line["pid"] for line in whole} == {process.pid}
    steps = steps_of(files["trace"])
    # Both files have every pass that ended, but for the one that the signal met.
    assert abs(len(whole) - len(steps)) <= 1
    assert [event["args"]["step"] for event in steps[::2]] == list(range(len(steps[::2])))


@pytest.mark.parametrize("cut", [0, 1, 17, 4096])
def test_files_that_a_kill_cut_off_are_gone_on_with(files: dict[str, Path], cut: int) -> None:
    layer = make_layer(SIZES)
    first = SIZES.operator(name="first")
    for _ in range(4):
        run(first, layer)
    for path in files.values():
        os.truncate(path, path.stat().st_size - cut)
    run(SIZES.operator(name="later"), layer)
    names = [line["name"] for line in lines_of(files["json"])]
    assert names[-2:] == ["later", "later"]
    assert set(names[:-2]) == {"first"}
    # A line that has lost no more than its end is whole.
    assert len(names) == 10 if cut <= 1 else 8 <= len(names) <= 9
    steps = [event["name"] for event in steps_of(files["trace"])]
    assert steps[-2:] == ["later forward", "later backward"]
    assert steps[:6] == ["first forward", "first backward"] * 3
