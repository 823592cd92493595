"""What the experiment prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from amx_sft_moe import _core
from amx_sft_moe.finetune.tables import Row, plain_table

from .experiment import Results, allowed_error
from .options import Options
from .shapes import LayerShape

INDENT = "  "


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _mean(passes: Sequence[dict[str, Any]], *keys: str) -> float:
    """Mean over passes of passes[n][key][key]..."""
    found = []
    for times in passes:
        value: Any = times
        for key in keys:
            value = value[key]
        found.append(value)
    return statistics.fmean(found)


def heading(options: Options, wanted: LayerShape, memory: int, kernel: str) -> str:
    """The layer, and whether all of its experts are there."""
    shape = options.shape
    lines = [
        f"{options.name}: E={shape.experts} k={shape.top_k} H={shape.hidden} I={shape.intermediate}, "
        f"LoRA r={options.rank} alpha={options.alpha:g}, {options.dtype}, kernel {kernel}, "
        f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    ]
    if shape.experts < wanted.experts:
        lines.append(
            f"{shape.experts} of {wanted.experts} experts: that is what fits in {memory / 1e9:.1f} GB "
            "of memory (--memory)"
        )
    return "\n".join(lines)


def machine(found: dict[str, Any] | None, threads: int) -> str:
    """The measured limits."""
    if found is None:
        return "machine: not measured"
    peaks = ", ".join(f"{name} {gflops:,.0f}" for name, gflops in found["instructions"].items())
    return f"machine, {threads} threads: {peaks}\n  GFLOP/s; reads {found['bandwidth']:.1f} GB/s"


def check(errors: dict[str, float], options: Options, ok: bool) -> str:
    """How far the operator was from float64."""

    def excess(name: str) -> float:
        # NaN is larger than any error, and max() would keep whichever comes first.
        return math.inf if math.isnan(errors[name]) else errors[name] / allowed_error(name, options)

    worst = max(errors, key=excess)
    allowed = allowed_error(worst, options)
    verdict = "ok" if ok else "WRONG"
    return (
        f"check, {options.check_tokens} tokens against float64: {verdict}; largest relative error "
        f"{errors[worst]:.1e} ({worst}), allowed {allowed:.0e}"
    )


def latencies(results: Results, tokens: int) -> str:
    """Milliseconds and tokens/s of the three experiments, the time outside the operator, and the warm-up."""
    rows = []
    named = (
        ("forward_only", results.forward),
        ("backward_only", results.backward),
        ("full_train_loop", results.both),
    )
    for name, timing in named:
        outside = timing.mean - timing.inside
        rows.append(
            (
                name,
                *map(_ms, (timing.mean, timing.deviation, min(timing.calls), max(timing.calls))),
                f"{1e3 * tokens / timing.mean:,.0f}",
                _ms(timing.inside),
                f"{_ms(outside)} ({_share(outside / timing.mean)})",
                _ms(timing.warmup[0]) if timing.warmup else "-",
                _ms(statistics.fmean(timing.warmup)) if timing.warmup else "-",
            )
        )
    header = (
        "ms",
        "mean",
        "dev.",
        "min",
        "max",
        "tokens/s",
        "inside",
        "outside",
        "1st call",
        "warm-up mean",
    )
    return plain_table(header, rows, INDENT)


def _work_columns(
    ms: float, flop: float, bytes_: float, kernel: str, found: dict[str, Any] | None
) -> tuple[str, ...]:
    if ms == 0:
        return ("", "", "", "")
    gflops, gbytes = flop / ms * 1e-6, bytes_ / ms * 1e-6
    peak = found["kernels"].get(kernel, 0) if found else 0
    return (
        f"{gflops:,.0f}" if flop else "",
        _share(gflops / peak) if flop and peak else "",
        f"{gbytes:,.1f}",
        _share(gbytes / found["bandwidth"]) if found else "",
    )


def phases(name: str, passes: Sequence[dict[str, Any]], kernel: str, found: dict[str, Any] | None) -> str:
    """Groups and in them phases of a pass: ms, share of the pass, and what was reached of the peaks."""
    total = _mean(passes, "total_ms")
    first = passes[0]
    rows: list[Row] = []

    def add(label: str, ms: float, names: Iterable[str], remark: str = "") -> None:
        flop = sum(first["flop"][phase] for phase in names)
        bytes_ = sum(first["bytes"][phase] for phase in names)
        columns = _work_columns(ms, flop, bytes_, kernel, found)
        rows.append((label, _ms(ms), _share(ms / total), *columns, remark))

    for group, members in _tree(first):
        add(group, _mean(passes, "groups", group), members)
        for phase in members:
            kind = first["kinds"][phase]
            if phase != group:
                remark = "" if kind == "measured" else kind
                add(f"  {phase}", _mean(passes, "phases", phase), [phase], remark)
    real = [phase for phase, kind in first["kinds"].items() if kind != "total"]
    named = sum(_mean(passes, "groups", group) for group in first["groups"])
    rows.append(("outside of phases", _ms(total - named), _share((total - named) / total), *[""] * 5))
    add("total", total, real)
    header = (name, "ms", "share", "GFLOP/s", "of peak", "GB/s", "of reads", "")
    return plain_table(header, rows, INDENT)


def _tree(times: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Groups with their phases, in the order of the dump; sums of phases are left out."""
    groups = _core.phase_groups()
    tree: list[tuple[str, list[str]]] = [(group, []) for group in times["groups"]]
    by_name = dict(tree)
    for phase, kind in times["kinds"].items():
        if kind != "total":
            by_name[groups[phase]].append(phase)
    return tree


def _thread_rows(name: str, passes: Sequence[dict[str, Any]]) -> list[Row]:
    busy: dict[int, float] = {}
    waiting: dict[int, float] = {}
    for thread in (thread for times in passes for thread in times["threads"]):
        number = thread["thread"]
        busy[number] = busy.get(number, 0.0) + thread["busy_ms"] / len(passes)
        waiting[number] = waiting.get(number, 0.0) + thread["waiting_ms"] / len(passes)
    rows: list[Row] = [(f"{name}, thread {t}", _ms(busy[t]), _ms(waiting[t]), "", "") for t in sorted(busy)]
    mean = statistics.fmean(busy.values())
    imbalance = _share(max(busy.values()) / mean - 1)
    points = str(passes[0]["sync_points"])
    rows.append((f"{name}, mean", _ms(mean), _ms(statistics.fmean(waiting.values())), imbalance, points))
    return rows


def threads(results: Results) -> str:
    """Busy and waiting milliseconds of each thread, and the imbalance: the busiest above the mean."""
    header = ("ms a pass", "busy", "waiting", "imbalance", "sync points")
    rows = [
        *_thread_rows("forward", results.both.forwards),
        *_thread_rows("backward", results.both.backwards),
    ]
    return plain_table(header, rows, INDENT)


def text(results: Results, options: Options) -> str:
    """Everything after the check."""
    kernel, found = results.kernel, results.machine
    parts = [
        f"{options.tokens} tokens, {options.warmup} warm-up and {options.iterations} timed iterations",
        latencies(results, options.tokens),
        phases("forward", results.both.forwards, kernel, found),
        phases("backward", results.both.backwards, kernel, found),
        threads(results),
    ]
    return "\n\n".join(parts)
