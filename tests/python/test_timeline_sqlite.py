"""Reading SQLite exports of Nsight Systems: versions, odd rows, broken files."""

from __future__ import annotations

import sqlite3

import pytest

from amx_sft_moe import timeline
from amx_sft_moe.timeline import TimelineError
from timelines import (
    NVTX,
    STRINGS,
    expected_walls,
    global_tid,
    passes_of,
    read_or_message,
    walls,
    write_nsys,
)

pd = pytest.importorskip("pandas")


class TestNsys:
    def test_nvtx(self, tmp_path):
        read = timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": NVTX}, STRINGS))
        rows = (
            read.ranges[["kind", "name", "category", "process", "thread", "begin_ns", "end_ns"]]
            .to_numpy()
            .tolist()
        )
        assert rows == [
            ["nvtx", "outer", "library", 40, 41, 100, 900],
            ["nvtx", "inner", "", 40, 41, 200, 300],
            ["nvtx", "outer", "", 40, 42, 150, 950],
            ["startend", "started", "library", 40, 41, 120, 130],
        ]
        assert any("1 rows could not be used" in note for note in read.notes)
        assert any("1 NVTX ranges were not ended" in note for note in read.notes)

    def test_os_calls_kernels_and_copies(self, tmp_path):
        tid = global_tid(40, 41)
        rows = {
            "OSRT_API": [(1, 5, 27, tid, 2), (7, 7, 31, tid, 5), (9, 8, 27, tid, 2)],
            "CUPTI_ACTIVITY_KIND_KERNEL": [(10, 30, 0, 7, tid & ~0xFFFFFF, 3, 4)],
            "CUPTI_ACTIVITY_KIND_MEMCPY": [(30, 40, 0, 7, None, 4096, 1), (40, 45, 0, 7, None, 64, 99)],
            "ThreadNames": [(5, 20, tid)],
        }
        read = timeline.read(write_nsys(tmp_path / "f", rows, STRINGS))
        assert [str(name) for name in read.ranges["name"]] == [
            "read",
            "void gemm<float>(int)",
            "[CUDA memcpy Host-to-Device]",
            "[CUDA memcpy kind 99]",
        ]
        assert read.ranges["bytes"].tolist()[2:] == [4096, 64]
        assert read.thread_label(40, 41) == "41 worker"
        assert any("1 rows could not be used" in note for note in read.notes), "one ends before it begins"

    @pytest.mark.parametrize("column", ["textId", "domainId", "text"])
    def test_columns_of_other_versions(self, tmp_path, column):
        read = timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": NVTX}, STRINGS, leave_out=[column]))
        assert len(read.ranges) == 4

    def test_our_own_ranges_become_passes(self, tmp_path):
        """Groups on the caller, phases on both threads, as the library emits them by NVTX."""
        tids, strings, rows = (
            [global_tid(40, 41), global_tid(40, 50)],
            {},
            [(0, None, 75, "amx_sft_moe", global_tid(40, 41), None, 1)],
        )
        records = passes_of(3, threads=2)
        for record in records:
            for region in record["regions"]:
                rows.append((region["begin_ns"], region["end_ns"], 59, region["group"], tids[0], None, 1))
                for thread in region["threads"]:
                    for name, begin, end, _ in thread["spans"]:
                        rows.append((begin, end, 59, name, tids[thread["thread"]], None, 1))
        read = timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, strings))
        assert walls(read) == pytest.approx(expected_walls(records), rel=1e-6)

    def test_a_path_with_odd_characters(self, tmp_path):
        folder = tmp_path / "a b%20?#"
        folder.mkdir()
        assert len(timeline.read(write_nsys(folder / "f", {"NVTX_EVENTS": NVTX}, STRINGS)).ranges) == 4
        assert [path.name for path in folder.iterdir()] == ["f"]  # nothing is written beside it

    def test_other_databases(self, tmp_path):
        path = tmp_path / "f"
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE users (id INT)")
        connection.commit()
        connection.close()
        with pytest.raises(TimelineError, match=r"no export of Nsight Systems.*tables: users"):
            timeline.read(path)

    def test_damaged_databases(self, tmp_path):
        rows = {"NVTX_EVENTS": NVTX[:4] + [(i, i + 1, 59, "x" * 50, 5, None, 0) for i in range(5000)]}
        path = write_nsys(tmp_path / "f", rows, STRINGS)
        content = path.read_bytes()
        for damaged in (
            content[:5000],
            content[: len(content) // 2],
            content[:4096] + bytes(len(content) - 4096),
        ):
            path.write_bytes(damaged)
            read = read_or_message(path)
            if isinstance(read, str):
                assert str(path) in read
            else:
                assert len(read.ranges) < 5004
                assert read.notes
