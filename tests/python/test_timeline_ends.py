"""Recordings that end before their end: packed files that are cut off or damaged, limits that were reached."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

import timelines
from amx_sft_moe import timeline
from amx_sft_moe.timeline import Bounds, TimelineError
from timelines import passes_of, read_or_message, write_lines, write_trace

pd = pytest.importorskip("pandas")

WRITERS = {
    "lines": write_lines,
    "text": lambda path, records: path.write_text("".join(map(timelines.text_dump, records))),
    "trace": write_trace,
    "object": lambda path, records: write_trace(path, records, "object"),
}
END_MARKS = {
    "lines": '{"format":"amx_sft_moe.end/1","limit_bytes":100000}\n',
    "text": "[TIMER] ended: the file reached its 100000 bytes\n",
    "trace": '{"ph":"i","s":"g","name":"amx_sft_moe trace ended","pid":0,"tid":0,"ts":0,"args":{}},\n',
}


class TestPacked:
    """Packed files are used as far as they can be unpacked."""

    @pytest.fixture(params=list(WRITERS))
    def content(self, request, tmp_path):
        """Of 40 passes, which differ enough for a packed file of some size."""
        WRITERS[request.param](tmp_path / "f", passes_of(20))
        return (tmp_path / "f").read_bytes()

    def read(self, path: Path, packed: bytes) -> timeline.Timeline:
        path.write_bytes(packed)
        return timeline.read(path)

    def test_whole(self, content, tmp_path):
        read = self.read(tmp_path / "f.gz", gzip.compress(content))
        assert len(read.passes) == 40
        assert not any("packed" in note for note in read.notes)

    @pytest.mark.parametrize("part", [0.3, 0.9])
    def test_cut(self, content, tmp_path, part):
        packed = gzip.compress(content)
        read = self.read(tmp_path / "f.gz", packed[: int(part * len(packed))])
        assert 40 * part - 7 < len(read.passes) < 40
        assert any("the packed file ends early; what was read up to there is used" in n for n in read.notes)
        assert not any("ends before" in note for note in read.notes)

    def test_damaged(self, content, tmp_path):
        """Deflate's error comes with the block in which it is; a few kilobytes before it are lost."""
        packed = gzip.compress(content)
        middle = len(packed) * 3 // 4
        read = self.read(tmp_path / "f.gz", packed[:middle] + b"\xff" * 300 + packed[middle + 300 :])
        assert 15 < len(read.passes) <= 40
        assert any("the packed file is damaged (" in note for note in read.notes)

    def test_wrong_sum(self, content, tmp_path):
        packed = gzip.compress(content)
        read = self.read(tmp_path / "f.gz", packed[:-8] + bytes(4) + packed[-4:])
        assert len(read.passes) == 40
        assert any("the packed file is damaged (CRC check failed" in note for note in read.notes)

    def test_random_damage_never_ends_in_a_traceback(self, content, tmp_path):
        path = tmp_path / "f.gz"
        packed = gzip.compress(content[: len(content) // 4])
        rng = random.Random(4)
        for _ in range(25):
            damaged = bytearray(packed)
            for _ in range(rng.choice((1, 3, 30))):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            del damaged[rng.randrange(len(damaged)) :]
            path.write_bytes(damaged)
            read = read_or_message(path)
            assert isinstance(read, timeline.Timeline) or str(path) in read


class TestLimits:
    @pytest.mark.parametrize("form", list(END_MARKS))
    def test_a_recording_that_reached_its_limit_says_so(self, tmp_path, form):
        path = tmp_path / "f"
        WRITERS[form](path, passes_of(2))
        whole = timeline.read(path)
        with path.open("a") as out:
            out.write((" " * 500 + END_MARKS[form]) * 2)
        read = timeline.read(path)
        pd.testing.assert_frame_equal(read.ranges, whole.ranges)
        (note,) = [note for note in read.notes if note not in whole.notes]
        assert note.startswith(f"{path}: the recording reached its limit")

    def test_times_of_text_are_bounded(self, tmp_path):
        path = tmp_path / "f"
        long = "[FWD TIMER] forward_gather: 999999999999 ms\n[FWD TIMER] forward_down: 999999999999 ms\n"
        path.write_text(long * 9 + "".join(map(timelines.text_dump, passes_of(1))))
        read = timeline.read(path)
        assert len(read.passes) == 2 + 1  # a pass as long fits once
        assert read.passes["end_ns"].max() < 1 << 61
        assert "8 passes could not be used: their times are too long" in read.notes[0]

    @pytest.mark.parametrize("part", [0.3, 0.55, 0.999])
    def test_passes_beyond_the_bound_of_a_trace_are_left_out(self, tmp_path, part):
        path = write_trace(tmp_path / "f", passes_of(5))
        whole = timeline.read(path)
        read = timeline.read(path, bounds=Bounds(ranges=int(part * len(whole.ranges))))
        count = len(read.passes)
        assert 10 * part - 2 < count < 10
        pd.testing.assert_frame_equal(read.passes, whole.passes[:count])
        for ours, all_of_it in ((read.phases, whole.phases), (read.waits, whole.waits)):
            expected = all_of_it[all_of_it["pass"] < count].reset_index(drop=True)
            pd.testing.assert_frame_equal(ours, expected, check_categorical=False)
        assert read.notes[-1] == (
            f"{path}: {10 - count} of 10 passes were not over when the first range began that was left out; "
            "nothing is said about them"
        )
        assert set(read.ranges["step"]) == {*range(count), -1}

    def test_no_pass_within_the_bound(self, tmp_path):
        read = timeline.read(write_trace(tmp_path / "f", passes_of(2)), bounds=Bounds(ranges=20))
        assert len(read.ranges) == 20
        assert not len(read.passes)
        assert not len(read.phases)
        assert "4 of 4 passes" in read.notes[-1]

    def test_counters_beyond_the_bound_are_left_out(self, tmp_path):
        path = write_trace(tmp_path / "f", passes_of(2))
        whole = timeline.read(path)
        assert len(whole.counters) == 20
        read = timeline.read(path, bounds=Bounds(ranges=60))
        assert len(read.counters) == 15
        assert any("5 events of counters beyond a quarter of the bound of 60 ranges" in n for n in read.notes)

    def test_lines_beyond_the_bound_count(self, tmp_path):
        path = write_lines(tmp_path / "f", passes_of(5))
        whole, read = timeline.read(path), timeline.read(path, bounds=Bounds(ranges=20))
        pd.testing.assert_frame_equal(read.phases, whole.phases)
        assert len(read.notes) == 1

    def test_the_order_of_a_file_does_not_matter(self, tmp_path):
        """Passes of an export, of which a range in the first pass comes last."""
        rows = [(i * 100, i * 100 + 90, 59, f"ProfilerStep#{i}", 5, None, 0) for i in range(4)]
        rows.append((210, 220, 59, "inside", 5, None, 0))
        path = timelines.write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {})
        assert timeline.read(path, bounds=Bounds(ranges=4)).passes["index"].tolist() == [0, 1]
        assert timeline.read(path).passes["index"].tolist() == [0, 1, 2, 3]

    def test_bounds_keep_something(self):
        with pytest.raises(TimelineError, match=r"^ranges: expected 1 or more, got 0$"):
            Bounds(ranges=0)
