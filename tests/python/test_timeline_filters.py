"""Reading part of a timeline, and files that are none of ours."""

from __future__ import annotations

import json
import os

import pytest

from amx_sft_moe import timeline
from amx_sft_moe.timeline import Filters, TimelineError
from amx_sft_moe.timeline.filters import parse_name, parse_threads, parse_time, parse_window
from timelines import (
    NVTX,
    STRINGS,
    global_tid,
    passes_of,
    read_or_message,
    text_dump,
    write_lines,
    write_nsys,
    write_trace,
)

pd = pytest.importorskip("pandas")


class TestFilters:
    @pytest.fixture
    def path(self, tmp_path):
        return write_lines(tmp_path / "f", passes_of(5))

    def test_name(self, path):
        read = timeline.read(path, Filters(name=parse_name("^D3|gemm$")))
        assert set(map(str, read.ranges["name"])) == {"D3_gemm"}
        assert set(map(str, read.phases["phase"])) == {"D3_gemm"}

    @pytest.mark.parametrize("form", ["lines", "dump"])
    def test_a_name_that_no_phase_has(self, path, form):
        """What each pass said of its waiting stays, and groups do not become phases."""
        if form == "dump":
            path.write_text("".join(map(text_dump, passes_of(5))))
        whole = timeline.read(path)
        read = timeline.read(path, Filters(name=parse_name("^forward$")))
        assert set(map(str, read.ranges["kind"])) == {"step"}
        assert not len(read.phases)
        pd.testing.assert_frame_equal(read.waits, whole.waits)
        pd.testing.assert_frame_equal(read.thread_waits, whole.thread_waits)

    def test_thread(self, path):
        read = timeline.read(path, Filters(threads=parse_threads("1-2, 7")))
        assert set(read.ranges["thread"]) == {1, 2}
        assert set(read.thread_waits["thread"]) == {1, 2}

    @pytest.mark.parametrize("threads", ["0", "1-2", "7"])
    def test_threads_of_a_trace(self, path, tmp_path, threads):
        """Phases and what is serial are matters of the whole team, as in JSON lines."""
        filters = Filters(threads=parse_threads(threads))
        trace = write_trace(tmp_path / "g", passes_of(5))
        lines, read = timeline.read(path, filters), timeline.read(trace, filters)
        assert set(read.ranges["thread"]) == filters.threads & {0, 1, 2}
        assert len(read.ranges[read.ranges["kind"] != "member"]) == len(lines.ranges)
        pd.testing.assert_frame_equal(read.phases, timeline.read(trace).phases)
        assert set(read.thread_waits["thread"]) == set(lines.thread_waits["thread"])
        ours, theirs = (
            t.waits.astype({"group": str}).set_index(["pass", "group"]).sort_index() for t in (lines, read)
        )
        pd.testing.assert_frame_equal(ours[["thread_ns", "serial_ns"]], theirs[["thread_ns", "serial_ns"]])
        assert (ours["wait_ns"] - theirs["wait_ns"]).abs().max() < 1000

    def test_threads_of_an_export(self, tmp_path):
        rows = [
            (start, end, 59, name, global_tid(1, thread), None, 1)
            for name, start, end, thread in (
                ("backward_down", 0, 100, 1),
                ("D3_gemm", 0, 100, 1),
                ("D3_gemm", 0, 60, 2),
            )
        ]
        rows.append((0, None, 75, "amx_sft_moe", global_tid(1, 1), None, 1))
        path = write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {})
        read = timeline.read(path, Filters(threads=frozenset([2])))
        assert [str(name) for name in read.ranges["name"]] == ["D3_gemm"]
        assert read.phases[["wall_ns", "busy_ns"]].to_numpy().tolist() == [[100, 160]]
        assert read.waits[["wait_ns", "thread_ns", "serial_ns"]].to_numpy().tolist() == [[40, 100, 0]]

    def test_time_counts_from_the_first_range(self, path):
        everything = timeline.read(path)
        origin = everything.ranges["begin_ns"].min()
        begin, end = parse_window("30ms/0.1s")
        read = timeline.read(path, Filters(begin=begin, end=end))
        inside = (everything.ranges["end_ns"] - origin >= 30e6) & (
            everything.ranges["begin_ns"] - origin <= 1e8
        )
        assert len(read.ranges) == inside.sum() > 0
        assert 0 < len(read.passes) < 10

    def test_time_of_an_export_counts_from_its_first_row(self, tmp_path):
        rows = {"NVTX_EVENTS": [(50, 60, 59, "late", 5, None, 0), (10, 20, 59, "early", 5, None, 0)]}
        read = timeline.read(write_nsys(tmp_path / "f", rows, {}), Filters(begin=15))
        assert [str(name) for name in read.ranges["name"]] == ["late"]

    def test_time_of_lines_counts_from_the_earliest_begin(self, tmp_path):
        """They come in the order in which passes end: here one of another thread lies within the first."""
        lines = [
            {"step": "forward", "begin_ns": begin, "end_ns": end, "name": name}
            for name, begin, end in (("inner", 2000, 3000), ("outer", 1000, 9000), ("later", 9500, 9900))
        ]
        path = write_lines(tmp_path / "f", lines)
        for window, expected in (("0/500", ["outer"]), ("/1000", ["inner", "outer"]), ("8500/", ["later"])):
            begin, end = parse_window(window)
            assert list(timeline.read(path, Filters(begin=begin, end=end)).passes["layer"]) == expected

    @pytest.mark.parametrize("form", ["BE", "X"])
    def test_time_of_a_trace_counts_from_the_earliest_begin(self, tmp_path, form):
        """Counters are none, ranges that contain others end after them, and some writers sort by end."""
        events = [{"ph": "C", "name": "count", "pid": 1, "ts": 0.5, "args": {"value": 1}}]
        if form == "BE":
            for kind, name, ts in (("B", "outer", 1), ("B", "inner", 2), ("E", "inner", 3), ("E", "outer", 9)):
                events.append({"ph": kind, "name": name, "pid": 1, "tid": 1, "ts": ts})
        else:
            for name, ts, dur in (("inner", 2, 1), ("outer", 1, 8)):
                events.append({"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur})
        events.append({"ph": "C", "name": "count", "pid": 1, "ts": 1.25, "args": {"value": 2}})
        path = tmp_path / "f"
        path.write_text(json.dumps(events))
        read = timeline.read(path, Filters(begin=0, end=500))
        assert list(read.ranges["name"]) == ["outer"]
        assert read.counters["value"].tolist() == [2]

    def test_nothing_left_says_so(self, path):
        with pytest.raises(TimelineError, match="nothing of it passes the filters"):
            timeline.read(path, Filters(begin=10**12))

    @pytest.mark.parametrize("text", ["", "1", "1/2/3", "x/2", "5/1", "1m/2m", "2s/1s"])
    def test_windows_that_are_none(self, text):
        with pytest.raises(TimelineError):
            parse_window(text)

    @pytest.mark.parametrize("text", ["1e999s", "1e300s"])
    def test_times_are_finite(self, text):
        assert parse_time("1e290s") > 0
        with pytest.raises(TimelineError, match=f"^expected a finite time, got '{text}'$"):
            parse_window(f"{text}/")

    @pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "0-99999999"])
    def test_threads_that_are_none(self, text):
        with pytest.raises(TimelineError):
            parse_threads(text)


class TestLogs:
    """What was recorded, among the lines of a log, however late it comes."""

    @pytest.mark.parametrize(
        "line",
        [
            "step 1 of 9: loss 2.5",
            "[INFO] begins",
            "{'loss': 2.5}",
            '{"loss": 2.5}',
            '[{"a": 1}]',
            "." * 99_999,
        ],
    )
    @pytest.mark.parametrize("form", ["JSON lines", "text dump"])
    def test_behind_many_lines(self, tmp_path, line, form):
        path = write_lines(tmp_path / "f", passes_of(2))
        if form == "text dump":
            path.write_text("".join(map(text_dump, passes_of(2))))
        recorded, alone = path.read_bytes(), timeline.read(path)
        path.write_bytes((line + "\n").encode() * (200_000 // len(line)) + recorded)
        read = timeline.read(path)
        assert read.sources[0].form == form
        pd.testing.assert_frame_equal(read.phases, alone.phases)

    def test_many_blank_lines(self, tmp_path):
        """In a time that grows with them, not with their square."""
        path = write_lines(tmp_path / "f", passes_of(2))
        path.write_bytes(b"a log\n" + b"\n" * 1_000_000 + path.read_bytes())
        assert len(timeline.read(path).passes) == 4


class TestForeignFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            (b" \n\n", "is empty"),
            (b"\x00\x01\x02" * 100, "none of the formats"),
            (b"loss 1.5\n" * 10, "none of the formats"),
            (b"\x89PNG\r\n\x1a\n" + bytes(50), "none of the formats"),
            (b"{}", "without traceEvents"),
            (b'{"a": 1, "b": [1, 2]}', "without traceEvents"),
            (b'{"loss": 1.5}\n{"loss": 1.4}\n', "without traceEvents"),
            (b'{"traceEvents": []}', "holds no ranges"),
            (b"[]", "holds no ranges"),
            (b"[1, 2, 3]", "holds no ranges"),
            (b'{"traceEvents": 5}', "expected an array under traceEvents, got 5: no Chrome trace"),
            (b'{"traceEvents": {"a": 1}, "b": 2}', 'under traceEvents, got {"a": 1}: no Chrome'),
            (b'{"a": ', "broken before its traceEvents"),
            (b"{broken", "broken before its traceEvents"),
            (b"\x1f\x8b\x08\x00nonsense", "cannot be unpacked"),
            (b"NVIDIA Tegra Profiler Report 1.0", "nsys export --type sqlite"),
            (b"SQLite format 3\x00" + bytes(200), "SQLite"),
            ('{"a": 1}'.encode("utf-16"), "none of the formats"),
            (b'{"step":"forward"}\n', "could not be used"),
            # A recording whose first step is beyond its limit.
            (b" " * 70_000 + b'{"format":"amx_sft_moe.end/1","limit_bytes":70049}\n', "reached its limit"),
            (b" " * 70_000 + b"[TIMER] ended: the file reached its 70042 bytes\n", "reached its limit"),
        ],
    )
    def test_a_message_says_what_it_is(self, tmp_path, content, message):
        path = tmp_path / "file.bin"
        path.write_bytes(content)
        with pytest.raises(TimelineError, match=message) as raised:
            timeline.read(path)
        assert str(path) in str(raised.value)

    def test_missing_files_and_folders(self, tmp_path):
        with pytest.raises(TimelineError, match="cannot read"):
            timeline.read(tmp_path / "nowhere")
        with pytest.raises(TimelineError, match="is a folder"):
            timeline.read(tmp_path)
        with pytest.raises(TimelineError, match="no file was given"):
            timeline.read([])

    def test_what_is_no_regular_file(self, tmp_path):
        """A file is opened several times; of a pipe that would lose the beginning."""
        content = write_lines(tmp_path / "f", passes_of(1)).read_bytes()
        read_end, write_end = os.pipe()
        os.write(write_end, content)
        os.close(write_end)
        path = f"/dev/fd/{read_end}"  # what a shell's <(...) gives
        with pytest.raises(TimelineError, match=f"^{path}: expected a regular file, got a pipe$"):
            timeline.read(path)
        assert os.read(read_end, len(content)) == content
        os.close(read_end)
        with pytest.raises(TimelineError, match="expected a regular file, got a character device"):
            timeline.read(os.devnull)

    def test_dicts_of_something_else(self):
        with pytest.raises(TimelineError, match="last_backward_times"):
            timeline.from_times([{"loss": 1.0}])
        with pytest.raises(TimelineError, match="no pass"):
            timeline.from_times([{}])

    @pytest.mark.parametrize("form", ["lines", "trace", "nsys"])
    def test_random_damage_never_ends_in_a_traceback(self, tmp_path, form):
        import random

        path = tmp_path / "f"
        if form == "lines":
            write_lines(path, passes_of(1, threads=2))
        elif form == "trace":
            write_trace(path, passes_of(1, threads=2), "object")
        else:
            write_nsys(path, {"NVTX_EVENTS": NVTX * 30}, STRINGS)
        content = path.read_bytes()
        rng = random.Random(3)
        for _ in range(60):
            damaged = bytearray(content)
            for _ in range(rng.choice((1, 3, 30))):
                damaged[rng.randrange(len(damaged))] = rng.choice(b'{}[],":0x\x00\xff')
            if rng.random() < 0.3:
                del damaged[rng.randrange(len(damaged)) :]
            path.write_bytes(damaged)
            read = read_or_message(path)
            assert isinstance(read, timeline.Timeline) or str(path) in read
