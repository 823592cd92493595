"""An estimate of one step on a 60-core Xeon with AMX, from counted instructions: a model. Nothing here was
timed on a machine of that size.

    python benchmarks/amx_model.py [--tokens 128] [--spread uniform] [--regions]
    python benchmarks/amx_model.py --threads 8 --ghz 2.66 --bandwidth 84

The second form is for a machine at hand, whose step `bench_step deepseek-v3 128 amx_bf16 8` times: threads, GHz
of its cores and GB/s as measured. README.md tells how near the model came.

The layer is that of the published profile (E=256 k=8 H=7168 I=2048 r=16 T=128, 60 threads). Where numbers come
from:
  counts     the operator itself with a kernel that counts its tile instructions (bench_tasks list);
             `bench_tasks check` compares it with the emulator, which executes them
  cycles     of an instruction: PRODUCT and the constants after it
  vector     packing, epilogues, activation, sums: measured with the counting kernel on one core of the machine
             that task_costs.json names, and scaled by frequency
  bytes      each weight once per pass, activations and LoRA as tasklist.TaskList.bytes_of says
  threads    the replay of the operator's own task list on all threads, which share the memory's bandwidth
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import replay
import tasklist
from tasklist import Costs, Region, Task, TaskList
from whole_numbers import positive

PUBLISHED_MS = {"forward": 129.6, "backward": 341.6}
SHAPE, THREADS = "deepseek-v3", 60  # of the published profile

# Cycles between two of the same instruction, and until a product can be added to again: Intel 64 and IA-32
# Architectures Optimization Reference Manual, volume 1 (document 248966), chapter 20, Table 20-2: TDPBF16PS
# 16 and 52, TILELOADD 8 and 45, TILESTORED 16, LDTILECFG 204 of latency. README.md tells what was confirmed.
# 16, 8 and 16 also follow from 1024 bf16 operations a cycle and core for 2 x 16 x 16 x 32, two loads of 64
# bytes a cycle and one store.
PRODUCT, PRODUCT_LATENCY = 16, 52
LOAD, LOAD_LATENCY = 8, 45
STORE, ZERO, CONFIGURE = 16, 1, 200
# Rows up to which gemm_nn multiplies weights as they lie, with twice the products.
FEW_ROWS = 32
# The core on which vector work was measured, a Xeon with AMX: its peak of fp32 FMA is 240 GFLOP/s, 64 a cycle.
MEASURED_GHZ = 3.75


@dataclass(frozen=True)
class Xeon:
    """``bandwidth``: GB/s of all memory channels by their data rate; ``reached``: the share that reads get."""

    name: str
    ghz: float
    bandwidth: float
    reached: float = 0.8
    threads: int = THREADS

    @property
    def bytes_per_ns(self) -> float:
        return self.bandwidth * self.reached


# Base frequency: what 60 cores hold under AMX at any rate. Eight channels of DDR5, 8 bytes wide.
XEONS = (
    Xeon("Platinum 8490H (60 cores), DDR5-4800", 1.9, 8 * 4.8 * 8),
    Xeon("Platinum 8580 (60 cores), DDR5-5600", 2.0, 8 * 5.6 * 8),
)


def tile_cycles(phase: dict[str, Any]) -> float:
    """Of one core for all of a phase's tile instructions. Products of one accumulator wait for each other;
    loads run beside products; a block begins with a load's latency and ends with a product's."""
    chains = enumerate(phase["steps"], start=1)
    products = sum(steps * max(PRODUCT * n, PRODUCT_LATENCY, LOAD * (n + 1)) for n, steps in chains)
    overhead = phase["blocks"] * (LOAD_LATENCY + PRODUCT_LATENCY) + phase["ldtilecfg"] * CONFIGURE
    return products + overhead + phase["tilestored"] * STORE + phase["tilezero"] * ZERO


def tiles(n: int) -> int:
    return (n + 15) // 16


def products_of(tasks: TaskList, region: str, task: Task) -> float:
    """TDPBF16PS of a task, LoRA's included; only their proportions within a region matter."""
    h, i, r, m = tasks.hidden, tasks.intermediate, tasks.rank, task.rows
    if region in tasklist.TOKEN_REGIONS or task.expert_rows == 0:
        return 0.0
    depth = (task.expert_rows + 31) // 32
    # Of gemm_nn: LoRA's K of 16 fills half a step of packed rows, and a whole one of rows as they lie.
    twice = 2 if m <= FEW_ROWS else 1
    k_steps = {
        ("gather", 0): 2 * tiles(r) * h / 32,
        ("gate_up", 0): 2 * tiles(task.cols) * (h / 32 + 1),
        ("down", 0): tiles(task.cols) * (i / 32 + 1),
        ("scatter", 0): twice * tiles(r) * h / 32,
        ("grad_down", 0): tiles(task.cols) * (twice * h / 32 + 1),
        ("grad_activation", 0): twice * 2 * tiles(r) * i / 32,
        ("grad_gate_up", 0): tiles(task.cols) * (twice * 2 * i / 32 + 2),
    }
    if (region, task.kind) in k_steps:
        return k_steps[region, task.kind] * tiles(m)
    factors = 2 if (region, task.kind) == ("grad_gate_up", 1) else 1
    return float(factors * tiles(r) * tiles(task.cols) * depth)


class AmxCosts(Costs):
    """A task's vector work as measured, and its share of its region's tile instructions."""

    def __init__(self, vector: Costs, tasks: TaskList, ghz: float) -> None:
        self._vector, self._tasks = vector, tasks
        self._vector_scale = MEASURED_GHZ / ghz
        self._ns_per_product: dict[str, float] = {}
        for region in tasks.regions:
            cycles = sum(tile_cycles(phase) for phase in region.phases)
            products = sum(products_of(tasks, region.name, t) for t in region.tasks)
            self._ns_per_product[region.name] = cycles / ghz / products if products else 0.0

    def ns(self, region: str, task: Task) -> float:
        vector = self._vector.ns(region, task) * self._vector_scale
        if task.kind == tasklist.LORA_A_DOWN:  # its products are counted in the region's
            return vector
        return vector + products_of(self._tasks, region, task) * self._ns_per_product[region]


@dataclass(frozen=True)
class RegionEstimate:
    """Milliseconds of all threads: what bounds the region, and the replay, which has both at once."""

    name: str
    tile_ms: float
    vector_ms: float
    memory_ms: float
    replay_ms: float

    @property
    def bound_ms(self) -> float:
        return max(self.tile_ms + self.vector_ms, self.memory_ms)

    @property
    def apart_ms(self) -> float:
        """If memory waited while cores work, and cores while it is read."""
        return self.tile_ms + self.vector_ms + self.memory_ms


def estimate_region(tasks: TaskList, region: Region, costs: AmxCosts, xeon: Xeon) -> RegionEstimate:
    simulated = replay.replay_region(tasks, region, costs, xeon.threads, xeon.bytes_per_ns)
    unbound = replay.replay_region(tasks, region, costs, xeon.threads, None)
    tile = sum(tile_cycles(phase) for phase in region.phases) / xeon.ghz
    memory = sum(tasks.bytes_of(region.name, t) for t in region.tasks) / xeon.bytes_per_ns
    return RegionEstimate(
        region.name,
        tile / xeon.threads / 1e6,
        (unbound.outcome.busy_ns - tile) / xeon.threads / 1e6,
        memory / 1e6,
        simulated.total_ns / 1e6,
    )


def estimate(tasks: TaskList, vector: Costs, xeon: Xeon) -> list[RegionEstimate]:
    costs = AmxCosts(vector, tasks, xeon.ghz)
    return [estimate_region(tasks, region, costs, xeon) for region in tasks.regions]


def pass_ms(estimates: Iterable[RegionEstimate], forward: bool, figure: str) -> float:
    names = tasklist.FORWARD if forward else tasklist.BACKWARD
    return sum(getattr(e, figure) for e in estimates if e.name in names)


def print_regions(estimates: Iterable[RegionEstimate]) -> None:
    print("| region | tiles, ms | vector, ms | memory, ms | replayed, ms |")
    print("| --- | --- | --- | --- | --- |")
    for e in estimates:
        print(f"| {e.name} | {e.tile_ms:.2f} | {e.vector_ms:.2f} | {e.memory_ms:.2f} | {e.replay_ms:.2f} |")
    print()


def print_counts(tasks: TaskList) -> None:
    print("| phase | TDPBF16PS | TILELOADD | loads a product | LDTILECFG a task |")
    print("| --- | --- | --- | --- | --- |")
    for region in tasks.regions:
        for phase in region.phases:
            products = phase["tdpbf16ps"]
            if products:
                print(
                    f"| {region.name}: {phase['name']} | {products:,} | {phase['tileloadd']:,} "
                    f"| {phase['tileloadd'] / products:.2f} | {phase['ldtilecfg'] / region.counted_tasks:.2f} |"
                )
    print()


def assumed_machines() -> list[Xeon]:
    variants = []
    for xeon in XEONS:
        variants.append(xeon)
        if xeon is XEONS[0]:
            variants += [replace(xeon, ghz=ghz) for ghz in (1.5, 2.6, 3.2)]
            variants += [replace(xeon, reached=reached) for reached in (0.6, 0.9)]
            variants.append(replace(xeon, name="two sockets, 30 threads each", bandwidth=614.4))
    return variants


def print_estimates(tasks: TaskList, vector: Costs, machines: Iterable[Xeon]) -> None:
    print("| machine | GHz | GB/s | forward, ms: bound, replayed, no overlap | backward, ms |")
    print("| --- | --- | --- | --- | --- |")
    for xeon in machines:
        estimates = estimate(tasks, vector, xeon)
        cells = []
        for forward in (True, False):
            figures = [pass_ms(estimates, forward, f) for f in ("bound_ms", "replay_ms", "apart_ms")]
            cells.append(", ".join(f"{ms:.0f}" for ms in figures))
        print(f"| {xeon.name} | {xeon.ghz} | {xeon.bytes_per_ns:.0f} | {cells[0]} | {cells[1]} |")


def print_published() -> None:
    published = " | ".join(str(PUBLISHED_MS[name]) for name in ("forward", "backward"))
    print(f"| published, KTransformers' operator on 60 threads | | | {published} |")


def machine_at_hand(args: argparse.Namespace) -> Xeon | None:
    if args.ghz is None and args.bandwidth is None and args.threads is None:
        return None
    if args.ghz is None or args.bandwidth is None or args.threads is None:
        raise SystemExit("amx_model.py: expected --threads, --ghz and --bandwidth together")
    if min(args.threads, args.ghz, args.bandwidth) <= 0:
        raise SystemExit("amx_model.py: expected --threads, --ghz and --bandwidth above 0")
    return Xeon(f"{args.threads} threads", args.ghz, args.bandwidth, reached=1.0, threads=args.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=tasklist.PROGRAM)
    parser.add_argument("--costs", type=Path, default=tasklist.COSTS)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--spread", default="uniform", choices=("uniform", "zipf", "even"))
    parser.add_argument(
        "--regions", action="store_true", help="counts, and each region on the first machine or the one at hand"
    )
    parser.add_argument("--threads", type=positive, help="of a machine at hand, one on each core")
    parser.add_argument("--ghz", type=float, help="of its cores")
    parser.add_argument("--bandwidth", type=float, help="GB/s that these threads read")
    args = parser.parse_args()
    here = machine_at_hand(args)
    threads = here.threads if here else THREADS
    vector = tasklist.load_costs(args.costs, SHAPE, replay.COUNTED_KERNEL)
    tasks = tasklist.list_tasks(args.program, SHAPE, args.tokens, args.spread, replay.COUNTED_KERNEL, threads)
    if args.regions:
        print_counts(tasks)
        print_regions(estimate(tasks, vector, here or XEONS[0]))
    print_estimates(tasks, vector, [here] if here else assumed_machines())
    if here is None:
        print_published()


if __name__ == "__main__":
    main()
