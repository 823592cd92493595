"""Files of timelines for the tests of the analyser: the same passes as JSON lines, as a Chrome trace, as an
export of Nsight Systems."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from amx_sft_moe import timeline
from amx_sft_moe.timeline import TimelineError
from amx_sft_moe.timeline.names import PHASES_OF_GROUPS

# Group, phases with their share of the group's work, whether it is parallel.
FORWARD = (
    ("forward_gather", (("route", 1.0),), False, 0.01),
    ("forward_gather", (("gather", 0.3), ("lora_a(gate,up)", 0.7)), True, 0.08),
    ("forward_gate_up", (("gemm(gate)+gemm(up)+activation", 0.97), ("lora_a(down)", 0.03)), True, 0.6),
    ("forward_down", (("gemm(down)", 1.0),), True, 0.28),
    ("forward_sum_tokens", (("sum_tokens", 1.0),), True, 0.03),
)
BACKWARD = (
    ("backward_down", (("D1_scatter", 0.1), ("D4_lora_grad", 0.9)), True, 0.06),
    ("backward_down", (("D3_gemm", 0.85), ("D4_lora_grad", 0.15)), True, 0.3),
    ("backward_activation", (("silu_backward", 1.0),), True, 0.04),
    (
        "backward_gate_up",
        (("base_pass(gate)+base_pass(up)", 0.8), ("lora_pass(gate)", 0.1), ("lora_pass(up)", 0.1)),
        True,
        0.55,
    ),
    ("backward_gate_up", (("GU4_sum_tokens", 0.9), ("backward_routing_weights", 0.1)), True, 0.05),
)
# GFLOP/s and GB/s of each phase.
RATES = {
    "route": (0, 9.0),
    "gather": (0, 31.0),
    "lora_a(gate,up)": (95, 22.0),
    "gemm(gate)+gemm(up)+activation": (910, 13.0),
    "lora_a(down)": (120, 17.0),
    "gemm(down)": (840, 11.0),
    "sum_tokens": (0, 36.0),
    "D1_scatter": (0, 34.0),
    "D3_gemm": (760, 12.5),
    "D4_lora_grad": (60, 28.0),
    "silu_backward": (0, 33.0),
    "base_pass(gate)+base_pass(up)": (870, 9.0),
    "lora_pass(gate)": (210, 24.0),
    "lora_pass(up)": (190, 26.0),
    "GU4_sum_tokens": (0, 35.0),
    "backward_routing_weights": (2, 1.5),
}


def _region(
    group: str,
    phases: Any,
    parallel: bool,
    begin: int,
    length: int,
    threads: int,
    spans: bool,
    rng: random.Random,
) -> dict[str, Any]:
    """One region; its slowest thread ends with it."""
    members = []
    for thread in range(threads if parallel else 1):
        start = begin + rng.randrange(0, max(length // 100, 1))
        end = begin + length if thread == 0 else begin + length - rng.randrange(0, max(length // 8, 1))
        busy, own, at = {}, [], start
        for name, share in phases:
            ns = int((end - start) * share)
            busy[name] = ns
            own.append([name, at, at + ns, rng.randrange(1, 9)])
            at += ns
        member = {"thread": thread, "begin_ns": start, "end_ns": end, "busy_ns": busy}
        members.append({**member, "spans": own} if spans else member)
    return {
        "group": group,
        "begin_ns": begin,
        "end_ns": begin + length,
        "parallel": parallel,
        "threads": members,
    }


def wall_times(record: dict[str, Any]) -> dict[str, float]:
    """Phase times by the recorder's rule, in ns: a region's wall time divided in proportion to busy time."""
    walls: dict[str, float] = {}
    for region in record["regions"]:
        busy: dict[str, int] = {}
        for thread in region["threads"]:
            for name, ns in thread["busy_ns"].items():
                busy[name] = busy.get(name, 0) + ns
        for name, ns in busy.items():
            walls[name] = walls.get(name, 0.0) + (region["end_ns"] - region["begin_ns"]) * ns / sum(
                busy.values()
            )
    return walls


def records(
    steps: int,
    threads: int,
    layers: int = 1,
    spans: bool = True,
    seed: int = 1,
    slower: float = 1.0,
    limits: bool = True,
    length_ms: float = 20.0,
) -> Iterator[dict[str, Any]]:
    """Passes, forward and backward of each layer per step, of the form ``amx_sft_moe.step/1``.

    `slower` multiplies the time of D3_gemm's region alone.
    """
    rng = random.Random(seed)
    clock = 1_000_000_000_000
    for step in range(steps):
        for kind, layout in (("forward", FORWARD), ("backward", BACKWARD)):
            for layer in range(layers) if kind == "forward" else reversed(range(layers)):
                begin, regions = clock, []
                whole = length_ms * 1e6 * rng.lognormvariate(0, 0.06) * (3 if rng.random() < 0.004 else 1)
                for group, phases, parallel, share in layout:
                    factor = slower if phases[0][0] == "D3_gemm" else 1.0
                    length = int(whole * share * factor)
                    regions.append(_region(group, phases, parallel, clock, length, threads, spans, rng))
                    clock += length + 1500
                record = {
                    "format": "amx_sft_moe.step/1",
                    "step": kind,
                    "index": step,
                    "name": f"layers.{layer}",
                    "kernel": "avx512",
                    "pid": 123,
                    "caller": 0,
                    "operator": layer + 1,
                    "tokens": 512,
                    "routed_rows": 4096,
                    "threads": threads,
                    "begin_ns": begin,
                    "end_ns": clock,
                    "total_ms": round((clock - begin) * 1e-6, 3),
                    "sync_points": 4,
                    "regions": regions,
                }
                if limits:
                    record |= {"peak_gflops": 1000.0, "bandwidth_gbs": 40.0}
                walls = wall_times(record)
                record["phases_ms"] = {name: round(ns * 1e-6, 6) for name, ns in walls.items()}
                if kind == "backward":
                    record["phases_ms"] |= {"D2_quantize": 0.0, "GU1_base_passes_total": 1.0}
                groups: dict[str, float] = {}
                for region in regions:
                    length = (region["end_ns"] - region["begin_ns"]) * 1e-6
                    groups[region["group"]] = groups.get(region["group"], 0.0) + length
                record["groups_ms"] = groups
                record["phases_flop"] = {n: round(RATES[n][0] * ns) for n, ns in walls.items()}
                record["phases_bytes"] = {n: round(RATES[n][1] * ns) for n, ns in walls.items()}
                yield record
                clock += 300_000


def old_form(record: dict[str, Any]) -> dict[str, Any]:
    """The same pass in the form of the line before ``amx_sft_moe.step/1``."""
    gone = (
        "format",
        "index",
        "pid",
        "caller",
        "operator",
        "threads",
        "end_ns",
        "peak_gflops",
        "bandwidth_gbs",
        "phases_flop",
        "phases_bytes",
    )
    old = {key: value for key, value in record.items() if key not in gone}
    keep = ("thread", "begin_ns", "end_ns", "busy_ns")
    old["regions"] = [
        {key: region[key] for key in ("group", "begin_ns", "end_ns")}
        | {"threads": [{key: thread[key] for key in keep} for thread in region["threads"]]}
        for region in record["regions"]
    ]
    return old


def write_lines(path: Path, passes: Iterable[dict[str, Any]]) -> Path:
    """JSON lines."""
    with path.open("w", encoding="utf-8") as out:
        for record in passes:
            out.write(json.dumps(record) + "\n")
    return path


def events(passes: Iterable[dict[str, Any]], caller: int = 0) -> Iterator[dict[str, Any]]:
    """The events of our Chrome trace: passes on the caller's thread, groups and phases on those that took
    part."""

    def one(category: str, name: str, thread: int, begin: int, end: int, **args: Any) -> dict[str, Any]:
        when = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        return {
            "ph": "X",
            "name": name,
            "pid": 123,
            "tid": caller + thread,
            "cat": category,
            **when,
            "args": args,
        }

    passes = list(passes)
    for thread in range(max((record["threads"] for record in passes), default=0)):
        name = {"name": f"thread {thread}"}
        yield {"ph": "M", "name": "thread_name", "pid": 123, "tid": caller + thread, "args": name}
    for record in passes:
        layer, regions = record["name"], record["regions"]
        facts = {key: record[key] for key in ("operator", "tokens", "routed_rows", "kernel")}
        name = f"{layer} {record['step']}".strip()
        yield one(
            "step", name, 0, record["begin_ns"], record["end_ns"], layer=layer, step=record["index"], **facts
        )
        busy: dict[str, int] = {}
        for region in regions:
            for thread in region["threads"]:
                for phase, ns in thread["busy_ns"].items():
                    busy[phase] = busy.get(phase, 0) + ns
        for region in regions:
            for thread in region["threads"]:
                extent = region if thread["thread"] == 0 else thread
                begin, end = extent["begin_ns"], extent["end_ns"]
                yield one(
                    "group", region["group"], thread["thread"], begin, end, layer=layer, step=record["index"]
                )
                for phase, begin, end, tasks in thread["spans"]:
                    share = (end - begin) / max(busy[phase], 1)
                    work = {
                        key: round(record[f"phases_{key}"].get(phase, 0) * share) for key in ("flop", "bytes")
                    }
                    yield one("phase", phase, thread["thread"], begin, end, tasks=tasks, **work)
            when = {"ts": region["begin_ns"] / 1000, "args": {"value": 780.0}}
            yield {"ph": "C", "name": "GFLOP/s", "pid": 123, "tid": caller, **when}


def write_trace(path: Path, passes: Iterable[dict[str, Any]], form: str = "array") -> Path:
    """Our Chrome trace.

    `form`: "array" as the recorder writes it, without the closing bracket; "object" with limits in otherData;
    "cut" an object that ends in the middle of an event.
    """
    lines = (json.dumps(event) for event in events(passes))
    with path.open("w", encoding="utf-8") as out:
        if form == "array":
            out.write("[\n")
            out.writelines(line + ",\n" for line in lines)
            return path
        out.write('{"traceEvents":[\n' + ",\n".join(lines))
        if form == "cut":
            out.write(',\n{"ph":"X","cat":"phase","na')
        else:
            other = {"kernel": "avx512", "peak_gflops": 1000.0, "bandwidth_gbs": 40.0}
            out.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(other)}}}\n')
    return path


def text_dump(record: dict[str, Any]) -> str:
    """The text form of a pass."""
    prefixes = {
        "forward_gather": "GATHER",
        "forward_gate_up": "GU",
        "forward_down": "DOWN",
        "forward_sum_tokens": "SUM",
        "backward_down": "DOWN",
        "backward_activation": "ACT",
        "backward_gate_up": "GU",
    }
    walls, total, text = wall_times(record), 0.0, ""
    for group, phases in PHASES_OF_GROUPS.items():
        own = {name: walls[name] * 1e-6 for name in phases if name in walls}
        for name, ms in own.items():
            if name != group:  # the only one of its group, whose line says it
                text += f"[{prefixes[group]}] {name}: {ms:.3f} ms\n"
        total += sum(own.values())
        if own:
            prefix = f"{record['step'][:1].upper()}WD TIMER"
            text += f"[{prefix}] {group}: {sum(own.values()):.3f} ms (total: {total:.3f} ms)\n"
    return text


TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "NVTX_EVENTS": "start INT NOT NULL, end INT, eventType INT NOT NULL, text TEXT, globalTid INT, textId INT, "
    "domainId INT",
    "OSRT_API": "start INT, end INT, eventClass INT NOT NULL, globalTid INT, nameId INT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INT, end INT, deviceId INT, streamId INT, globalPid INT, "
    "demangledName INT, shortName INT",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INT, end INT, deviceId INT, streamId INT, globalPid INT, "
    "bytes INT, copyKind INT",
    "ThreadNames": "nameId INT, priority INT, globalTid INT",
}


def write_nsys(
    path: Path,
    rows: dict[str, Iterable[tuple[Any, ...]]],
    strings: dict[int, str],
    leave_out: Iterable[str] = (),
) -> Path:
    """An export with the tables of TABLES that `rows` names; columns in `leave_out` do not exist."""
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE StringIds ({TABLES['StringIds']})")
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", strings.items())
    for table, values in rows.items():
        columns = [part.strip() for part in TABLES[table].split(",")]
        kept = [place for place, column in enumerate(columns) if column.split()[0] not in leave_out]
        connection.execute(f"CREATE TABLE {table} ({', '.join(columns[place] for place in kept)})")
        marks = ", ".join("?" * len(kept))
        connection.executemany(
            f"INSERT INTO {table} VALUES ({marks})", ([row[place] for place in kept] for row in values)
        )
    connection.commit()
    connection.close()
    return path


def global_tid(process: int, thread: int) -> int:
    """nsys's serialised identity of a thread, with a machine's number in the upper bits as real files have
    it."""
    return (1 << 48) | (process << 24) | thread


def passes_of(count: int = 3, **options):
    return list(records(count, options.pop("threads", 3), **options))


def read_or_message(path: Path) -> timeline.Timeline | str:
    try:
        return timeline.read(path)
    except TimelineError as error:
        return str(error)


# NVTX events of an export of Nsight Systems, and the names that it keeps apart.
NVTX = [
    # start, end, eventType, text, globalTid, textId, domainId
    (0, None, 75, "library", global_tid(40, 41), None, 1),
    (100, 900, 59, None, global_tid(40, 41), 1, 1),
    (200, 300, 59, "inner", global_tid(40, 41), None, 0),
    (150, 950, 59, None, global_tid(40, 42), 1, 0),
    (120, 130, 60, "started", global_tid(40, 41), None, 1),
    (500, None, 59, "open", global_tid(40, 41), None, 0),
    (500, None, 34, "mark", global_tid(40, 41), None, 0),
    ("x", 700, 59, "bad", global_tid(40, 41), None, 0),
]
STRINGS = {1: "outer", 2: "read", 3: "void gemm<float>(int)", 4: "gemm", 5: "worker"}


def walls(read: timeline.Timeline) -> dict[tuple[str, int, str], float]:
    """Wall ns by kind of step, order of the pass and phase; phases without time left out."""
    table = read.phases.merge(read.passes, left_on="pass", right_index=True)
    rows = zip(table["step"], table["index"], table["phase"], table["wall_ns"], strict=True)
    return {(step, index, phase): ns for step, index, phase, ns in rows if ns > 0}


def expected_walls(records: list[dict]) -> dict[tuple[str, int, str], float]:
    return {(r["step"], r["index"], name): ns for r in records for name, ns in wall_times(r).items()}
