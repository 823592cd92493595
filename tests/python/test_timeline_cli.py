"""`python -m amx_sft_moe timeline`: options, files that it writes, exit statuses, messages."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import timelines
from amx_sft_moe.__main__ import main as package_main
from amx_sft_moe.timeline import cli, libraries
from amx_sft_moe.timeline.errors import TimelineError
from timelines import write_lines, write_trace

pytest.importorskip("pandas")


@pytest.fixture
def path(tmp_path):
    return write_lines(tmp_path / "steps.jsonl", timelines.records(6, 3))


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return status, out.out, out.err


def rows(capsys, *arguments) -> list[dict]:
    """The rows of a report that is asked for as JSON."""
    status, out, _ = run(capsys, *arguments, "-f", "json")
    assert status == 0
    return json.loads(out)


class TestReports:
    def test_without_options_all_that_say_something(self, capsys, path):
        status, out, err = run(capsys, path)
        assert (status, err) == (0, "")
        found = [line.rpartition("(")[2].rstrip(")") for line in out.splitlines() if line.startswith(" ** ")]
        assert found == [
            "configuration",
            "key_figures",
            "step_sum",
            "phase_sum",
            "waiting_sum",
            "waiting_by_thread",
            "gap_sum",
            "nvtx_pushpop_sum",
        ]

    def test_chosen_reports_in_json(self, capsys, path):
        steps = rows(capsys, path, "-r", "step_sum", "--timeunit", "msec")
        assert {row["Step"] for row in steps} == {"forward layers.0", "backward layers.0"}
        assert steps[0]["Steps"] == 6
        assert 10 < steps[0]["Avg (ms)"] < 40

    def test_files(self, capsys, path, tmp_path):
        prefix = tmp_path / "deep" / "run"
        status, out, _ = run(capsys, path, "-r", "phase_sum,nvtx_pushpop_trace", "-f", "csv", "-o", prefix)
        assert (status, out) == (0, "")
        written = sorted(prefix.parent.iterdir())
        assert [p.name for p in written] == ["run_nvtx_pushpop_trace.csv", "run_phase_sum.csv"]
        spans = [len(t["spans"]) for r in timelines.records(6, 3) for g in r["regions"] for t in g["threads"]]
        assert len(list(csv.DictReader(io.StringIO(written[0].read_text())))) == 12 + 12 * 5 + sum(spans)

    def test_pictures_and_page(self, capsys, path, tmp_path):
        pytest.importorskip("matplotlib")
        status, out, _ = run(capsys, path, "--png", tmp_path / "png", "--html", tmp_path / "page.html")
        assert (status, out) == (0, "")
        names = sorted(p.name for p in (tmp_path / "png").iterdir())
        assert names == ["phases.png", "roofline.png", "step_times.png", "strip.png"]
        content = (tmp_path / "page.html").read_text()
        assert content.count("data:image/png;base64,") == 4
        assert "waiting_by_thread" in content

    def test_compare(self, capsys, path, tmp_path):
        slower = write_lines(tmp_path / "b", timelines.records(6, 3, slower=3.0))
        changes = {r["Phase"]: r for r in rows(capsys, "--compare", path, slower) if r["Step"] == "backward"}
        assert changes["D3_gemm"]["Share of change (%)"] > 80
        pytest.importorskip("matplotlib")
        status, out, _ = run(capsys, "--compare", path, slower, "--html", tmp_path / "page.html")
        assert (status, out) == (0, "")
        assert "Change by phase" in (tmp_path / "page.html").read_text()

    def test_limits_of_the_command_line(self, capsys, path):
        figures = json.dumps(
            rows(capsys, path, "-r", "key_figures", "--peak-gflops", "2000", "--bandwidth", "80")
        )
        assert "of 2,000 GFLOP/s" in figures
        assert "of 80.0 GB/s" in figures

    def test_measured_limits(self, capsys, path, monkeypatch):
        asked = []

        def measured(threads, bandwidth_bytes):
            asked.append(threads)
            return {"kernels": {"avx512": 321.0}, "bandwidth": 12.5}

        monkeypatch.setattr("amx_sft_moe._core.measure_machine", measured)
        figures = json.dumps(rows(capsys, path, "-r", "key_figures", "--measure"))
        assert "of 321 GFLOP/s" in figures
        assert "of 12.5 GB/s" in figures
        assert asked == [3]
        monkeypatch.setattr(
            "amx_sft_moe._core.measure_machine", lambda *_: {"kernels": {"portable": 1.0}, "bandwidth": 1.0}
        )
        status, _, err = run(capsys, path, "--measure")
        assert status == 1
        assert "expected a kernel out of ['portable'] on this machine, got 'avx512'" in err

    @pytest.mark.parametrize("dropped", ["thread_name", "phase"])
    @pytest.mark.parametrize("options", [[], ["--filter-thread", "0"], ["--max-ranges", "100"]])
    def test_measured_with_the_threads_of_a_trace(self, capsys, tmp_path, monkeypatch, dropped, options):
        """Its passes do not say how many they had: its names of threads do, and so do its phases."""
        asked = []
        monkeypatch.setattr(
            "amx_sft_moe._core.measure_machine",
            lambda threads, _: asked.append(threads) or {"kernels": {"avx512": 321.0}, "bandwidth": 12.5},
        )
        events = [
            event
            # Written one after the other, while passes of two callers alternate: no pass would be whole.
            for caller in ((0,) if "--max-ranges" in options else (0, 77_000))
            for event in timelines.events(timelines.records(2, 5), caller)
            if dropped not in (event["name"], event.get("cat"))
        ]
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(events))
        status, out, err = run(capsys, path, "-r", "configuration", "--measure", *options)
        assert (status, asked) == (0, [5])
        assert "measured on this machine now, 5 threads" in err
        assert re.search(r"threads +5\n", out)

    @pytest.mark.parametrize("threads", [100_000, 1 << 40])
    def test_more_threads_than_can_be_measured_with(self, capsys, tmp_path, threads):
        path = write_lines(tmp_path / "f", [next(timelines.records(1, 2)) | {"threads": threads}])
        status, _, err = run(capsys, path, "--measure")
        assert status == 1
        assert err == f"error: --measure: cannot measure with the {threads:,} threads of the passes\n"

    def test_a_step_range_that_finds_nothing(self, capsys, path):
        status, out, err = run(capsys, path, "--step-range", "typo", "-r", "step_sum")
        assert (status, out) == (1, "")
        assert err == "error: --step-range: there is no range whose name 'typo' finds\n"

    def test_a_trace_without_threads_is_not_judged(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setattr("amx_sft_moe._core.measure_machine", lambda *_: pytest.fail("measured"))
        path = tmp_path / "trace.json"
        events = timelines.events(timelines.records(2, 5))
        path.write_text(json.dumps([event for event in events if event.get("cat") in ("step", "group")]))
        status, out, err = run(capsys, path, "-r", "key_figures", "--measure")
        assert status == 0
        assert "4 of 4 passes do not tell how many threads they had; nothing was measured" in err
        assert "yes" not in out

    def test_options_reach_the_analysis(self, capsys, path):
        both = rows(capsys, path, "-r", "overlap", "--overlap", "gemm", "kind:group")
        assert both[0]["Overlap (%)"] == 100.0
        assert [row["Steps"] for row in rows(capsys, path, "-r", "step_sum", "--skip", "4")] == [2, 2]
        assert rows(capsys, path, "-r", "outliers", "--outlier-score", "0.001")
        assert not rows(capsys, path, "-r", "outliers", "--outlier-score", "1000")

    def test_filters(self, capsys, path):
        ranges = rows(capsys, path, "-r", "nvtx_pushpop_sum", "--filter-name", "^D3", "--filter-thread", "0")
        assert [(row["Range"], row["Instances"]) for row in ranges] == [("D3_gemm", 6)]
        ranges = rows(capsys, path, "-r", "nvtx_pushpop_sum", "--filter-nvtx", "backward/2")
        assert {row["Range"]: row["Instances"] for row in ranges}["backward"] == 1
        assert sum(row["Steps"] for row in rows(capsys, path, "-r", "step_sum", "--filter-time", "0/30ms")) == 2

    def test_the_bound_is_said(self, capsys, path):
        status, out, err = run(capsys, path, "--max-ranges", "50", "-r", "step_sum", "-f", "json")
        assert status == 0
        assert "beyond the bound of 50" in err
        assert [row["Steps"] for row in json.loads(out)] == [6, 6]  # sums per step are of all passes


class TestNames:
    """Names that the stream's or no encoding has."""

    @pytest.fixture
    def trace(self, tmp_path):
        name = "\u03bb \U0001f600" + "n" * 100
        names = (json.dumps(name), '"half \\ud800"')
        events = (f'{{"ph":"X","name":{name},"pid":1,"tid":1,"ts":1,"dur":2}}' for name in names)
        path = tmp_path / "trace.json"
        path.write_text(f"[{','.join(events)}]")
        return path

    @pytest.mark.parametrize(
        ("form", "encoding"), [("column", "latin-1"), ("csv", "ascii"), ("json", "ascii"), ("json", "utf-8")]
    )
    def test_streams(self, trace, form, encoding):
        command = [sys.executable, "-m", "amx_sft_moe", "timeline", trace, "-f", form, "-r", "nvtx_pushpop_sum"]
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(command, env=environment, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode(encoding)
        assert ("\u03bb" in text) == (encoding == "utf-8")
        if form == "json":
            expected = {"\u03bb \U0001f600" + "n" * 100, "half \\ud800"}
            assert {row["Range"] for row in json.loads(text)} == expected
        else:
            assert "half \\ud800" in text

    @pytest.mark.parametrize("form", ["column", "csv", "json"])
    def test_files(self, capsys, trace, tmp_path, form):
        odd = tmp_path / os.fsdecode(b"trace\xff.json")
        odd.write_bytes(trace.read_bytes())
        assert run(capsys, odd, "-f", form, "-o", tmp_path / "out")[0] == 0
        (written,) = tmp_path.glob("out_nvtx_pushpop_sum.*")
        assert "\u03bb \U0001f600" in written.read_text(encoding="utf-8")
        pytest.importorskip("matplotlib")
        assert run(capsys, odd, "--html", tmp_path / "page.html")[0] == 0
        assert "trace\\udcff.json" in (tmp_path / "page.html").read_text(encoding="utf-8")


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["-r", "nothing"], "there is no report 'nothing'; there are configuration"),
            (["-r", "nothing"], ", overlap"),
            (["-r", "overlap"], "needs --overlap A B"),
            (["--filter-name", "("], "error: --filter-name: '(' is not a regular expression"),
            (["--overlap", "(", "b"], "error: --overlap: '(' is not a regular expression"),
            (["--step-range", "["], "error: --step-range: '[' is not a regular expression"),
            (["--filter-time", "5"], "error: --filter-time: a time window is BEGIN/END"),
            (["--filter-time", "9s/"], "nothing of it passes the filters"),
            (["--filter-thread", "4-2"], "error: --filter-thread: 4-2 is not a span of threads"),
            (["--filter-thread", "x"], "error: --filter-thread: threads are numbers"),
            (["--filter-thread", "9" * 5000], "threads are numbers"),
            (["--filter-nvtx", "nowhere"], "error: --filter-nvtx: there is no range 'nowhere'"),
            (["--filter-nvtx", "forward/²"], "there is no range 'forward/²'"),
            (["--filter-nvtx", "forward/" + "9" * 5000], "there is no range 'forward/999"),
            (["--skip", "6"], "--skip 6 leaves no pass"),
        ],
    )
    def test_the_user_can_mend_it(self, capsys, path, options, message):
        status, out, err = run(capsys, path, *options)
        assert (status, out) == (1, "")
        assert err.startswith("error: ")
        assert message in err
        assert len(err.splitlines()) == 1

    @pytest.mark.parametrize(
        "options",
        [
            ["--timeunit", "h"],
            ["--format", "xml"],
            ["--peak-gflops", "0"],
            ["--skip", "-1"],
            ["--rows", "x"],
            ["--max-ranges", "0"],
            ["--html", ""],
            ["--html", "/"],
        ],
    )
    def test_wrong_options(self, capsys, path, options):
        with pytest.raises(SystemExit) as raised:
            cli.main([str(path), *options])
        assert raised.value.code == 2
        assert "usage:" in capsys.readouterr().err

    @pytest.mark.parametrize("files", [0, 1])
    def test_files_or_compare(self, capsys, path, files):
        with pytest.raises(SystemExit) as raised:
            cli.main([str(path), "--compare", str(path), str(path)] if files else [])
        assert raised.value.code == 2
        assert "give FILEs, or --compare" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_written(self, capsys, path):
        pytest.importorskip("matplotlib")
        for options in (["--html", path / "x.html"], ["--png", path / "x"], ["-o", path / "x"]):
            status, _, err = run(capsys, path, *options)
            assert status == 1
            assert "cannot write" in err

    def test_a_missing_library_is_named(self, capsys, path, monkeypatch):
        def missing(name):
            raise ImportError(f"No module named {name!r}")

        monkeypatch.setattr(libraries, "import_module", missing)
        status, _, err = run(capsys, path)
        assert status == 1
        assert "needs pandas" in err
        assert "pip install '.[profile]' in a clone" in err

    @pytest.mark.parametrize(("error", "expected"), [(MemoryError(), 1), (KeyboardInterrupt(), 130)])
    def test_what_stops_it(self, capsys, path, monkeypatch, error, expected):
        def stop(*_):
            raise error

        monkeypatch.setattr(cli, "_run", stop)
        status, _, err = run(capsys, path)
        assert status == expected
        assert len(err.splitlines()) == 1


class TestProcess:
    def test_a_reader_that_leaves_early(self, path):
        """`| head` closes the pipe; that is no error."""
        command = [
            sys.executable,
            "-m",
            "amx_sft_moe",
            "timeline",
            str(path),
            "-r",
            "nvtx_pushpop_trace",
            "-f",
            "csv",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
    def test_a_full_disk(self, path):
        command = [sys.executable, "-m", "amx_sft_moe", "timeline", str(path)]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr == "error: standard output: No space left on device\n"

    def test_torch_and_matplotlib_are_not_imported(self, path):
        code = (
            "import sys; from amx_sft_moe.timeline.cli import main; "
            f"main([{str(path)!r}, '-r', 'step_sum']); "
            "sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0

    def test_help_names_the_reports(self, capsys):
        with pytest.raises(SystemExit) as raised:
            package_main(["timeline", "--help"])
        assert raised.value.code == 0
        out = capsys.readouterr().out
        assert "nvtx_pushpop_sum" in out
        assert "waiting_sum" in out


class TestFilesThatAreThere:
    @pytest.mark.parametrize("further", [[], ["another"]])
    def test_a_page_takes_no_recordings_place(self, capsys, path, further):
        before = path.read_bytes()
        status, _, err = run(capsys, "--html", path, *(further or [path]))
        assert status == 1
        assert err == f"error: --html {path}: expected a page to be made there, got a file that is no page\n"
        assert path.read_bytes() == before

    def test_pages_and_empty_files_are_replaced(self, capsys, path, tmp_path):
        target = tmp_path / "page.html"
        target.touch()
        for _ in range(2):
            assert run(capsys, path, "--html", target)[0] == 0
            assert target.read_text().startswith("<!DOCTYPE html>")

    def test_a_page_that_cannot_be_looked_at(self, capsys, path, tmp_path):
        status, _, err = run(capsys, path, "--html", tmp_path)
        assert status == 1
        assert err.startswith(f"error: cannot read {tmp_path}, to see whether it is a page: ")

    @pytest.mark.parametrize("kind", ["pipe", "device", "link to a device"])
    def test_devices_and_pipes_stay_what_they_are(self, capsys, path, tmp_path, kind):
        """As root a file would take the place of /dev/null for everybody."""
        target = tmp_path / "there"
        if kind == "pipe":
            os.mkfifo(target)
            end = os.open(target, os.O_RDWR)  # else who opens it would wait for ever
            os.write(end, b"<!DOCTYPE html>")
        else:
            try:
                os.mknod(tmp_path / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
            except PermissionError:
                pytest.skip("only root makes devices")
            target.symlink_to(tmp_path / "null")
            target = target if kind == "link to a device" else tmp_path / "null"
        before = target.stat()
        status, _, err = run(capsys, path, "--html", target)
        assert status == 1
        assert (
            err == f"error: cannot write {target}: expected a file or nothing there, got a device or a pipe\n"
        )
        assert os.path.samestat(target.stat(), before)
        assert list(tmp_path.glob(".*.partial")) == []
        with pytest.raises(TimelineError, match="got a device or a pipe"), cli._in_place_of(target):
            pytest.fail("nothing is written")

    def test_a_name_that_is_too_long(self, capsys, path, tmp_path):
        status, _, err = run(capsys, path, "-r", "phase_sum", "-f", "csv", "-o", tmp_path / ("a" * 250))
        assert status == 1
        assert err.startswith("error: cannot write ")
        assert err.endswith(": File name too long\n")

    def test_a_link_stays_one(self, capsys, path, tmp_path):
        target = tmp_path / "page.html"
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere" / "page.html")
        assert run(capsys, path, "--html", target)[0] == 0
        assert target.is_symlink()
        assert target.read_text().startswith("<!DOCTYPE html>")

    def test_reports_that_cannot_be_written_leave_the_old_ones(self, capsys, path, tmp_path, monkeypatch):
        arguments = (path, "-r", "phase_sum", "-f", "csv", "-o", tmp_path / "out")
        assert run(capsys, *arguments)[0] == 0
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}

        def write(report, form, unit, rows, stream):
            stream.write("half a table")
            stream.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(cli, "write", write)
        status, _, err = run(capsys, *arguments)
        assert (status, err) == (
            1,
            f"error: cannot write {tmp_path / 'out_phase_sum.csv'}: No space left on device\n",
        )
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_trace_through_the_command(capsys, tmp_path):
    path = write_trace(tmp_path / "trace.json", timelines.records(3, 2))
    assert {row["Phase"] for row in rows(capsys, path, "-r", "phase_sum")} == set(timelines.RATES)
