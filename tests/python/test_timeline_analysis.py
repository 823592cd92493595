"""Gaps, waiting, overlap, outliers, comparison and key figures on timelines whose answers can be worked out."""

from __future__ import annotations

import json
import math

import pytest

import timelines
from amx_sft_moe import timeline
from amx_sft_moe.timeline import TimelineError, analysis, figures, key_figures, strip
from amx_sft_moe.timeline.comparison import compare
from amx_sft_moe.timeline.nesting import nest
from amx_sft_moe.timeline.passes import inside_range, skip_first
from timelines import global_tid, write_lines, write_nsys

pd = pytest.importorskip("pandas")


def nvtx(path, ranges, kernels=(), copies=()):
    """An export from (name, start, end, thread) and (start, end) of kernels and copies."""
    rows = [(start, end, 59, name, global_tid(1, thread), None, 0) for name, start, end, thread in ranges]
    tables = {"NVTX_EVENTS": rows}
    if kernels:
        tables["CUPTI_ACTIVITY_KIND_KERNEL"] = [(b, e, 0, 7, global_tid(1, 0), 1, 1) for b, e in kernels]
    if copies:
        tables["CUPTI_ACTIVITY_KIND_MEMCPY"] = [(b, e, 0, 8, global_tid(1, 0), 64, 1) for b, e in copies]
    return timeline.read(write_nsys(path, tables, {1: "kernel"}))


def step(kind="forward", begin=0, phases=None, index=0, **more):
    """One line with phases in ms and nothing else."""
    phases = phases or {"D3_gemm": 1.0}
    end = begin + round(sum(phases.values()) * 1e6)
    return {"step": kind, "index": index, "begin_ns": begin, "end_ns": end, "phases_ms": phases, **more}


class TestGaps:
    def test_between_ranges_of_a_thread(self, tmp_path):
        read = nvtx(
            tmp_path / "f",
            [("a", 0, 100, 1), ("in a", 10, 20, 1), ("b", 150, 160, 1), ("c", 160, 170, 1), ("d", 500, 501, 2)],
        )
        (row,) = analysis.gaps(read).table.to_dict("records")
        assert {key: row[key] for key in ("Start", "Duration", "TID", "After", "Before")} == {
            "Start": 100, "Duration": 50, "TID": 1, "After": "a", "Before": "b",
        }  # fmt: skip
        (total,) = analysis.gap_sum(read).table.to_dict("records")
        assert (total["Between"], total["Gaps"], total["Total Time"]) == ("a -> b", 1, 50)


class TestFilesOfTwoMachines:
    """Their processes have the same numbers and nothing to do with each other."""

    @pytest.fixture
    def files(self, tmp_path):
        later = timelines.passes_of(1, seed=2)
        for record in later:
            for part in (record, *record["regions"], *(t for r in record["regions"] for t in r["threads"])):
                part["begin_ns"] += 10**9
                part["end_ns"] += 10**9
        return [
            write_lines(tmp_path / f"{number}", records)
            for number, records in enumerate((timelines.passes_of(1, spans=False), later))
        ]

    @pytest.fixture
    def together(self, files):
        return timeline.read(files)

    def test_gaps(self, files, together):
        apart = [analysis.gaps(timeline.read(path)).table["Duration"] for path in files]
        table = analysis.gaps(together).table
        assert sorted(table["Duration"]) == sorted(pd.concat(apart))
        assert set(table["File"]) == {str(path) for path in files}

    def test_waiting_by_thread(self, files, together):
        apart = [analysis.waiting_by_thread(timeline.read(path)).table for path in files]
        table = analysis.waiting_by_thread(together).table
        pd.testing.assert_frame_equal(table.drop(columns="File"), pd.concat(apart, ignore_index=True))
        assert table["File"].tolist() == [str(path) for path in files for _ in range(3)]

    def test_nesting_overlap_and_ranges_inside(self, files):
        both = timeline.read([files[0], files[0]])
        one = timeline.read(files[0])
        pair = ("forward_down", "gemm\\(down")
        times = [analysis.overlap(read, *pair).table["Time"] for read in (one, both)]
        assert (times[0] * 2).tolist() == times[1].tolist()
        assert nest(both.ranges)["level"].max() == nest(one.ranges)["level"].max()
        inside_range(both, "forward/0")
        assert set(both.ranges["source"]) == {0}

    def test_names_of_threads(self, tmp_path):
        paths = []
        for name in ("first", "second"):
            events = [
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": name}},
                {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5},
            ]
            paths.append(tmp_path / name)
            paths[-1].write_text(json.dumps(events))
        read = timeline.read(paths)
        assert [read.thread_label(1, 1, source) for source in (0, 1)] == ["first", "second"]
        pytest.importorskip("matplotlib")
        (panel,) = strip.strip(read, True).subfigs
        assert [label.get_text() for label in panel.axes[0].get_yticklabels()] == [
            "file 1: first", "file 2: second",
        ]  # fmt: skip


class TestWaiting:
    def record(self):
        def thread(number, end):
            return {"thread": number, "begin_ns": 10, "end_ns": end, "busy_ns": {"D3_gemm": end - 10}}

        regions = [
            {
                "group": "backward_down",
                "begin_ns": 0,
                "end_ns": 110,
                "parallel": True,
                "threads": [thread(0, 110), thread(1, 60)],
            },
            {
                "group": "backward_down",
                "begin_ns": 110,
                "end_ns": 200,
                "parallel": False,
                "threads": [thread(0, 190)],
            },
        ]
        return {"step": "backward", "begin_ns": 0, "end_ns": 200, "regions": regions}

    def test_by_group(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", [self.record()]))
        (row,) = analysis.waiting_sum(read).table.to_dict("records")
        assert (row["Waiting"], row["Thread Time"], row["Serial"]) == (50, 220, 90)
        assert row["Waiting (%)"] == round(100 * 50 / 220, 1)
        assert row["Late start (%)"] == round(100 * 20 / 220, 1)
        assert analysis.waiting_share(read) == pytest.approx(50 / 220)

    def test_by_thread(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", [self.record()]))
        table = analysis.waiting_by_thread(read).table
        assert table[["TID", "Busy", "Waiting", "Regions"]].to_numpy().tolist() == [
            [0, 100, 0, 110],
            [1, 50, 50, 110],
        ]

    def test_of_chosen_threads_and_passes(self, tmp_path):
        path = write_lines(tmp_path / "f", [self.record(), self.record() | {"begin_ns": 300, "end_ns": 500}])
        read = timeline.read(path, timeline.Filters(threads=frozenset([1])))
        (row,) = analysis.waiting_sum(read).table.to_dict("records")
        assert (row["Waiting"], row["Thread Time"], row["Late start (%)"]) == (
            100,
            220,
            round(100 * 20 / 220, 1),
        )
        read = timeline.read(path)
        skip_first(read, 1)
        (row,) = analysis.waiting_sum(read).table.to_dict("records")
        assert (row["Waiting"], row["Thread Time"]) == (50, 220)
        assert math.isnan(row["Late start (%)"])
        assert analysis.waiting_by_thread(read).table.empty


class TestOverlap:
    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [
            ([(0, 100)], [(50, 150)], 50),
            ([(0, 100)], [(100, 150)], 0),
            ([(0, 100), (50, 120)], [(90, 130), (95, 96)], 30),
            ([(0, 10), (20, 30), (40, 50)], [(5, 45)], 5 + 10 + 5),
            ([(0, 10)], [(20, 30)], 0),
        ],
    )
    def test_of_unions(self, tmp_path, first, second, expected):
        read = nvtx(tmp_path / "f", [("x", 0, 1, 1)], first, second)
        table = analysis.overlap(read, "kind:kernel", "kind:copy").table
        covered = {t for b, e in first for t in range(b, e)}
        assert table["Overlapped"].tolist() == [expected, expected]
        assert table["Time"].iloc[0] == len(covered)
        assert table["Overlap (%)"].iloc[0] == pytest.approx(100 * expected / len(covered), abs=0.06)

    def test_against_counting(self, tmp_path):
        import random

        rng = random.Random(4)
        for trial in range(20):
            spans = [
                [(b, b + rng.randrange(1, 30)) for b in (rng.randrange(300) for _ in range(15))] for _ in "ab"
            ]
            read = nvtx(tmp_path / f"{trial}", [("x", 0, 1, 1)], *spans)
            one, two = ({t for b, e in part for t in range(b, e)} for part in spans)
            assert analysis.overlap(read, "kernel", "memcpy").table["Overlapped"].iloc[0] == len(one & two)

    def test_processes_do_not_overlap_each_other(self, tmp_path):
        rows = [(0, 100, 59, "a", global_tid(1, 1), None, 0), (0, 100, 59, "b", global_tid(2, 1), None, 0)]
        read = timeline.read(write_nsys(tmp_path / "f", {"NVTX_EVENTS": rows}, {}))
        assert analysis.overlap(read, "^a$", "^b$").table["Overlapped"].sum() == 0

    def test_of_nothing_is_not_known(self, tmp_path):
        table = analysis.overlap(nvtx(tmp_path / "f", [("a", 0, 1, 1)]), "a", "nothing").table
        assert table["Overlap (%)"].iloc[0] == 0.0
        assert math.isnan(table["Overlap (%)"].iloc[1])


class TestOutliers:
    def test_the_slow_step_and_its_phase(self, tmp_path):
        lines = [
            step(begin=i * 10**9, index=i, phases={"D3_gemm": 5.0 + 0.01 * (i % 3), "D4_lora_grad": 1.0})
            for i in range(20)
        ]
        lines[13] = step(begin=13 * 10**9, index=13, phases={"D3_gemm": 5.2, "D4_lora_grad": 4.0})
        report = analysis.outliers(timeline.read(write_lines(tmp_path / "f", lines)))
        (row,) = report.table.to_dict("records")
        assert (row["Index"], row["Phase"], row["Phase Change"]) == (13, "D4_lora_grad", pytest.approx(3e6))
        assert row["Ratio"] == round(9.2 / 6.01, 2)

    def test_few_steps_are_not_judged(self, tmp_path):
        lines = [step(begin=i * 10**9, phases={"a": 1.0 + 9 * (i == 2)}) for i in range(4)]
        report = analysis.outliers(timeline.read(write_lines(tmp_path / "f", lines)))
        assert report.table.empty
        assert "fewer than 5 passes" in report.note

    def test_equal_steps_have_none(self, tmp_path):
        lines = [step(begin=i * 10**9) for i in range(9)]
        assert analysis.outliers(timeline.read(write_lines(tmp_path / "f", lines))).table.empty

    def test_skipped_passes_are_not_judged(self, tmp_path):
        lines = [step(begin=i * 10**9, index=i, phases={"a": 1.0 + 9 * (i == 0)}) for i in range(9)]
        read = timeline.read(write_lines(tmp_path / "f", lines))
        assert len(analysis.outliers(read).table) == 1
        skip_first(read, 1)
        assert analysis.outliers(read).table.empty
        assert analysis.step_sum(read).table["Steps"].tolist() == [8]
        with pytest.raises(TimelineError, match="--skip 9 leaves no pass"):
            skip_first(read, 9)


class TestComparison:
    def read(self, path, *lines):
        return timeline.read(write_lines(path, lines))

    def test_shares_of_the_change(self, tmp_path):
        before = self.read(tmp_path / "a", step(phases={"D3_gemm": 10.0, "D4_lora_grad": 4.0}))
        after = self.read(
            tmp_path / "b", step(phases={"D3_gemm": 6.0, "silu_backward": 1.0, "D4_lora_grad": 3.0})
        )
        table = compare(before, after).table.set_index("Phase")
        assert table["Change"].to_dict() == {
            "D3_gemm": -4e6, "silu_backward": 1e6, "D4_lora_grad": -1e6, "total": -4e6,
        }  # fmt: skip
        assert table["Share of change (%)"].to_dict() == {
            "D3_gemm": 100.0, "silu_backward": -25.0, "D4_lora_grad": 25.0, "total": 100.0,
        }  # fmt: skip
        assert table.loc["total", "Change (%)"] == round(-400 / 14, 1)
        assert math.isnan(table.loc["silu_backward", "Change (%)"])

    def test_what_lies_outside_phases_counts(self, tmp_path):
        before, after = step(), step()
        after["end_ns"] += 500_000
        report = compare(self.read(tmp_path / "a", before), self.read(tmp_path / "b", after))
        assert report.table["Phase"].tolist()[0] == "(outside phases)"
        assert report.table["Share of change (%)"].tolist()[0] == 100.0

    def test_numbers_of_passes_may_differ(self, tmp_path):
        before = self.read(tmp_path / "a", *(step(begin=i * 10**8, phases={"a": 2.0 + i}) for i in range(3)))
        after = self.read(tmp_path / "b", step(phases={"a": 4.0}))
        table = compare(before, after).table.set_index("Phase")
        assert table.loc["total", ["Before", "After"]].tolist() == [3e6, 4e6]

    def test_no_change_has_no_shares(self, tmp_path):
        one = self.read(tmp_path / "a", step())
        assert compare(one, one).table["Share of change (%)"].isna().all()

    def test_files_without_steps_by_self_time(self, tmp_path):
        before = nvtx(tmp_path / "a", [("outer", 0, 100, 1), ("inner", 10, 30, 1)], [(0, 5)])
        after = nvtx(tmp_path / "b", [("outer", 0, 150, 1), ("inner", 10, 90, 1)], [(0, 9)])
        table = compare(before, after).table.set_index("Phase")
        assert table["Change"].to_dict() == {"inner": 60, "outer": -10, "kernel": 4, "total": 54}

    def test_a_phase_called_total(self, tmp_path):
        before = self.read(tmp_path / "a", step(phases={"total": 2.0, "D3_gemm": 1.0}))
        after = self.read(tmp_path / "b", step(phases={"total": 5.0, "D3_gemm": 2.0}))
        report = compare(before, after)
        assert report.table["Phase"].tolist() == ["total", "D3_gemm", "total"]
        assert report.table["Share of change (%)"].tolist() == [75.0, 25.0, 100.0]
        (panel,) = figures.change(report).axes
        assert [label.get_text() for label in panel.get_yticklabels()] == ["D3_gemm", "total"]

    def test_steps_of_one_side_are_named(self, tmp_path):
        before = self.read(tmp_path / "a", step(), step(kind="backward", begin=10**8))
        after = self.read(tmp_path / "b", step(), step(begin=10**8))
        assert compare(before, after).note.endswith("100 %; only before: backward (1)")
        assert compare(after, before).note.endswith("100 %; only after: backward (1)")
        assert "only" not in compare(before, before).note

    def test_different_steps_cannot_be_compared(self, tmp_path):
        with pytest.raises(TimelineError, match=r"forward; after backward"):
            compare(self.read(tmp_path / "a", step()), self.read(tmp_path / "b", step(kind="backward")))


class TestKeyFigures:
    def figures(self, read, pair=None):
        return {
            row["Figure"].partition(",")[0]: row
            for row in key_figures.key_figures(read, pair).table.to_dict("records")
        }

    def line(self, **rates):
        """Phases of 1 ms each with GFLOP/s and GB/s."""
        phases = dict.fromkeys(rates, 1.0)
        work = {
            "phases_flop": {name: flop * 1e6 for name, (flop, _) in rates.items()},
            "phases_bytes": {name: size * 1e6 for name, (_, size) in rates.items()},
        }
        return step(phases=phases, peak_gflops=1000.0, bandwidth_gbs=50.0, **work)

    def test_targets(self, tmp_path):
        line = self.line(D3_gemm=(900, 10), silu_backward=(0, 45), D4_lora_grad=(100, 30))
        found = self.figures(timeline.read(write_lines(tmp_path / "f", [line])))
        assert (found["GEMM"]["Value"], found["GEMM"]["Met"]) == ("90.0%", "yes")
        assert (found["bandwidth"]["Value"], found["bandwidth"]["Met"]) == ("75.0%", "no")
        assert found["overlap"]["Met"] == "-"
        assert found["waiting"]["Value"] == "not known"

    def test_what_bounds_a_phase(self, tmp_path):
        line = self.line(D3_gemm=(900, 10), silu_backward=(0, 45), D4_lora_grad=(100, 10), route=(1, 0.1))
        line["phases_ms"]["gather"] = 1.0
        table = key_figures.phase_table(timeline.read(write_lines(tmp_path / "f", [line])))["bound"]
        assert table["D3_gemm"] == "compute (90% of its limit)"
        assert table["silu_backward"] == "memory (90% of its limit)"
        assert table["D4_lora_grad"].startswith("neither limit is near (20% of memory)")
        assert table["route"].startswith("neither limit is near (0% of memory)")
        assert table["gather"].startswith("unknown: no flop or bytes")

    def test_waiting_bounds_a_phase(self, tmp_path):
        line = self.line(D3_gemm=(100, 10))
        threads = [
            {"thread": t, "begin_ns": 0, "end_ns": end, "busy_ns": {"D3_gemm": end}}
            for t, end in ((0, 1_000_000), (1, 200_000))
        ]
        line["regions"] = [{"group": "backward_down", "begin_ns": 0, "end_ns": 1_000_000, "threads": threads}]
        bound = key_figures.phase_table(timeline.read(write_lines(tmp_path / "f", [line])))["bound"]["D3_gemm"]
        assert bound.startswith("waiting (40% of thread time")

    def test_without_limits_nothing_is_judged(self, tmp_path):
        line = self.line(D3_gemm=(900, 10))
        del line["peak_gflops"], line["bandwidth_gbs"]
        read = timeline.read(write_lines(tmp_path / "f", [line]))
        assert self.figures(read)["GEMM"]["Value"] == "not known"
        assert "900 GFLOP/s, but no peak" in self.figures(read)["GEMM"]["Remark"]
        assert key_figures.phase_table(read)["bound"]["D3_gemm"] == "unknown: no measured limits"

    def test_overlap_of_copies_with_kernels(self, tmp_path):
        read = nvtx(tmp_path / "f", [("x", 0, 1, 1)], [(0, 100)], [(20, 120)])
        found = self.figures(read)["overlap"]
        assert (found["Value"], found["Met"]) == ("80.0%", "yes")
        assert self.figures(read, ("x", "kind:kernel"))["overlap"]["Value"] == "100.0%"

    def test_waiting(self, tmp_path):
        read = timeline.read(write_lines(tmp_path / "f", timelines.records(2, 4)))
        share = analysis.waiting_share(read)
        assert self.figures(read)["waiting"]["Value"] == f"{share:.1%}"
        assert self.figures(read)["waiting"]["Met"] == "yes"


class TestInsideARange:
    def test_keeps_what_runs_inside_on_any_thread(self, tmp_path):
        ranges = [
            ("loop", 0, 100, 1),
            ("a", 10, 20, 1),
            ("b", 30, 40, 2),
            ("loop", 200, 300, 1),
            ("c", 210, 220, 1),
            ("d", 150, 250, 2),
        ]
        read = nvtx(tmp_path / "f", ranges)
        inside_range(read, "loop/1")
        assert sorted(map(str, read.ranges["name"])) == ["c", "loop"]
        read = nvtx(tmp_path / "g", ranges)
        inside_range(read, "loop")
        assert sorted(map(str, read.ranges["name"])) == ["a", "b", "c", "loop", "loop"]
        with pytest.raises(TimelineError, match="no range 'nothing'"):
            inside_range(read, "nothing")

    def test_step_range_names_the_steps(self, tmp_path):
        path = tmp_path / "f"
        nvtx(
            path,
            [
                ("iteration#4", 0, 100, 1),
                ("load", 10, 30, 1),
                ("train", 30, 90, 1),
                ("iteration#5", 100, 220, 1),
            ],
        )
        read = timeline.read(path, step_range="^iteration")
        assert read.passes[["step", "index", "total_ns"]].to_numpy().tolist() == [
            ["iteration", 4, 100.0],
            ["iteration", 5, 120.0],
        ]
        walls = read.phases[read.phases["pass"] == 0].set_index("phase")["wall_ns"].to_dict()
        assert walls == {"load": 20, "train": 60, "(in no range)": 20}
        assert analysis.step_sum(read).table["Steps"].tolist() == [2]
        assert isinstance(read.phases, pd.DataFrame)

    def test_step_range_takes_the_place_of_passes(self, tmp_path):
        """Waiting was of the operator's passes, whose numbers others have now."""
        path = write_lines(tmp_path / "f", timelines.records(3, 3))
        read = timeline.read(path, step_range="^backward_down$")
        assert set(read.passes["step"]) == {"backward_down"}
        assert not len(read.waits)
        assert not len(read.thread_waits)
        assert set(read.phases["pass"]) == set(read.passes.index)

    def test_step_range_has_to_find_something(self, tmp_path):
        lines = write_lines(tmp_path / "f", timelines.records(2, 2))
        with pytest.raises(TimelineError, match=r"^--step-range: there is no range whose name '\^x\$' finds$"):
            timeline.read(lines, step_range="^x$")
        nvtx(tmp_path / "g", [("x", 0, 10, 1)])
        read = timeline.read([lines, tmp_path / "g"], step_range="^x$")
        assert read.passes[["source", "step"]].to_numpy().tolist() == [[1, "x"]]
        assert set(read.ranges.loc[read.ranges["source"] == 0, "step"]) == {-1}

    def test_step_range_of_chosen_threads(self, tmp_path):
        path = timelines.write_trace(tmp_path / "f", timelines.records(2, 3))
        chosen = timeline.Filters(threads=frozenset([1]))
        assert len(timeline.read(path, step_range="^D3_gemm$").passes) == 2 * 3
        assert len(timeline.read(path, chosen, step_range="^D3_gemm$").passes) == 2
