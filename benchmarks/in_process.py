"""What the operator costs and leaves behind inside a torch process.

    python benchmarks/in_process.py [--tokens 512] [--threads 2] [--bench build/benchmarks/bench_step]

Five questions about one layer of Qwen3-30B-A3B (E=128 k=8 H=2048 I=768), bf16, r = 16:

    beside torch    a step right after matrix products of torch, whose OpenMP threads are still awake, over a
                    step while torch is idle; and over the C++ program alone, with --bench
    sleeping        voluntary context switches of all threads of the process during a step: how often one of
                    them waited in the kernel (a futex, a nanosleep), where it should compute or spin
    idle            CPU time that the process uses in the second after a step
    first step      of a new operator over weights in the page cache, mapped from a safetensors file and
                    never touched, over a steady one
    construction    of that operator

Steps alternate; medians. The file takes 1.2 GB in a temporary folder (--folder).
"""

from __future__ import annotations

import argparse
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from whole_numbers import positive

import amx_sft_moe

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, RANK = 128, 8, 2048, 768, 16
BASE = {
    "gate": (EXPERTS, INTERMEDIATE, HIDDEN),
    "up": (EXPERTS, INTERMEDIATE, HIDDEN),
    "down": (EXPERTS, HIDDEN, INTERMEDIATE),
}
LORA = {
    "gate_lora_a": (EXPERTS, RANK, HIDDEN),
    "gate_lora_b": (EXPERTS, INTERMEDIATE, RANK),
    "up_lora_a": (EXPERTS, RANK, HIDDEN),
    "up_lora_b": (EXPERTS, INTERMEDIATE, RANK),
    "down_lora_a": (EXPERTS, RANK, INTERMEDIATE),
    "down_lora_b": (EXPERTS, HIDDEN, RANK),
}


def normal(*size: int, scale: float = 0.02) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, scale)


def mapped(path: Path) -> dict[str, torch.Tensor]:
    """The base weights, mapped and not read."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in BASE}


class Steps(Protocol):
    def step(self) -> float: ...


class Layer:
    def __init__(self, base: dict[str, torch.Tensor], tokens: int, threads: int) -> None:
        self.base = base
        self.lora = {name: normal(*size) for name, size in LORA.items()}
        begin = time.perf_counter()
        self.op = amx_sft_moe.SftMoe(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            lora_rank=RANK,
            lora_alpha=32.0,
            max_tokens=tokens,
            num_threads=threads,
        )
        self.op.set_base(base["gate"], base["up"], base["down"])
        self.op.set_lora(**self.lora)
        self.construction = time.perf_counter() - begin
        self.x, self.grad_y = normal(tokens, HIDDEN, scale=1.0), normal(tokens, HIDDEN, scale=1.0)
        weights, self.ids = torch.topk(torch.softmax(torch.randn(tokens, EXPERTS), -1), TOP_K)
        self.weights = (weights / weights.sum(-1, keepdim=True)).contiguous()
        self.gradients: amx_sft_moe.Gradients | None = None

    def step(self) -> float:
        """Seconds of a forward and a backward."""
        begin = time.perf_counter()
        self.op.forward_sft(self.x, self.ids, self.weights, save_for_backward=True)
        self.gradients = self.op.backward(self.grad_y, out=self.gradients)
        return time.perf_counter() - begin


def beside_torch(layer: Layer, turns: int) -> tuple[float, float]:
    """Seconds of a step after a pause, and right after products of torch."""
    a, b = torch.randn(768, 768), torch.randn(768, 768)
    quiet, busy = [], []
    for _ in range(turns + 1):
        time.sleep(0.2)
        layer.step()
        quiet.append(layer.step())
        times = []
        for _ in range(2):
            for _ in range(4):
                a @ b
            times.append(layer.step())
        busy.append(times[-1])
    return statistics.median(quiet[1:]), statistics.median(busy[1:])


def sleeps(layer: Steps, turns: int) -> tuple[float, int]:
    """Voluntary context switches in a step, of all threads of the process: median and most. Steps follow one
    another after a pause, so that torch's threads are asleep and the operator's awake."""
    time.sleep(0.2)
    layer.step()
    found = []
    for _ in range(turns):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        layer.step()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
    return statistics.median(found), max(found)


def idle_cpu(layer: Layer, turns: int) -> float:
    """Seconds of CPU, of all threads, in the second that follows a step."""
    used = []
    for _ in range(turns):
        layer.step()
        begin = time.process_time()
        time.sleep(1.0)
        used.append(time.process_time() - begin)
    return statistics.median(used)


def first_steps(path: Path, tokens: int, threads: int, turns: int) -> tuple[float, float, float]:
    """Seconds of construction, of the first step over newly mapped weights, and of the third."""
    rows = []
    for _ in range(turns):  # of a file just written, so in the page cache
        layer = Layer(mapped(path), tokens, threads)
        first = layer.step()
        layer.step()
        rows.append((layer.construction, first, layer.step()))
    construction, first, steady = (statistics.median(column) for column in zip(*rows, strict=True))
    return construction, first, steady


def alone(bench: Path, tokens: int, threads: int, kernel: str) -> float:
    """Seconds of a step of the C++ program."""
    command = [str(bench), "qwen3-30b-a3b", str(tokens), kernel, str(threads), "7"]
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    return float(re.search(r"^ +step +([\d.]+) ms", output, re.MULTILINE)[1]) * 1e-3


def report(name: str, value: float, unit: str, bound: str) -> None:
    print(f"{name:52}{value:10.2f} {unit:4} {bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--turns", type=positive, default=9)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "layer.safetensors"
        save_file({name: normal(*size) for name, size in BASE.items()}, path)
        construction, first, steady = first_steps(path, args.tokens, args.threads, args.turns)
        report("construction over mapped weights", construction * 1e3, "ms", "")
        report("first step", first * 1e3, "ms", "")
        report("steady step over the same weights", steady * 1e3, "ms", "")
        report("first over steady", first / steady, "", "aim: at most 1.3")

    layer = Layer({name: normal(*size) for name, size in BASE.items()}, args.tokens, args.threads)
    rounds: list[Callable[[], float]] = [lambda: 0.0]
    if args.bench:
        rounds = [lambda: alone(args.bench, args.tokens, args.threads, layer.op.kernel)] * 3
    program = []
    quiet, busy = [], []
    for bench in rounds:
        program.append(bench())
        for into, value in zip((quiet, busy), beside_torch(layer, args.turns), strict=True):
            into.append(value)
    report("step, torch loaded and idle", statistics.median(quiet) * 1e3, "ms", "")
    report("step right after products of torch", statistics.median(busy) * 1e3, "ms", "")
    report("over", statistics.median(b / q for b, q in zip(busy, quiet, strict=True)), "", "aim: at most 1.1")
    if args.bench:
        report("step of the C++ program", statistics.median(program) * 1e3, "ms", "in turns with the others")
        ratio = statistics.median(b / p for b, p in zip(busy, program, strict=True))
        report("right after products of torch, over it", ratio, "", "aim: at most 1.1")
    median, most = sleeps(layer, 2 * args.turns)
    report(
        "times that a thread slept in a step", median, "", f"aim: 0, none waits in the kernel; at most {most}"
    )
    report("CPU time in the second after a step", idle_cpu(layer, 5) * 1e3, "ms", "aim: at most 20")


if __name__ == "__main__":
    main()
