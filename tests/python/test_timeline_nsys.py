"""Our sums and traces beside those of a real `nsys stats`, on request:

AMX_SFT_MOE_NSYS=/path/to/nsys AMX_SFT_MOE_NSYS_EXPORTS=a.sqlite:b.sqlite pytest
tests/python/test_timeline_nsys.py
"""

from __future__ import annotations

import io
import os
import subprocess

import pytest

from amx_sft_moe import timeline
from amx_sft_moe.timeline.output import in_unit
from amx_sft_moe.timeline.reports import NSYS_REPORTS

pd = pytest.importorskip("pandas")

NSYS = os.environ.get("AMX_SFT_MOE_NSYS")
EXPORTS = [path for path in os.environ.get("AMX_SFT_MOE_NSYS_EXPORTS", "").split(":") if path]

# Ours, and what nsys called it before 2023.
REPORTS = {
    "nvtx_pushpop_sum": "nvtxppsum",
    "nvtx_pushpop_trace": "nvtxpptrace",
    "nvtx_startend_sum": "nvtxsesum",
    "osrt_sum": "osrtsum",
    "cuda_gpu_kern_sum": "gpukernsum",
    "cuda_gpu_mem_time_sum": "gpumemtimesum",
}
_OWN_NUMBERS = ("RangeId", "ParentId", "RangeStack", "Style")
_LABELS = (
    "Name",
    "NameTree",
    "Range",
    "Operation",
)  # quoted, prefixed and spelled by each version in its own way

pytestmark = pytest.mark.skipif(not (NSYS and EXPORTS), reason="AMX_SFT_MOE_NSYS(_EXPORTS) are not set")


def theirs(report: str, export: str) -> pd.DataFrame | None:
    """The table of nsys; None where it says that the file has no such data."""
    for name in (report, REPORTS[report]):
        command = [NSYS, "stats", "-q", "--report", name, "--format", "csv", export]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        begin = next((n for n, line in enumerate(lines) if line.startswith(("Time (%)", "Start (ns)"))), None)
        if begin is not None:
            return pd.read_csv(io.StringIO("\n".join(lines[begin:])))
    return None


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("report", list(REPORTS))
def test_same_numbers(report, export):
    wanted = theirs(report, export)
    if wanted is None:
        pytest.skip("nsys has nothing to say")
    ours = in_unit(NSYS_REPORTS[report](timeline.read(export)), "ns")
    assert len(ours) == len(wanted)
    columns = [c for c in ours if c in wanted and c not in _OWN_NUMBERS + _LABELS]
    assert len(columns) >= 8
    order = [c for c in ("Start (ns)", "TID", "Lvl", "Total Time (ns)", "Min (ns)") if c in columns]
    ours, wanted = (table.sort_values(order, kind="stable", ignore_index=True) for table in (ours, wanted))
    for column in columns:
        # Averages are rounded to a tenth, of which the last digit may differ.
        assert ours[column].tolist() == pytest.approx(wanted[column].tolist(), abs=0.11), column
