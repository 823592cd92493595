"""Reading timelines: the same passes from every format, and files that are broken or odd."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import timelines
from amx_sft_moe import timeline
from amx_sft_moe.timeline import Bounds, names
from timelines import (
    expected_walls,
    passes_of,
    walls,
    write_lines,
    write_trace,
)

pd = pytest.importorskip("pandas")


class TestFormatsAgree:
    """The same passes as JSON lines, as the older JSON lines, as a trace, as text, as Python dicts."""

    @pytest.fixture
    def records(self):
        return passes_of(4)

    @pytest.fixture
    def expected(self, records):
        return expected_walls(records)

    def test_json_lines(self, records, expected, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", records))
        assert walls(read) == pytest.approx(expected, abs=1)
        assert list(read.passes["total_ns"]) == [r["end_ns"] - r["begin_ns"] for r in records]
        assert read.notes == []

    def test_older_json_lines(self, records, expected, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", map(timelines.old_form, records)))
        assert walls(read) == pytest.approx(expected, abs=1)
        assert list(read.passes["total_ns"]) == pytest.approx([r["total_ms"] * 1e6 for r in records])
        assert "laid out" in read.notes[0]

    @pytest.mark.parametrize("form", ["array", "object"])
    def test_trace(self, records, expected, tmp_path, form):
        read = timeline.read(write_trace(tmp_path / "f", records, form))
        assert walls(read) == pytest.approx(expected, rel=1e-6)
        assert list(read.passes["total_ns"]) == [r["end_ns"] - r["begin_ns"] for r in records]
        assert read.notes == []

    def test_text(self, records, expected, tmp_path):
        path = tmp_path / "log"
        path.write_text("started\n" + "".join(map(timelines.text_dump, records)) + "[INFO] loss: 1.25 ms\n")
        read = timeline.read(path)
        assert walls(read) == pytest.approx(expected, abs=501)  # three decimals of a millisecond
        assert [str(step) for step in read.passes["step"]] == [r["step"] for r in records]

    def test_python_dicts(self, records, expected):
        dicts = [
            {
                "total_ms": record["total_ms"],
                "groups": record["groups_ms"],
                "phases": record["phases_ms"],
                "threads": [{"busy_ms": 3.0, "waiting_ms": 1.0, "phases": {}}],
            }
            for record in records
        ]
        read = timeline.from_times([{}, *dicts])
        table = read.phases.merge(read.passes, left_on="pass", right_index=True)
        for step in ("forward", "backward"):
            ours = table[table["step"] == step].groupby("phase", observed=True)["wall_ns"].sum()
            for phase in {phase for kind, _, phase in expected if kind == step}:
                wanted = sum(ns for (kind, _, name), ns in expected.items() if (kind, name) == (step, phase))
                assert ours[phase] == pytest.approx(wanted, rel=1e-6)

    def test_waiting_of_lines_and_trace(self, records, tmp_path):
        lines = timeline.read(write_lines(tmp_path / "f", records)).thread_waits
        trace = timeline.read(write_trace(tmp_path / "g", records)).thread_waits
        by = ["thread", "group"]
        lines, trace = (t.astype({"group": str}).set_index(by).sort_index() for t in (lines, trace))
        assert list(lines.index) == list(trace.index)
        # The trace has the end of the last span, the line that of the thread: integer shares differ by some ns.
        assert (lines["wait_ns"] - trace["wait_ns"]).abs().max() < 100
        expected = sum(
            region["end_ns"] - thread["end_ns"]
            for record in records
            for region in record["regions"]
            for thread in region["threads"]
        )
        assert lines["wait_ns"].sum() == expected

    @pytest.mark.parametrize("idle", [(1, 2, 3), (0,)])
    def test_threads_without_work_wait_too(self, records, tmp_path, idle):
        """They have a part of the region and no phases; a caller without phases has no end of its own."""
        for record in records:
            for region in record["regions"]:
                for thread in region["threads"]:
                    if region["parallel"] and thread["thread"] in idle:
                        thread.update(begin_ns=thread["end_ns"], busy_ns={}, spans=[])
        lines = timeline.read(write_lines(tmp_path / "f", records))
        trace = timeline.read(write_trace(tmp_path / "g", records))
        keys = ["pass", "group"]
        ours, theirs = (
            read.waits.astype({"group": str}).set_index(keys).sort_index() for read in (lines, trace)
        )
        assert list(ours.index) == list(theirs.index)
        for column in ("thread_ns", "serial_ns"):
            assert theirs[column].tolist() == ours[column].tolist()
        assert (ours["wait_ns"] - theirs["wait_ns"]).abs().max() < 1000
        busy = [read.thread_waits.groupby("thread")["busy_ns"].sum().to_dict() for read in (lines, trace)]
        assert busy[0] == busy[1]
        assert all((busy[0][thread] == 0) == (thread in idle) for thread in busy[0])

    def test_work_of_lines_and_trace(self, records, tmp_path):
        lines = timeline.read(write_lines(tmp_path / "f", records)).phases
        trace = timeline.read(write_trace(tmp_path / "g", records)).phases
        for amount in ("flop", "bytes"):
            ours = lines.groupby("phase", observed=True)[amount].sum()
            theirs = trace.groupby("phase", observed=True)[amount].sum()
            assert theirs.to_dict() == pytest.approx(
                ours[ours.index.isin(theirs.index)].to_dict(), rel=1e-5, abs=1
            )

    def test_files_together(self, records, tmp_path):
        read = timeline.read([write_lines(tmp_path / "f", records), write_trace(tmp_path / "g", records)])
        assert list(read.passes["source"]) == [0] * 8 + [1] * 8
        halves = read.phases[read.phases["wall_ns"] > 0].groupby(read.phases["pass"] < 8)["wall_ns"].sum()
        assert halves[True] == pytest.approx(halves[False], rel=1e-6)
        assert sorted(read.ranges["step"].unique()) == list(range(16))


def test_names_are_those_of_the_headers():
    header = Path(__file__).parents[2] / "include/amx_sft_moe/profile/phases.hpp"
    text = header.read_text()
    phases = re.findall(r'\{"([^"]+)", "[A-Z]+", PhaseGroup::k(\w+),', text)
    groups = re.findall(r'"((?:forward|backward)_\w+)"', text[text.index("kPhaseGroups{") :])
    assert groups == list(names.GROUPS)
    assert [name for name, _ in phases] == list(names.PHASES)
    for name, group in phases:
        spelled = re.sub(r"(?<!^)([A-Z])", r"_\1", group).lower()
        assert name in names.PHASES_OF_GROUPS[spelled.replace("forward_sum", "forward_sum_tokens")]


class TestJsonLines:
    def test_everything_optional_may_be_missing(self, tmp_path):
        read = timeline.read(
            write_lines(tmp_path / "f", [{"step": "forward", "begin_ns": 5, "end_ns": 9, "phases_ms": {}}])
        )
        one = read.passes.iloc[0]
        assert (one["total_ns"], one["tokens"], one["layer"], one["kernel"]) == (4, -1, "", "")

    def test_limits_come_from_the_file(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", passes_of(1)))
        assert read.limits == {"peak_gflops": 1000.0, "bandwidth_gbs": 40.0}

    def test_spans_that_were_dropped_are_laid_out_after_the_others(self, tmp_path):
        record = passes_of(1)[0]
        thread = record["regions"][2]["threads"][1]
        name, begin, end, _ = thread["spans"][0]
        thread["spans"] = [[name, begin, begin + 1000, 1]]
        thread["spans_dropped"] = 7
        read = timeline.read(write_lines(tmp_path / "f", [record]))
        mine = read.ranges[(read.ranges["thread"] == 1) & (read.ranges["name"] == name)]
        assert (mine["end_ns"] - mine["begin_ns"]).tolist() == [1000, end - begin - 1000]
        assert "laid out" in read.notes[0]

    def test_broken_lines_are_counted_and_named(self, tmp_path):
        good = json.dumps(passes_of(1)[0]).encode()
        lines = [
            good,
            b"{",
            b'{"step":"forward"}',
            b'"text"',
            b"\xff\xfe{}",
            b"",
            good.replace(b"begin_ns", b"x", 1),
            good.replace(b'"tokens": 512', b'"tokens": 1e400'),
            good[:200],
        ]
        path = tmp_path / "f"
        path.write_bytes(b"\n".join(lines))
        read = timeline.read(path)
        assert len(read.passes) == 1
        (note,) = read.notes
        assert "7 lines" in note
        assert "line 2: not JSON" in note
        assert "line 3: no 'begin_ns'" in note
        assert "line 4: expected an object, found str" in note
        assert "and 4 more" in note

    def test_a_bad_region_leaves_nothing_of_its_pass(self, tmp_path):
        bad, good = passes_of(1)
        bad["regions"][-1]["threads"][-1]["end_ns"] = "late"
        read = timeline.read(write_lines(tmp_path / "f", [bad, good]))
        assert [str(step) for step in read.passes["step"]] == ["backward"]
        assert set(read.ranges["category"]) == {"backward"}
        assert "expected a number, found str" in read.notes[0]

    def test_a_line_without_end_is_passed_over(self, tmp_path):
        path = write_lines(tmp_path / "f", passes_of(1))
        with path.open("ab") as out:
            out.write(b'{"step":"forward","name":"' + b"x" * 300_000 + b'"}\n')
            out.write(path.read_bytes().splitlines()[0] + b"\n")
        read = timeline.read(path, bounds=Bounds(record_bytes=100_000))
        assert len(read.passes) == 3
        assert "longer than 100,000 bytes" in read.notes[0]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"end_ns": 0}, "a pass ends before it begins"),
            ({"phases_ms": {"gather": -1.0}}, "a time below zero"),
            ({"regions": [{"group": "g", "begin_ns": 2, "end_ns": 1}]}, "a region ends before it begins"),
        ],
    )
    def test_times_do_not_run_backwards(self, tmp_path, change, message):
        first, second = passes_of(1)
        read = timeline.read(write_lines(tmp_path / "f", [first, second | change]))
        assert len(read.passes) == 1
        assert read.notes == [f"{tmp_path / 'f'}: 1 lines could not be used: line 2: {message}"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"busy_ns": {"a": 5, "b": -5}}, "a time below zero"),  # divided by their sum
            ({"end_ns": 1}, "a thread's part ends before it begins"),
            ({"spans": [["a", 9, 8, 1]]}, "a span ends before it begins"),
        ],
    )
    def test_times_of_threads_do_not_run_backwards(self, tmp_path, change, message):
        first, second = passes_of(1)
        second["regions"][0]["threads"][0] |= change
        read = timeline.read(write_lines(tmp_path / "f", [first, second]))
        assert len(read.passes) == 1
        assert read.notes == [f"{tmp_path / 'f'}: 1 lines could not be used: line 2: {message}"]

    def test_strange_names_are_kept(self, tmp_path):
        record = passes_of(1)[0]
        record["name"] = "läyer \u202e <b>\n"
        read = timeline.read(write_lines(tmp_path / "f", [record]))
        assert read.passes["layer"].iloc[0] == record["name"]

    def test_half_pairs_are_written_out(self, tmp_path):
        record = passes_of(1)[0]
        record["name"] = "l\ud800"
        record["regions"][0]["group"] = "g\udfff"
        read = timeline.read(write_lines(tmp_path / "f", [record]))
        assert read.passes["layer"].iloc[0] == "l\\ud800"
        assert "g\\udfff" in set(read.waits["group"])

    def test_long_names_are_cut_and_many_become_other(self, tmp_path):
        lines = [
            {"step": "forward", "begin_ns": i, "end_ns": i + 1, "name": f"{i}" + "n" * 5000, "phases_ms": {}}
            for i in range(9)
        ]
        read = timeline.read(write_lines(tmp_path / "f", lines), bounds=Bounds(names=5))
        layers = [str(layer) for layer in read.passes["layer"]]
        assert max(map(len, layers)) == 1000
        assert layers[5:] == ["(other names)"] * 4


class TestChromeTrace:
    def write(self, path: Path, events: list[dict], **rest) -> Path:
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, **rest}))
        return path

    def test_begin_and_end_events(self, tmp_path):
        events = [
            {"ph": "B", "name": "outer", "pid": 1, "tid": 2, "ts": 1.0, "args": {"flop": 5}},
            {"ph": "B", "name": "inner", "pid": 1, "tid": 2, "ts": 2.0},
            {"ph": "E", "pid": 1, "tid": 2, "ts": 3.5},
            {"ph": "E", "pid": 1, "tid": 2, "ts": 4.25},
            {"ph": "E", "pid": 1, "tid": 2, "ts": 5},
            {"ph": "B", "name": "open", "pid": 1, "tid": 2, "ts": 6},
        ]
        read = timeline.read(self.write(tmp_path / "f", events))
        found = {
            str(r.name_): (r.begin_ns, r.end_ns)
            for r in read.ranges.rename(columns={"name": "name_"}).itertuples()
        }
        assert found == {"inner": (2000, 3500), "outer": (1000, 4250)}
        assert read.ranges["flop"].max() == 5
        assert "1 events were broken" in read.notes[0]
        assert "1 ranges were begun and not ended" in read.notes[1]

    def test_asynchronous_events_are_startend(self, tmp_path):
        common = {"name": "a", "cat": "c", "pid": 1}
        events = [
            {"ph": "b", "id": "0x1", "ts": 0, **common},
            {"ph": "b", "id": "0x2", "ts": 1, **common},
            {"ph": "e", "id": "0x1", "ts": 5, **common},
            {"ph": "e", "id": "0x2", "ts": 3, **common},
        ]
        read = timeline.read(self.write(tmp_path / "f", events))
        assert set(read.ranges["kind"]) == {"startend"}
        assert sorted(read.ranges["end_ns"] - read.ranges["begin_ns"]) == [2000, 5000]

    def test_torch_categories(self, tmp_path):
        def event(category, name, tid, ts, dur, pid=9):
            return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}

        events = [
            event("user_annotation", "ProfilerStep#4", 9, 0, 100),
            event("cpu_op", "aten::mm", 9, 10, 50),
            event("kernel", "gemm", 7, 30, 40),
            event("gpu_memcpy", "Memcpy HtoD", 7, 80, 5),
            event("cuda_runtime", "cudaLaunchKernel", 9, 20, 5),
            event("Trace", "PyTorch Profiler (0)", "PyTorch Profiler", 0, 1000, pid="Spans"),
            {"ph": "s", "id": 1, "pid": 9, "tid": 9, "ts": 1, "cat": "fwdbwd", "name": "fwdbwd"},
            {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 5, "s": "g"},
            event("cpu_op", "in a named thread", "worker", 200, 5),
        ]
        read = timeline.read(self.write(tmp_path / "f", events, traceName="x.json"))
        kinds = dict(zip(map(str, read.ranges["name"]), map(str, read.ranges["kind"]), strict=True))
        assert kinds == {
            "ProfilerStep#4": "nvtx",
            "aten::mm": "range",
            "gemm": "kernel",
            "Memcpy HtoD": "copy",
            "cudaLaunchKernel": "runtime",
            "in a named thread": "range",
        }
        assert read.passes[["step", "index"]].to_numpy().tolist() == [["ProfilerStep", 4]]
        assert walls(read) == {
            ("ProfilerStep", 4, "aten::mm"): 50_000,
            ("ProfilerStep", 4, "(in no range)"): 50_000,
        }

    def test_a_crash_leaves_what_was_written(self, tmp_path):
        whole = write_trace(tmp_path / "g", passes_of(3))
        expected = timeline.read(whole)
        read = timeline.read(write_trace(tmp_path / "f", passes_of(3), "cut"))
        assert len(read.ranges) == len(expected.ranges)
        assert "ends before" in read.notes[0]

    @pytest.mark.parametrize("size", [1, 7, 64, 1000])
    def test_the_buffer_may_cut_anywhere(self, tmp_path, monkeypatch, size):
        from amx_sft_moe.timeline.readers import json_stream

        path = write_trace(tmp_path / "f", passes_of(1, threads=2), "object")
        expected = timeline.read(path)
        monkeypatch.setattr(json_stream, "_CHUNK", size)
        read = timeline.read(path)
        pd.testing.assert_frame_equal(read.ranges, expected.ranges)
        assert read.notes == []
        assert read.limits == {"peak_gflops": 1000.0, "bandwidth_gbs": 40.0}

    def test_broken_events_are_passed_over(self, tmp_path):
        good = '{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":2}'
        bad = [
            '{"ph":"X","name":a}',
            '{"ph":"X","name":"b","ts":"x","dur":1}',
            '{"ph":"X","ts":1}',
            "7",
            '{"ph":"X","name":"c","pid":1,"tid":1,"ts":1,"dur":-5}',
            '{"ph":"X","name":"d","ts":NaN,"dur":1}',
            '{"ph":"X","name":"e\\q","ts":1,"dur":1}',
        ]
        path = tmp_path / "f"
        path.write_text('{"traceEvents": [' + ", ".join(f"{good}, {one}" for one in bad) + f", {good}" + "]}")
        read = timeline.read(path)
        assert [str(name) for name in read.ranges["name"]] == ["a"] * 8
        assert f"{len(bad)} events were broken" in read.notes[0]

    @pytest.mark.parametrize("form", ["[{}]", '{{"traceEvents":[{}],"otherData":{{}}}}'])
    def test_what_stands_behind_a_trace_is_told(self, tmp_path, form):
        event = '{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":2}'
        trace = form.format(event)
        path = tmp_path / "f"
        path.write_text(trace + " \n")
        assert timeline.read(path).notes == []
        path.write_text(trace + trace)
        read = timeline.read(path)
        assert len(read.ranges) == 1
        (note,) = read.notes
        assert note.endswith("what stands behind the trace's end, another trace perhaps, was passed over")
        path.write_text(trace[: trace.index(event)] + f"{event},{event[:20]}")
        (note,) = timeline.read(path).notes  # nothing stands behind a trace that ends in an event
        assert "a crash?" in note

    def test_numbers_of_many_digits(self, tmp_path):
        good = '{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":2}'
        path = tmp_path / "f"
        digits = "1" * 5000  # more than Python converts
        path.write_text(f'[{good}, {{"ph":"X","name":"b","ts":1,"dur":1,"args":{{"x":{digits}}}}}, {good}]')
        read = timeline.read(path)
        assert [str(name) for name in read.ranges["name"]] in (["a", "a"], ["a", "b", "a"])
        path.write_text(f'{{"otherData":{{"peak_gflops":{digits[:400]}}},"traceEvents":[{good}]}}')
        assert timeline.read(path).limits == {}

    def test_names_that_are_deep(self, tmp_path):
        """The decoder of a trace may go deeper than what writes such a name out."""
        good = '{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":2}'
        path = tmp_path / "f"
        for depth in range(940, 1000):
            deep = "[" * depth + "]" * depth
            path.write_text(f'[{good}, {{"ph":"X","name":{deep},"pid":1,"tid":1,"ts":1,"dur":2}}]')
            assert "a" in set(timeline.read(path).ranges["name"])
            path.write_text(f'{{"traceEvents": {{"a": {deep}}}}}')
            with pytest.raises(timeline.TimelineError):
                timeline.read(path)

    def test_numbers_of_steps_fit(self, tmp_path):
        steps = [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": i * 9, "dur": 5}
            for i, number in enumerate((7, 10**20))
        ]
        read = timeline.read(self.write(tmp_path / "f", steps))
        assert [str(step) for step in read.passes["step"]] == ["ProfilerStep", f"ProfilerStep#{10**20}"]

    def test_deep_and_endless_values(self, tmp_path):
        good = '{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":2}'
        path = tmp_path / "f"
        path.write_text(f'[{good}, {{"ph":"X","args":{"[" * 200_000}, {good}]')
        assert len(timeline.read(path).ranges) >= 1
        path.write_text(f'[{good}, {{"ph":"X","name":"{"n" * 500_000}", {good}, {good}]')
        assert len(timeline.read(path, bounds=Bounds(record_bytes=100_000)).ranges) >= 1

    def test_two_callers_have_their_own_passes(self, tmp_path):
        first, second = passes_of(2, seed=1), passes_of(2, seed=2)
        path = tmp_path / "f"
        lines = [
            json.dumps(event)
            for records, caller in ((first, 0), (second, 77_000))
            for event in timelines.events(records, caller)
        ]
        path.write_text("[\n" + "".join(line + ",\n" for line in lines))
        read = timeline.read(path)
        assert not any("overlap" in note for note in read.notes)
        expected = [sum(timelines.wall_times(record).values()) for record in (*first, *second)]
        assert read.phases.groupby("pass")["wall_ns"].sum().tolist() == pytest.approx(expected, rel=1e-6)
