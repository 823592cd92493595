"""What benchmarks/peers.py says of the pages that weights lie in, the CPUs it runs on, and its candidates."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from amx_sft_moe.system import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import peers
import this_machine

BYTES = 16 << 20


def tensor_in_pages(advice: int) -> torch.Tensor:
    memory = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
    except OSError:
        pytest.skip("this kernel has no transparent huge pages")
    return torch.frombuffer(memory, dtype=torch.bfloat16).fill_(1.0)


def test_small_pages() -> None:
    assert this_machine.huge_pages_share(tensor_in_pages(mmap.MADV_NOHUGEPAGE)) == 0


@pytest.mark.skipif(machine.huge_pages()["transparent"] not in ("madvise", "always"), reason="turned off here")
def test_huge_pages() -> None:
    tensor = tensor_in_pages(mmap.MADV_HUGEPAGE)
    if "AnonHugePages:         0 kB" in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"):
        pytest.skip("the system has none left")
    assert 0 < this_machine.huge_pages_share(tensor) <= 1  # a mapping's ends rarely are whole ones


@pytest.mark.parametrize(
    ("siblings", "threads", "expected"),
    [
        (["0,2", "1,3", "0,2", "1,3"], 2, {0, 1}),
        (["0-1", "0-1", "2-3", "2-3"], 2, {0, 2}),
        (["0-1", "0-1", "2-3", "2-3"], 3, {0, 1, 2}),
        (["0", "1", "2", "3"], 8, {0, 1, 2, 3}),
        ([None, None, None, None], 3, {0, 1, 2}),  # the system does not say
    ],
)
def test_cpus(siblings: list[str | None], threads: int, expected: set[int], tmp_path: Path) -> None:
    for cpu, list_of_cpu in enumerate(siblings):
        if list_of_cpu is not None:
            (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
            (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{list_of_cpu}\n")
    assert this_machine.cpus_for(threads, {0, 1, 2, 3}, tmp_path) == expected


def test_cpus_are_allowed_ones(tmp_path: Path) -> None:
    assert this_machine.cpus_for(2, {5, 7, 9}, tmp_path) == {5, 7}


@pytest.mark.parametrize("wrong", ["torch-groupd", "tortch-loop", "ours-avx511", "kt-int5", ""])
def test_unknown_candidates(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were timed as another one."""
    monkeypatch.setattr(peers.os, "sched_setaffinity", lambda *_: None)
    arguments = ["--shape", "small", "--threads", str(torch.get_num_threads()), "--peers", f"ours,{wrong}"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        peers.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(f", got {wrong}\n")
    assert "--peers: expected some of ours, ours-fresh, ours-" in error
    assert (
        ", torch-grouped, torch-grouped-fp32, torch-loop, torch-loop-fp32, kt-bf16, kt-bf16-spared, kt-int8, "
        in error
    )


def test_caches_are_counted_once(tmp_path: Path) -> None:
    for cpu, (shared, size) in enumerate([("0-1", "32768K"), ("0-1", "32768K"), ("2", "1024K")]):
        folder = tmp_path / f"cpu{cpu}/cache/index3"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
        (folder / "size").write_text(f"{size}\n")
    assert this_machine.last_level_cache({0, 1, 2}, tmp_path) == 33 << 20
    assert this_machine.last_level_cache({1, 3}, tmp_path) == 32 << 20
    assert this_machine.last_level_cache({0}, tmp_path / "nothing") == 0


def test_no_candidate_is_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(peers, "installed", lambda _: False)
    monkeypatch.setattr(peers.Limits, "measure", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--shape", "small", "--peers", "kt-int4"])
    with pytest.raises(SystemExit) as stop:
        peers.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("argument --peers: expected one that is here, got kt-int4\n")


def test_rivals_of_torch_compute_the_same() -> None:
    problem = peers.Problem.random("small", 40, 1, "zipf", base_gradients=True)
    results = []
    for mode in ("grouped", "loop"):
        peer = peers.Torch(problem, f"{mode}-fp32")
        results.append({"y": peer.forward().detach(), **peer.backward()})
    for name, expected in results[0].items():
        assert peers.relative_error(results[1][name], expected) < 1e-4, name


def test_candidates_are_known() -> None:
    known = peers.known_peers()
    assert {"ours", "ours-fresh", "ours-avx512", "torch-grouped-fp32", "kt-int8"} <= set(known)
    assert len(known) == len(set(known))
    problem = peers.Problem.random("small", 2, 1, "uniform")
    for name in ("ours", "ours-fresh", "torch-grouped", "torch-loop-fp32"):
        assert peers.build(name, problem).forward().shape == (2, problem.hidden)


class FakePeer:
    """A candidate whose passes take so long by a clock of its own."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.now, self.runs = seconds, 0.0, 0

    def forward(self) -> torch.Tensor:
        self.now += self.seconds[min(self.runs, len(self.seconds) - 1)]
        return torch.zeros(1)

    def backward(self) -> dict[str, torch.Tensor]:
        self.now += self.seconds[min(self.runs, len(self.seconds) - 1)]
        self.runs += 1
        return {}


@pytest.mark.parametrize(
    ("seconds", "runs", "median"),
    [
        ([0.5, 0.25], 2, 0.25),  # longer than a turn: one run counts
        ([0.5, 0.005, 0.001, 0.001, 0.002, 0.002], 6, 0.002),  # 10, 2, 2, 4 and 4 ms
    ],
)
def test_runs_of_a_turn(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], runs: int, median: float
) -> None:
    peer = FakePeer(seconds)
    monkeypatch.setattr(peers.time, "sleep", lambda _: setattr(peer, "runs", 0))
    monkeypatch.setattr(peers.time, "perf_counter", lambda: peer.now)
    times, _ = peers.measure({"fake": peer}, 1)
    assert peer.runs == runs
    assert times["fake"] == [(pytest.approx(median), pytest.approx(median))]
