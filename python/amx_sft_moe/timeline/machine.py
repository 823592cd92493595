"""Limits of the machine that reads a recording, measured for the kernel and the threads of its passes."""

from __future__ import annotations

from ..errors import ArgumentError
from .errors import TimelineError
from .table import Timeline

# Reads of twice the largest last-level cache of today's servers come from memory.
_BANDWIDTH_BYTES = 1 << 30


def measure_limits(timeline: Timeline) -> None:
    """Sets ``peak_gflops`` of the recorded kernel's instruction and ``bandwidth_gbs`` of reads, as this machine
    has them now, with as many threads as the recorded passes.

    True for what was recorded on this machine; takes a second where nothing else runs, and 1 GiB. Passes that
    do not tell how many threads they had are not judged: a note says so.

    Raises:
        TimelineError: the passes name no kernel of ours, or several, or more threads than can be measured with.
    """
    from amx_sft_moe import _core

    passes = timeline.passes
    kernels = sorted({str(kernel) for kernel in passes["kernel"]} - {""})
    if len(kernels) != 1:
        raise TimelineError(f"--measure: expected passes of one kernel, got {kernels or 'none'}")
    counts = passes.loc[passes["kernel"] == kernels[0], "threads"]
    unknown = int((counts < 1).sum())
    if unknown:
        timeline.notes.append(
            f"--measure: {unknown:,} of {len(counts):,} passes do not tell how many threads they had; nothing "
            "was measured (--peak-gflops and --bandwidth set limits)"
        )
        return
    threads = int(counts.max())
    try:
        machine = _core.measure_machine(threads, _BANDWIDTH_BYTES)
    except (ArgumentError, TypeError) as error:  # the latter where the number fits no int
        raise TimelineError(f"--measure: cannot measure with the {threads:,} threads of the passes") from error
    if kernels[0] not in machine["kernels"]:
        raise TimelineError(
            f"--measure: expected a kernel out of {list(machine['kernels'])} on this machine, got "
            f"{kernels[0]!r}"
        )
    timeline.limits["peak_gflops"] = machine["kernels"][kernels[0]]
    timeline.limits["bandwidth_gbs"] = machine["bandwidth"]
    timeline.notes.append(f"limits of {kernels[0]} were measured on this machine now, {threads} threads")
