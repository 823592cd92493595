"""The operator's own task lists on simulated threads: how long do they wait for one another?

    python benchmarks/replay.py [--threads 60] [--bandwidth GB/s] [--regions]    the table
    python benchmarks/replay.py measure [--repeats 5]         measures what tasks cost here: task_costs.json

Lists come from the operator (bench_tasks list), costs from task_costs.json, the rule from parallel/tasks.hpp:
a thread that is free takes the next task of the list, of products with weights those of odd number from the
back. Idle is the share of all threads' time in which they have no task, serial work of the calling thread
(sorting routes, making lists) included. Waking threads and taking a task cost nothing here. With --bandwidth
the threads share that much memory bandwidth; without, each task takes what it took alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import schedule
import tasklist
from tasklist import LORA_A_DOWN, Costs, Region, TaskList
from whole_numbers import positive

CONFIGURATIONS = (
    ("deepseek-v3", 128),
    ("qwen3-30b-a3b", 128),
    ("qwen3-30b-a3b", 512),
    ("qwen3-30b-a3b", 2048),
)
SPREADS = ("uniform", "zipf")
MEASURED_KERNEL = "avx512"
COUNTED_KERNEL = "amx_bf16_counted"
WITH_WEIGHTS = ("gate_up", "down", "grad_down", "grad_gate_up")
MEASURED_ROWS = {"qwen3-30b-a3b": 2048, "deepseek-v3": 128}


@dataclass(frozen=True)
class RegionTime:
    """One region replayed; serial_ns before it, on the calling thread."""

    name: str
    tasks: int
    longest_ns: float
    serial_ns: float
    outcome: schedule.Outcome

    @property
    def total_ns(self) -> float:
        return self.serial_ns + self.outcome.wall_ns


def jobs_of(tasks: TaskList, region: Region, costs: Costs) -> list[schedule.Job]:
    grouped = region.name == "gate_up"
    return [
        schedule.Job(costs.ns(region.name, t), tasks.bytes_of(region.name, t), t.group if grouped else -1)
        for t in region.tasks
    ]


def weight_products(region: Region) -> int:
    """How many of the list's first tasks multiply with base weights and are taken from both ends."""
    return sum(t.kind == 0 for t in region.tasks) if region.name in WITH_WEIGHTS else 0


def replay_region(
    tasks: TaskList, region: Region, costs: Costs, threads: int, bandwidth: float | None
) -> RegionTime:
    first_of_group = {t.group: t for t in reversed(region.tasks)}

    def lora_a_down(group: int) -> schedule.Job:
        task = first_of_group[group]._replace(kind=LORA_A_DOWN, col=0, cols=0)
        return schedule.Job(costs.ns(region.name, task), tasks.bytes_of(region.name, task))

    jobs = jobs_of(tasks, region, costs)
    after = lora_a_down if region.name == "gate_up" else None
    if bandwidth is None:
        outcome = schedule.run(jobs, threads, after, products=weight_products(region))
    else:
        outcome = schedule.run_with_memory(jobs, threads, bandwidth, after, products=weight_products(region))
    longest = max((job.ns for job in jobs), default=0.0)
    return RegionTime(region.name, len(jobs), longest, region.serial_ns, outcome)


def replay(tasks: TaskList, costs: Costs, threads: int, bandwidth: float | None = None) -> list[RegionTime]:
    return [replay_region(tasks, region, costs, threads, bandwidth) for region in tasks.regions]


def idle_share(tasks: TaskList, regions: Iterable[RegionTime], threads: int) -> float:
    """Of the whole step."""
    regions = list(regions)
    total = sum(r.total_ns for r in regions) + sum(tasks.route_ns)
    return 1.0 - sum(r.outcome.busy_ns for r in regions) / (threads * total)


def print_regions(regions: Iterable[RegionTime], threads: int) -> None:
    print("| region | tasks | longest task, us | serial, us | wall, us | idle |")
    print("| --- | --- | --- | --- | --- | --- |")
    for r in regions:
        print(
            f"| {r.name} | {r.tasks} | {r.longest_ns / 1e3:.0f} | {r.serial_ns / 1e3:.0f} "
            f"| {r.outcome.wall_ns / 1e3:.0f} | {r.outcome.idle(threads):.1%} |"
        )
    print()


def print_replays(program: Path, costs_file: Path, kernel: str, args: argparse.Namespace) -> None:
    rows = []
    for shape, tokens in CONFIGURATIONS:
        costs = tasklist.load_costs(costs_file, shape, kernel)
        for spread in SPREADS:
            tasks = tasklist.list_tasks(program, shape, tokens, spread, kernel, args.threads)
            regions = replay(tasks, costs, args.threads, args.bandwidth)
            if args.regions:
                print(f"{shape}, T = {tokens}, {spread}, {args.threads} threads\n")
                print_regions(regions, args.threads)
            forward = sum(r.total_ns for r in regions[:4]) + tasks.route_ns[0]
            backward = sum(r.total_ns for r in regions[4:]) + tasks.route_ns[1]
            worst = max(regions, key=lambda r: r.outcome.idle(args.threads) * r.total_ns)
            rows.append(
                f"| {shape} | {tokens} | {spread} | {forward / 1e6:.2f} | {backward / 1e6:.2f} "
                f"| {idle_share(tasks, regions, args.threads):.1%} "
                f"| {worst.name} ({worst.outcome.idle(args.threads):.0%} of {worst.total_ns / 1e6:.2f} ms) |"
            )
    idle = f"idle, {args.threads} threads"
    print(f"| layer | T | routing | forward, ms | backward, ms | {idle} | most idle time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["replay", "measure"], default="replay")
    parser.add_argument("--program", type=Path, default=tasklist.PROGRAM)
    parser.add_argument("--costs", type=Path, default=tasklist.COSTS)
    parser.add_argument("--kernel", default=MEASURED_KERNEL)
    parser.add_argument("--threads", type=positive, default=60)
    parser.add_argument("--bandwidth", type=float, help="GB/s that all threads share")
    parser.add_argument("--regions", action="store_true", help="each region of each step")
    parser.add_argument("--repeats", type=positive, default=5)
    args = parser.parse_args()
    if args.bandwidth is not None and not 0 < args.bandwidth < float("inf"):
        parser.error(f"--bandwidth: expected a number above 0, got {args.bandwidth}")
    if args.command == "measure":
        kernels = (args.kernel, COUNTED_KERNEL)
        found = tasklist.measure(args.program, MEASURED_ROWS, kernels, args.repeats)
        args.costs.write_text(compact(found))
    else:
        print_replays(args.program, args.costs, args.kernel, args)


def compact(costs: dict) -> str:
    """JSON with one cost a line."""
    text = json.dumps(costs)
    return text.replace('{"region"', '\n{"region"').replace('{"shape"', '\n{"shape"') + "\n"


if __name__ == "__main__":
    main()
