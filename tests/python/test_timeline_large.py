"""Memory does not grow with the file, only with the ranges that are kept. Two hundred megabytes on request:

AMX_SFT_MOE_TIMELINE_LARGE=1 pytest -s tests/python/test_timeline_large.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc

import pytest

import timelines
from amx_sft_moe.timeline import Bounds, readers
from timelines import global_tid, write_nsys

pytest.importorskip("pandas")

LARGE = bool(os.environ.get("AMX_SFT_MOE_TIMELINE_LARGE"))
_ROW_BYTES = 50  # of an export, about


def _moved(item, shift):
    """A pass or an event at a later time."""
    if "ts" in item:
        return item | {"ts": item["ts"] + shift / 1000}
    if "begin_ns" in item:
        return item | {"begin_ns": item["begin_ns"] + shift, "end_ns": item["end_ns"] + shift}
    return item


def _nsys_rows(records, count):
    """Groups of the same passes over and over, each later than the one before."""
    groups = [(g["begin_ns"], g["end_ns"], g["group"]) for record in records for g in record["regions"]]
    length = groups[-1][1] - groups[0][0] + 10**6
    for number in range(count):
        begin, end, name = groups[number % len(groups)]
        shift = number // len(groups) * length
        yield (begin + shift, end + shift, 59, name, global_tid(1, 2), None, 0)


def grow(path, form, size):
    """A file of about `size` bytes from the same few passes over and over."""
    records = list(timelines.records(4, 8))
    if form == "nsys":
        return write_nsys(path, {"NVTX_EVENTS": _nsys_rows(records, size // _ROW_BYTES)}, {})
    items = list(timelines.events(records)) if form == "trace" else records
    length = records[-1]["end_ns"] - records[0]["begin_ns"] + 10**6
    written = shift = 0
    with path.open("w") as out:
        out.write("[\n" if form == "trace" else "")
        while written < size:
            for item in items:
                written += out.write(json.dumps(_moved(item, shift)) + (",\n" if form == "trace" else "\n"))
            shift += length
    return path


@pytest.mark.parametrize("form", ["lines", "trace", "nsys"])
def test_reading_needs_memory_only_for_what_is_kept(tmp_path, form):
    peaks = []
    for size in (3 << 20, 6 << 20):
        path = grow(tmp_path / f"{size}", form, size)
        tracemalloc.start()
        read = readers.read_file(path, bounds=Bounds(ranges=500))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(read.ranges) == 500
        assert "beyond the bound of 500" in " ".join(read.notes)
    # Tables of passes grow by some kilobytes with three more megabytes of file; nothing else does.
    assert peaks[1] - peaks[0] < (1 << 20), peaks


@pytest.mark.skipif(not LARGE, reason="AMX_SFT_MOE_TIMELINE_LARGE is not set")
@pytest.mark.parametrize("form", ["lines", "trace", "nsys"])
def test_two_hundred_megabytes(tmp_path, form):
    path = grow(tmp_path / "f", form, 200_000_000)
    page = tmp_path / "page.html"
    code = (
        "import resource, sys, time; from amx_sft_moe.timeline.cli import main; begin = time.monotonic(); "
        f"status = main([{str(path)!r}, '--html', {str(page)!r}]); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(status, round(time.monotonic() - begin), round(used.ru_utime), used.ru_maxrss // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status, seconds, cpu_seconds, megabytes = map(int, done.stdout.split())
    size = path.stat().st_size / 1e6
    print(f"\n{form}: {size:.0f} MB, {seconds} s ({cpu_seconds} s of CPU), peak {megabytes} MB")
    assert status == 0
    assert "Traceback" not in done.stderr
    assert megabytes < 1200
