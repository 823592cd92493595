"""The operator's task lists and what its tasks cost, as ``bench_tasks`` prints them.

Units: nanoseconds, bytes. Rows are routed rows of one expert, columns those of a task's result.
"""

from __future__ import annotations

import bisect
import datetime
import json
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = Path(__file__).resolve().parent.parent / "build" / "benchmarks" / "bench_tasks"
COSTS = Path(__file__).resolve().parent / "task_costs.json"

FORWARD = ("gather", "gate_up", "down", "sum_tokens")
BACKWARD = ("scatter", "grad_down", "grad_activation", "grad_gate_up", "grad_sum_tokens")
TOKEN_REGIONS = ("sum_tokens", "grad_sum_tokens")  # their tasks are tokens, not an expert's rows
# gemm_nt multiplies with weights in place for experts of up to so many rows in all, and in another way (strips,
# or tokens along the lanes) for others, also for a task of their last few rows (InPlaceDots of the kernels'
# microkernels; of avx512 and avx2 where K is up to 4096, else 16). Kernels not named here know one way.
# gemm_nn and gemm_tn choose by a task's own rows, which is what was measured.
NT_REGIONS = ("gather", "gate_up", "down")
IN_PLACE_ROWS = {"avx512": 32, "avx512_bf16": 12, "avx2": 24}
LORA_A_DOWN = -1  # kind of what the last task of a group of gate_up goes on with


class Task(NamedTuple):
    """moe::Task as it was listed; an expert without tokens has no rows."""

    kind: int
    group: int
    expert: int
    expert_rows: int
    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True)
class Region:
    """One parallel region. ``phases``: counted instructions and time of ``counted_tasks`` on one thread, by
    phase."""

    name: str
    serial_ns: int  # of the calling thread before its first task: making the list, waking the team
    counted_tasks: int
    phases: list[dict[str, Any]]
    tasks: list[Task]


@dataclass(frozen=True)
class TaskList:
    """The regions of one forward and one backward, in order."""

    kernel: str
    shape: str
    spread: str
    experts: int
    active_experts: int
    top_k: int
    hidden: int
    intermediate: int
    rank: int
    tokens: int
    threads: int
    route_ns: list[int]  # sorting the routes, before forward and before backward
    regions: list[Region]

    @classmethod
    def parse(cls, text: str) -> TaskList:
        fields = json.loads(text)
        regions = [
            Region(r["name"], r["serial_ns"], r["counted_tasks"], r["phases"], [Task(*t) for t in r["tasks"]])
            for r in fields.pop("regions")
        ]
        return cls(regions=regions, **fields)

    def bytes_of(self, region: str, task: Task) -> float:
        """Memory a task reads and writes. An expert's weights count for its first rows only: the tasks of
        further rows follow soon and find them in a cache that the threads share."""
        h, i, r, weight = self.hidden, self.intermediate, self.rank, 2
        rows, cols, first = task.rows, task.cols, task.row == 0
        if region in TOKEN_REGIONS:
            return rows * h * (4 * self.top_k + 2)
        if task.expert_rows == 0:  # zeros
            return weight * r * (h + i) * (1 if region == "grad_down" else 2)
        per_kind = {
            ("gather", 0): 4 * rows * h + first * 2 * weight * r * h,
            ("gate_up", 0): first * 2 * weight * cols * (h + r) + 6 * rows * cols,
            ("gate_up", LORA_A_DOWN): weight * r * i,
            ("down", 0): first * weight * cols * (i + r) + 4 * rows * cols,
            ("scatter", 0): 4 * rows * h + first * weight * r * h,
            ("grad_down", 0): first * weight * cols * (h + r) + 4 * rows * cols,
            ("grad_down", 1): 4 * rows * cols + weight * r * cols,
            ("grad_down", 2): 2 * rows * cols + weight * r * cols,
            ("grad_activation", 0): 12 * rows * i + first * 2 * weight * r * i,
            ("grad_gate_up", 0): first * 2 * weight * cols * (i + r) + 4 * rows * cols,
            ("grad_gate_up", 1): 2 * rows * cols + 2 * weight * r * cols,
            ("grad_gate_up", 2): 2 * rows * cols + weight * r * cols,
            ("grad_gate_up", 3): 2 * rows * cols + weight * r * cols,
        }
        return float(per_kind[region, task.kind])


def run_program(program: Path, *arguments: object) -> str:
    """What bench_tasks prints; its messages go on to stderr."""
    if not program.exists():
        raise SystemExit(f"{program} is missing: cmake --build build --target bench_tasks")
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def list_tasks(program: Path, shape: str, tokens: int, spread: str, kernel: str, threads: int) -> TaskList:
    return TaskList.parse(run_program(program, "list", shape, tokens, spread, kernel, threads))


class Costs:
    """Measured time of a task by region, kind and rows; linear in rows between what was measured, and in
    columns.

    ``lines`` are those of ``bench_tasks costs``, of products that gemm_nt made in place for experts of up to
    ``in_place_rows``.
    """

    def __init__(self, lines: Iterable[dict[str, Any]], in_place_rows: int) -> None:
        table: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for line in lines:
            table[line["region"], line["kind"]].append((line["rows"], line["ns"] / line["columns"]))
        self._table = {key: sorted(points) for key, points in table.items()}
        self._in_place_rows = in_place_rows

    def per_column(self, region: str, kind: int, rows: int, expert_rows: int) -> float:
        points = self._table[region, kind]
        if region in NT_REGIONS:  # in place, or not: never from one to the other
            in_place = [point for point in points if point[0] <= self._in_place_rows]
            if in_place and expert_rows <= self._in_place_rows:
                rows = min(rows, in_place[-1][0])  # reading the weights is most of it
                points = in_place
            else:
                points = points[len(in_place) :]
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        at = min(bisect.bisect_left(points, (rows,)), len(points) - 1)
        (rows0, ns0), (rows1, ns1) = points[at - 1], points[at]
        return max(ns0 + (ns1 - ns0) * (rows - rows0) / (rows1 - rows0), 0.0)

    def ns(self, region: str, task: Task) -> float:
        if region in TOKEN_REGIONS:
            return task.rows * min(ns for _, ns in self._table[region, 0])
        return max(task.cols, 1) * self.per_column(region, task.kind, task.rows, task.expert_rows)


def machine_kind() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(program: Path, shapes: dict[str, int], kernels: Iterable[str], repeats: int) -> dict[str, Any]:
    """Costs for each shape, up to so many rows an expert, and kernel: minutes of one thread."""
    found = []
    for shape, most_rows in shapes.items():
        for kernel in kernels:
            text = run_program(program, "costs", shape, kernel, most_rows, repeats)
            lines = [json.loads(line) for line in text.splitlines()]
            in_place = IN_PLACE_ROWS.get(kernel, 0)
            found.append({"shape": shape, "kernel": kernel, "in_place_rows": in_place, "lines": lines})
    return {"machine": machine_kind(), "date": datetime.date.today().isoformat(), "costs": found}


def load_costs(path: Path, shape: str, kernel: str) -> Costs:
    """Of the shape with these matrices; the number of experts does not matter to a task."""
    for entry in json.loads(path.read_text())["costs"]:
        if entry["shape"] == shape and entry["kernel"] == kernel:
            return Costs(entry["lines"], entry["in_place_rows"])
    raise SystemExit(f"{path}: no costs of {shape} for {kernel}; python benchmarks/replay.py measure")
