"""The simulated threads of benchmarks/replay.py and the model built on them: small cases worked out by hand."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import amx_sft_moe

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import amx_model  # noqa: E402
import replay  # noqa: E402
import schedule  # noqa: E402
import tasklist  # noqa: E402
from schedule import Job  # noqa: E402


def jobs(*ns: float, **fields: float) -> list[Job]:
    return [Job(n, **fields) for n in ns]


class TestThreads:
    def test_next_task_goes_to_the_next_free_thread(self) -> None:
        outcome = schedule.run(jobs(5, 3, 3, 3), 2)  # 5, 3 | 3, 3 -> the last begins at 5 or at 6: 5
        assert (outcome.wall_ns, outcome.busy_ns) == (8, 14)
        assert outcome.idle(2) == pytest.approx(2 / 16)

    def test_order_of_the_list_is_kept(self) -> None:
        assert schedule.run(jobs(3, 3, 5), 2).wall_ns == 8
        assert schedule.run(jobs(5, 3, 3), 2).wall_ns == 6

    @pytest.mark.parametrize("memory", [None, 1e9])
    @pytest.mark.parametrize(
        ("ns", "wall"),
        [
            ((4, 3, 5, 0, 0, 0, 0), 7),  # 4 and 3; 5: from both ends. In order it were 4; 3 and 5
            ((4, 3, 5, 2, 1, 1, 1), 9),  # 4, 3, 1, 1; 5, 2, 1: the last four in order. Else 5 were the last
        ],
    )
    def test_half_of_the_threads_take_products_from_the_back(
        self, ns: tuple[float, ...], wall: float, memory: float | None
    ) -> None:
        work = jobs(*ns)
        outcome = (
            schedule.run(work, 2, products=7)
            if memory is None
            else schedule.run_with_memory(work, 2, memory, products=7)
        )
        assert outcome.wall_ns == pytest.approx(wall, abs=0.01)

    def test_the_queue_is_that_of_the_operator(self) -> None:  # the same cases as in test_parallel.cpp
        def taken(tasks: int, products: int, threads: int, by: list[int]) -> list[float | None]:
            queue = schedule.TaskQueue(jobs(*range(tasks)), threads, products)
            return [job.ns if (job := queue.take(thread)) is not None else None for thread in by]

        all_twelve = [0, 5, 1, 4, 3, 2, 6, 7, 8, 9, 10, 11, None, None]
        assert taken(12, 12, 3, [0, 1, 2, 1, 1, 0, 1, 1, 0, 2, 2, 1, 0, 1]) == all_twelve
        assert taken(12, 3, 2, [1, 0, 1, 1, 0]) == [2, 0, 1, 3, 4]
        assert taken(7, 7, 2, [1] * 7) == [2, 1, 0, 3, 4, 5, 6]
        assert taken(3, 3, 2, [1, 1, 0]) == [0, 1, 2]

    def test_compute_and_memory_are_used_at_a_time(self) -> None:
        # Half need all of the memory and half none: side by side both take as long as one kind alone.
        work = [Job(10.0)] * 20 + [Job(10.0, bytes=100.0)] * 20
        assert schedule.run_with_memory(work, 2, 10.0, products=40).wall_ns == pytest.approx(220)

    def test_more_threads_than_tasks(self) -> None:
        outcome = schedule.run(jobs(4, 4), 8)
        assert outcome.idle(8) == pytest.approx(0.75)

    def test_nothing_to_do(self) -> None:
        assert schedule.run([], 4).idle(4) == 0
        assert schedule.run_with_memory([], 4, 1.0).wall_ns == 0

    @pytest.mark.parametrize("memory", [None, 1e9])
    def test_last_of_a_group_goes_on(self, memory: float | None) -> None:
        grouped = [Job(2, group=0), Job(6, group=0), Job(2, group=1), Job(1, group=1)]

        def after(group: int) -> Job:
            return Job(10 if group == 0 else 0.5)

        outcome = (
            schedule.run(grouped, 2, after)
            if memory is None
            else schedule.run_with_memory(grouped, 2, memory, after)
        )
        # Thread 0: 2, 2, 1 and group 1's rest at 5.5; thread 1: 6 and group 0's rest.
        assert outcome.wall_ns == pytest.approx(16)
        assert outcome.busy_ns == pytest.approx(11 + 10.5)


class TestMemory:
    def test_as_fast_as_alone_where_it_suffices(self) -> None:
        work = [Job(float(n), bytes=float(n)) for n in (7, 3, 5, 5, 2, 9)]
        assert schedule.run_with_memory(work, 3, 3.0).wall_ns == pytest.approx(schedule.run(work, 3).wall_ns)

    def test_shared_by_all(self) -> None:
        outcome = schedule.run_with_memory(jobs(*[10] * 8, bytes=40), 4, 4.0)  # 320 bytes at 4 a ns
        assert outcome.wall_ns == pytest.approx(80)
        assert outcome.idle(4) == pytest.approx(0)

    def test_who_needs_none_is_not_slowed(self) -> None:
        outcome = schedule.run_with_memory([Job(10, bytes=100), Job(10)], 2, 5.0)
        assert outcome.wall_ns == pytest.approx(20)
        assert outcome.busy_ns == pytest.approx(30)


def line(region: str, rows: int, ns: int, columns: int = 10) -> dict[str, object]:
    return {"region": region, "kind": 0, "rows": rows, "columns": columns, "ns": ns}


LINES = [
    line("down", 4, 100),
    line("down", 8, 300),
    line("down", 9, 1000),
    line("down", 16, 1700),
    line("grad_down", 8, 300),
    line("grad_down", 9, 1000),
    line("grad_down", 16, 1700),
    line("sum_tokens", 4, 50, 2),
]


def task(rows: int, expert_rows: int) -> tasklist.Task:
    return tasklist.Task(0, 0, 0, expert_rows, 0, rows, 0, 20)


class TestCosts:
    @pytest.mark.parametrize(
        ("in_place_rows", "rows", "expert_rows", "ns"),
        [
            (8, 4, 4, 200),
            (8, 6, 6, 400),  # between two that were measured
            (8, 2, 2, 200),  # below the first: the weights are read all the same
            (8, 18, 18, 20 * 190),  # above the last: on with the last slope
            (8, 5, 261, 2000),  # the rest of a large expert is not multiplied in place
            (8, 10, 10, 2200),
            (12, 5, 261, 20 * 170),  # 9 rows were in place: 16 are the first strips
            (12, 10, 10, 2000),  # in place, beyond the last that was measured
            (12, 13, 13, 20 * 170),  # strips, below the first that were measured
            (0, 5, 261, 300),  # the kernel always packs
        ],
    )
    def test_interpolated(self, in_place_rows: int, rows: int, expert_rows: int, ns: float) -> None:
        costs = tasklist.Costs(LINES, in_place_rows)
        assert costs.ns("down", task(rows, expert_rows)) == pytest.approx(ns)

    @pytest.mark.parametrize(("rows", "ns"), [(5, 600), (9, 2000), (12, 2600)])
    def test_backward_goes_by_a_tasks_own_rows(self, rows: int, ns: float) -> None:
        assert tasklist.Costs(LINES, 12).ns("grad_down", task(rows, 261)) == pytest.approx(ns)

    def test_tokens(self) -> None:
        assert tasklist.Costs(LINES, 8).ns("sum_tokens", tasklist.Task(0, 0, -1, 0, 16, 3, 0, 0)) == 75


def test_rows_in_place_are_those_of_the_microkernels() -> None:
    headers = sorted((ROOT / "include" / "amx_sft_moe" / "arch").glob("*/microkernel*.hpp"))
    tiles = re.compile(r"InPlaceDots<(\w+)::InPlace(\w*)Tiles, \d+, (\d+),")  # MostOfShort
    found = [match for header in headers for match in tiles.findall(header.read_text(encoding="utf-8"))]
    suffixes = {"": "", "Pair": "_bf16"}
    assert {arch + suffixes[kind]: int(rows) for arch, kind, rows in found} == tasklist.IN_PLACE_ROWS


def test_committed_costs_cover_what_is_replayed() -> None:
    for shape in replay.MEASURED_ROWS:
        for kernel in (replay.MEASURED_KERNEL, replay.COUNTED_KERNEL):
            costs = tasklist.load_costs(tasklist.COSTS, shape, kernel)
            for region, kinds in (
                ("gate_up", (-1, 0)),
                ("grad_down", (0, 1, 2)),
                ("grad_gate_up", (0, 1, 2, 3)),
            ):
                for kind in kinds:
                    few, many = (costs.per_column(region, kind, rows, rows) for rows in (1, 128))
                    assert few > 0
                    assert many > few or kernel == replay.COUNTED_KERNEL  # that packs weights whatever the rows


def test_tile_cycles() -> None:
    phase = {"steps": [10, 0, 0, 5, 0, 1], "blocks": 2, "ldtilecfg": 1, "tilestored": 3, "tilezero": 3}
    # One accumulator waits for itself, 52; four take 64, six 96.
    assert amx_model.tile_cycles(phase) == 10 * 52 + 5 * 64 + 96 + 2 * (45 + 52) + 200 + 3 * 17


def needs_bench_tasks(test: Callable[..., None]) -> Callable[..., None]:
    built = pytest.mark.skipif(not tasklist.PROGRAM.exists(), reason="bench_tasks is not built")
    avx512 = amx_sft_moe.info()["instruction_sets"]["avx512"]
    return built(pytest.mark.skipif(not avx512, reason="its row operations need AVX512")(test))


# By the committed costs, without what the calling thread takes here between regions: nothing is timed now.
# Lists differ by machine in what depends on L2.
@needs_bench_tasks
@pytest.mark.parametrize(("tokens", "most"), [(128, 0.1), (512, 0.05)])
@pytest.mark.parametrize("spread", replay.SPREADS)
def test_sixty_threads_seldom_wait_for_one_another(spread: str, tokens: int, most: float) -> None:
    kernel = replay.MEASURED_KERNEL
    tasks = tasklist.list_tasks(tasklist.PROGRAM, "qwen3-30b-a3b", tokens, spread, kernel, 60)
    untimed = replace(
        tasks, route_ns=[0, 0], regions=[replace(region, serial_ns=0) for region in tasks.regions]
    )
    costs = tasklist.load_costs(tasklist.COSTS, "qwen3-30b-a3b", kernel)
    assert replay.idle_share(untimed, replay.replay(untimed, costs, 60), 60) < most


@needs_bench_tasks
@pytest.mark.parametrize("spread", replay.SPREADS)
def test_lists_hold_every_row_and_column(spread: str) -> None:
    tasks = tasklist.list_tasks(tasklist.PROGRAM, "small", 24, spread, replay.COUNTED_KERNEL, 1)
    assert tuple(r.name for r in tasks.regions) == tasklist.FORWARD + tasklist.BACKWARD
    routed = tasks.tokens * tasks.top_k
    by_name = {r.name: r for r in tasks.regions}
    for region, columns in (
        ("gate_up", tasks.intermediate),
        ("down", tasks.hidden),
        ("grad_gate_up", tasks.hidden),
    ):
        cells = sum(t.rows * t.cols for t in by_name[region].tasks if t.kind == 0)
        assert cells == routed * columns
    # What the model shares out among tasks is close to what was counted: LoRA's K of 16 fills half a step.
    counted = sum(p["tdpbf16ps"] for p in by_name["grad_gate_up"].phases)
    modelled = sum(amx_model.products_of(tasks, "grad_gate_up", t) for t in by_name["grad_gate_up"].tasks)
    assert modelled == pytest.approx(counted, rel=0.01)


# What taking them from both ends is for: those of most rows at the one, of fewest at the other.
@needs_bench_tasks
def test_products_with_weights_are_the_first_tasks_the_busiest_before_others() -> None:
    tasks = tasklist.list_tasks(tasklist.PROGRAM, "small", 24, "zipf", replay.COUNTED_KERNEL, 2)
    by_name = {r.name: r for r in tasks.regions}
    for region in (by_name[name] for name in replay.WITH_WEIGHTS):
        products = region.tasks[: replay.weight_products(region)]
        assert {t.kind for t in products} == {0}
        assert len({t.expert for t in products}) == tasks.active_experts
        rows = [t.expert_rows for t in products]
        assert rows == sorted(rows, reverse=True)
        assert rows[0] > rows[-1]


@needs_bench_tasks
@pytest.mark.parametrize("memory", [None, 246.0])
def test_products_of_all_four_phases_are_taken_from_both_ends(
    memory: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    class Queue(schedule.TaskQueue):
        def __init__(self, jobs: Sequence[Job], threads: int, products: int) -> None:
            super().__init__(jobs, threads, products)
            taken.append(products)

    monkeypatch.setattr(schedule, "TaskQueue", Queue)
    kernel = replay.MEASURED_KERNEL
    tasks = tasklist.list_tasks(tasklist.PROGRAM, "qwen3-30b-a3b", 8, "uniform", kernel, 2)
    replay.replay(tasks, tasklist.load_costs(tasklist.COSTS, "qwen3-30b-a3b", kernel), 2, memory)
    with_weights = [
        name for name, products in zip(tasklist.FORWARD + tasklist.BACKWARD, taken, strict=True) if products > 0
    ]
    assert with_weights == ["gate_up", "down", "grad_down", "grad_gate_up"]


def test_a_machine_at_hand_is_told_as_a_whole() -> None:
    def of(**given: float | None) -> amx_model.Xeon | None:
        options = {"threads": None, "ghz": None, "bandwidth": None} | given
        return amx_model.machine_at_hand(argparse.Namespace(**options))

    assert of() is None
    here = of(threads=8, ghz=2.5, bandwidth=84.0)
    assert here is not None
    assert (here.threads, here.ghz, here.bytes_per_ns) == (8, 2.5, 84.0)
    for given in (
        {"threads": 8, "ghz": 2.5},
        {"threads": 8, "bandwidth": 84.0},
        {"ghz": 2.5, "bandwidth": 84.0},
    ):
        with pytest.raises(SystemExit, match="together"):
            of(**given)
    with pytest.raises(SystemExit, match="above 0"):
        of(threads=0, ghz=2.5, bandwidth=84.0)
