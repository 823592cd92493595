"""Sums and traces under the names of nsys, and how they are written."""

from __future__ import annotations

import csv
import io
import json
import statistics

import pytest

import timelines
from amx_sft_moe import timeline
from amx_sft_moe.timeline import TimelineError, reports
from amx_sft_moe.timeline.nesting import nest
from amx_sft_moe.timeline.output import in_unit, write
from timelines import global_tid, write_nsys

pytest.importorskip("pandas")

TID = global_tid(7, 8)
# text, start, end; the second thread has the same range once.
RANGES = [
    ("a", 0, 1000, 8),
    ("b", 100, 300, 8),
    ("c", 150, 200, 8),
    ("b", 400, 900, 8),
    ("b", 50, 60, 9),
    ("a", 2000, 2001, 8),
]


@pytest.fixture
def nested(tmp_path):
    rows = [(start, end, 59, text, global_tid(7, thread), None, 1) for text, start, end, thread in RANGES]
    rows.append((0, None, 75, "dom", TID, None, 1))
    rows.append((5, 25, 60, "s", TID, None, 0))
    calls = [(0, 10, 27, TID, 1), (10, 40, 27, TID, 1), (50, 51, 27, TID, 2)]
    kernels = [(0, 10, 0, 7, TID, 3, 4), (20, 40, 0, 7, TID, 3, 4)]
    copies = [(0, 7, 0, 7, TID, 64, 1), (8, 9, 0, 7, TID, 64, 2)]
    tables = {"NVTX_EVENTS": rows, "OSRT_API": calls, "CUPTI_ACTIVITY_KIND_KERNEL": kernels}
    strings = {1: "read", 2: "write", 3: "void f<int>()", 4: "f"}
    return timeline.read(write_nsys(tmp_path / "f", {**tables, "CUPTI_ACTIVITY_KIND_MEMCPY": copies}, strings))


def rows_of(report: reports.Report) -> list[dict]:
    return report.table.to_dict("records")


class TestSums:
    def test_pushpop_sum(self, nested):
        report = reports.nvtx_pushpop_sum(nested)
        assert list(report.table) == [
            "Time (%)", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Style", "Range",
        ]  # fmt: skip
        b = [200, 500, 10]
        expected = {
            "Time (%)": round(100 * 710 / (1001 + 710 + 50), 1),
            "Total Time": 710,
            "Instances": 3,
            "Avg": round(statistics.mean(b), 1),
            "Med": 200,
            "Min": 10,
            "Max": 500,
            "StdDev": round(statistics.stdev(b), 1),
            "Style": "PushPop",
            "Range": "dom:b",
        }
        assert [row["Range"] for row in rows_of(report)] == ["dom:a", "dom:b", "dom:c"]
        assert rows_of(report)[1] == expected

    def test_deviation_of_one_is_zero(self, nested):
        assert rows_of(reports.nvtx_pushpop_sum(nested))[2]["StdDev"] == 0.0

    def test_start_end_ranges_have_their_own_sum(self, nested):
        (row,) = rows_of(reports.nvtx_startend_sum(nested))
        assert (row["Range"], row["Total Time"], row["Style"]) == ("s", 20, "StartEnd")

    def test_os_calls_kernels_and_copies(self, nested):
        os_calls = rows_of(reports.osrt_sum(nested))
        assert [(row["Name"], row["Num Calls"], row["Total Time"]) for row in os_calls] == [
            ("read", 2, 40),
            ("write", 1, 1),
        ]
        (kernel,) = rows_of(reports.cuda_gpu_kern_sum(nested))
        assert (kernel["Name"], kernel["Instances"], kernel["Avg"]) == ("void f<int>()", 2, 15.0)
        copies = rows_of(reports.cuda_gpu_mem_time_sum(nested))
        assert [(row["Operation"], row["Count"], row["Time (%)"]) for row in copies] == [
            ("[CUDA memcpy Host-to-Device]", 1, 87.5),
            ("[CUDA memcpy Device-to-Host]", 1, 12.5),
        ]

    def test_counters(self, tmp_path):
        read = timeline.read(timelines.write_trace(tmp_path / "f", timelines.records(2, 2)))
        (row,) = rows_of(reports.counter_sum(read))
        assert (row["Counter"], row["Samples"], row["Avg"]) == ("GFLOP/s", 20, 780.0)

    def test_without_any_range_there_is_an_empty_table(self, nested):
        nested.ranges = nested.ranges.iloc[:0]
        for make in reports.NSYS_REPORTS.values():
            assert len(make(nested).table) == 0


class TestTrace:
    def test_places_in_the_stack(self, nested):
        table = reports.nvtx_pushpop_trace(nested).table
        columns = ["Start", "Duration", "DurChild", "DurNonChild", "Name", "PID", "TID", "Lvl", "NumChild"]
        assert table[columns].to_numpy().tolist() == [
            [0, 1000, 700, 300, "dom:a", 7, 8, 0, 2],
            [50, 10, 0, 10, "dom:b", 7, 9, 0, 0],
            [100, 200, 50, 150, "dom:b", 7, 8, 1, 1],
            [150, 50, 0, 50, "dom:c", 7, 8, 2, 0],
            [400, 500, 0, 500, "dom:b", 7, 8, 1, 0],
            [2000, 1, 0, 1, "dom:a", 7, 8, 0, 0],
        ]
        by_id = {row["RangeId"]: row for row in table.to_dict("records")}
        inner = next(row for row in by_id.values() if row["Name"] == "dom:c")
        parents = [by_id[int(number)]["Name"] for number in inner["RangeStack"].split(":")[1:]]
        assert parents == ["dom:a", "dom:b", "dom:c"]
        assert by_id[inner["ParentId"]]["Name"] == "dom:b"
        assert inner["NameTree"] == "----dom:c"

    def test_ranges_that_cross_do_not_nest(self, tmp_path):
        rows = [(0, 100, 59, "x", 5, None, 0), (50, 150, 59, "y", 5, None, 0), (100, 120, 59, "z", 5, None, 0)]
        table = nest(timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {})).ranges)
        assert table["level"].tolist() == [0, 0, 1]

    def test_equal_and_empty_ranges(self, tmp_path):
        rows = [(0, 100, 59, "x", 5, None, 0), (0, 100, 59, "y", 5, None, 0), (100, 100, 59, "z", 5, None, 0)]
        table = nest(timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {})).ranges)
        assert table["level"].tolist()[:2] == [0, 1]
        assert table["parent"].tolist()[:2] == [-1, 0]


class TestWriting:
    def text(self, report, form, unit="ns", rows=0):
        out = io.StringIO()
        write(report, form, unit, rows, out)
        return out.getvalue()

    @pytest.mark.parametrize(
        ("unit", "short", "divisor"),
        [("nsec", "ns", 1), ("us", "us", 1e3), ("milliseconds", "ms", 1e6), ("sec", "s", 1e9)],
    )
    def test_units(self, nested, unit, short, divisor):
        report = reports.nvtx_pushpop_sum(nested)
        table = in_unit(report, unit)
        assert f"Total Time ({short})" in table
        assert table[f"Total Time ({short})"].tolist() == [value / divisor for value in (1001, 710, 50)]
        assert table["Instances"].tolist() == [2, 3, 1]

    def test_a_unit_that_is_none(self, nested):
        with pytest.raises(TimelineError, match="expected a unit of time"):
            in_unit(reports.osrt_sum(nested), "hours")

    def test_csv_and_json_hold_the_same(self, nested):
        report = reports.nvtx_pushpop_trace(nested)
        rows = list(csv.DictReader(io.StringIO(self.text(report, "csv"))))
        objects = json.loads(self.text(report, "json"))
        assert len(rows) == len(objects) == 6
        for row, one in zip(rows, objects, strict=True):
            assert list(row) == list(one)
            assert {key: "" if value is None else str(value) for key, value in one.items()} == row

    def test_json_has_null_for_what_is_not_known(self, nested):
        assert json.loads(self.text(reports.nvtx_pushpop_trace(nested), "json"))[0]["ParentId"] is None

    def test_columns_stand_below_each_other(self, nested):
        lines = self.text(reports.nvtx_pushpop_sum(nested), "column").splitlines()
        header, rule, *rows = lines[3:]
        assert header.index("Range") == rule.rindex(" -") + 1
        assert all(row[header.index("Range") :].startswith("dom:") for row in rows)
        total = header.index("Total Time (ns)") + len("Total Time (ns)")
        assert [row[:total].split()[-1] for row in rows] == ["1,001", "710", "50"]

    def test_long_tables_say_what_is_left(self, nested):
        assert "... 4 more rows" in self.text(reports.nvtx_pushpop_trace(nested), "column", rows=2)
        assert "more rows" not in self.text(reports.nvtx_pushpop_trace(nested), "column")
