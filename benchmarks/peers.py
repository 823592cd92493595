"""One MoE-expert LoRA training step of this project beside what a user would pick instead.

    python benchmarks/peers.py [--shape qwen3-30b-a3b] [--tokens 512] [--routing uniform] [--iterations 7]
                               [--threads 2] [--peers ours,torch-grouped,torch-loop,kt-bf16,kt-int8] [--check]
                               [--base-weights]

All candidates live in one process, on as many CPUs as `--threads` says where the machine has more, and take
turns. kt-kernel computes with as many threads as it is told, while the one that called waits for them in a
loop without a pause: told as many as there are CPUs, these share them with that one. `kt-bf16-spared` is told
one fewer, so that each of its threads has a CPU. Each turn begins with a pause, in which the threads of the
one before stop spinning, and a run that does not count, so that everybody finds their own caches warm and
threads awake; then come runs of 20 ms in all, or one that takes longer, whose median is the turn's figure.
Prints a table of medians in ms and the step's ratio to the first candidate, then one JSON line a candidate.

Before and after the turns the machine's limits are measured, the highest peak of an instruction and the
bandwidth, the better of two. A step's limit is max(useful FLOP / peak, bytes of active weights / bandwidth) of
its two passes. `--routing zipf`: the e-th expert is chosen with odds 1 / e.

`--base-weights`: the backward makes the gradients of the base weights too, in bf16: once more their FLOP, and
their bytes written.

Weights lie in the pages that torch's allocator gets: huge ones with THP_MEM_ALLOC_ENABLE=1 in front of the
command, or where the system always gives such; the table says in which. kt-kernel has copies in its own memory.

`ours-KERNEL` picks a kernel. Like kt-kernel, `ours` writes gradients into the same tensors in every step
(`out=`); `ours-fresh` returns new ones, as torch does and as its users have them. kt-kernel is optional:
`pip install --no-deps kt-kernel==0.7.2 gguf`; a peer that is not installed is left out and said so.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from this_machine import cpus_for, huge_pages_share, last_level_cache
from whole_numbers import positive

RANK, ALPHA = 16, 32.0
PAUSE = 0.1  # seconds
A_TURN = 0.02  # seconds of runs that count, at least
SHAPES = {  # experts, top_k, hidden, intermediate
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3-32": (32, 8, 7168, 2048),
    "mixtral": (8, 2, 4096, 14336),
    "gpt-oss": (32, 4, 2880, 2880),
    "qwen3-235b-64": (64, 8, 4096, 1536),
    "one-expert": (1, 1, 2048, 768),
    "ecosystem": (32, 8, 2048, 768),
    "small": (16, 4, 512, 256),
}
BASE_NAMES = ("gate", "up", "down")
LORA_NAMES = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
Result = dict[str, torch.Tensor]


@dataclass
class Problem:
    """One layer and one batch, bf16; routing weights fp32 [T, k], ids int64 [T, k]."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int
    threads: int
    base_gradients: bool = False
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    lora: dict[str, torch.Tensor] = field(default_factory=dict)
    fp32: Problem | None = None

    @classmethod
    def random(
        cls, shape: str, tokens: int, threads: int, routing: str, base_gradients: bool = False, seed: int = 0
    ) -> Problem:
        problem = cls(*SHAPES[shape], tokens, threads, base_gradients)
        e, h, i = problem.experts, problem.hidden, problem.intermediate
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int, scale: float = 0.02) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16).normal_(0, scale, generator=generator)

        problem.base = {"gate": normal(e, i, h), "up": normal(e, i, h), "down": normal(e, h, i)}
        sizes = ((e, RANK, h), (e, i, RANK), (e, RANK, h), (e, i, RANK), (e, RANK, i), (e, h, RANK))
        problem.lora = {name: normal(*size) for name, size in zip(LORA_NAMES, sizes, strict=True)}
        problem.x, problem.grad_y = normal(tokens, h, scale=1.0), normal(tokens, h, scale=1.0)
        logits = torch.randn((tokens, e), generator=generator)
        if routing == "zipf":  # with Gumbel noise the k largest are k draws without putting back
            uniform = torch.rand((tokens, e), generator=generator).clamp_min(1e-30)
            logits = -torch.log(torch.arange(1, e + 1)) - torch.log(-torch.log(uniform))
        weights, problem.ids = torch.topk(torch.softmax(logits, -1), problem.top_k)
        problem.weights = (weights / weights.sum(-1, keepdim=True)).contiguous()
        return problem

    def in_fp32(self) -> Problem:
        """The same numbers in fp32, in which torch multiplies faster on CPUs without AVX512; made once."""
        if self.fp32 is None:
            base, lora = ({k: v.float() for k, v in group.items()} for group in (self.base, self.lora))
            self.fp32 = copy.copy(self)
            self.fp32.base, self.fp32.lora = base, lora
            self.fp32.x, self.fp32.grad_y = self.x.float(), self.grad_y.float()
        return self.fp32

    def flop(self) -> tuple[float, float]:
        """Useful floating point operations of forward and backward: the base once each, twice in a backward
        that makes its gradients, LoRA once and twice."""
        routes = self.tokens * self.top_k
        base = 2 * routes * 3 * self.hidden * self.intermediate
        lora = 2 * routes * 3 * RANK * (self.hidden + self.intermediate)
        return base + lora, base * (1 + self.base_gradients) + 2 * lora

    def weight_bytes(self) -> float:
        """Base weights of the experts that have tokens, which a pass reads once."""
        return 2.0 * len(self.ids.unique()) * 3 * self.hidden * self.intermediate


@dataclass
class Limits:
    """What the machine can do: GFLOP/s of its fastest instruction, GB/s read from memory."""

    peak: float = 0.0
    bandwidth: float = 0.0

    def measure(self, threads: int) -> None:
        """Measures again; the better value counts, since what a shared machine loses comes back."""
        from amx_sft_moe import _core

        # Much more than a cache holds, but what a virtual machine says of its caches is to be taken with care.
        read = min(max(1 << 29, 4 * last_level_cache(os.sched_getaffinity(0))), 1 << 32)
        found = _core.measure_machine(threads, read)
        self.peak = max(self.peak, *found["instructions"].values())
        self.bandwidth = max(self.bandwidth, found["bandwidth"])

    def step_ms(self, problem: Problem) -> float:
        weights = problem.weight_bytes()
        passes = zip(problem.flop(), (weights, weights * (1 + problem.base_gradients)), strict=True)
        return sum(max(flop / self.peak, size / self.bandwidth) for flop, size in passes) * 1e-6


class Ours:
    def __init__(self, problem: Problem, kernel: str, keeps_results: bool) -> None:
        import amx_sft_moe

        p = problem
        self.op = amx_sft_moe.SftMoe(
            num_experts=p.experts,
            top_k=p.top_k,
            hidden_size=p.hidden,
            intermediate_size=p.intermediate,
            lora_rank=RANK,
            lora_alpha=ALPHA,
            max_tokens=p.tokens,
            kernel=kernel,
            num_threads=p.threads,
        )
        self.op.set_base(p.base["gate"], p.base["up"], p.base["down"])
        self.op.set_lora(**p.lora)
        self.problem = p
        self.keeps_results = keeps_results
        self.kept: amx_sft_moe.Gradients | None = None

    def forward(self) -> torch.Tensor:
        return self.op.forward_sft(
            self.problem.x, self.problem.ids, self.problem.weights, save_for_backward=True
        )

    def backward(self) -> Result:
        wanted = self.problem.base_gradients
        grads = self.op.backward(self.problem.grad_y, out=self.kept, weight_gradients=wanted)
        self.kept = grads if self.keeps_results else None
        result = {name: getattr(grads, name) for name in LORA_NAMES}
        if wanted:
            result |= {name: getattr(grads, f"{name}_proj") for name in BASE_NAMES}
        return {"grad_x": grads.grad_x, "grad_routing_weights": grads.grad_routing_weights, **result}


class Torch:
    """`grouped`: torch._grouped_mm per projection over rows sorted by expert. `loop`: one F.linear per expert,
    as transformers does it in eager mode. LoRA unmerged, as in PEFT. With `-fp32` behind it, all in fp32.

    The loop takes its experts from one unbind() of each tensor, whose backward stacks their gradients. Indexing
    would make a gradient of all experts, zeros, for each of them.
    """

    MODES = ("grouped", "loop")

    def __init__(self, problem: Problem, mode: str) -> None:
        problem = problem.in_fp32() if mode.endswith("-fp32") else problem
        self.problem, self.mode = problem, mode.removesuffix("-fp32")
        self.lora = {name: value.clone().requires_grad_(True) for name, value in problem.lora.items()}
        # The same memory, but of their own in autograd.
        self.base = {k: v.detach().requires_grad_(problem.base_gradients) for k, v in problem.base.items()}

    def adapted(self, x: torch.Tensor, name: str, product: Callable) -> torch.Tensor:
        lora = product(product(x, f"{name}_lora_a"), f"{name}_lora_b")
        return product(x, name) + ALPHA / RANK * lora

    def experts(self, x: torch.Tensor, product: Callable) -> torch.Tensor:
        h = F.silu(self.adapted(x, "gate", product)) * self.adapted(x, "up", product)
        return self.adapted(h, "down", product)

    def forward(self) -> torch.Tensor:
        p = self.problem
        self.x, self.w = p.x.clone().requires_grad_(True), p.weights.clone().requires_grad_(True)
        flat = p.ids.flatten()
        order = flat.argsort(stable=True)
        token = order // p.top_k
        counts = torch.bincount(flat, minlength=p.experts)
        rows = self.x[token]
        weights = self.base | self.lora
        if self.mode == "grouped":
            ends = counts.cumsum(0).to(torch.int32)
            y = self.experts(rows, lambda a, n: torch._grouped_mm(a, weights[n].transpose(-2, -1), offs=ends))
        else:
            of_expert = {name: tensor.unbind() for name, tensor in weights.items()}
            parts = rows.split(counts.tolist())
            active = [e for e, part in enumerate(parts) if part.shape[0] > 0]
            y = torch.cat(
                [self.experts(parts[e], lambda a, n, e=e: F.linear(a, of_expert[n][e])) for e in active]
            )
        y = y * self.w.flatten()[order].unsqueeze(1).to(y.dtype)
        self.y = torch.zeros(p.tokens, p.hidden, dtype=y.dtype).index_add(0, token, y)
        return self.y

    def backward(self) -> Result:
        trained = self.lora | (self.base if self.problem.base_gradients else {})
        inputs = [self.x, self.w, *trained.values()]
        names = ["grad_x", "grad_routing_weights", *trained]
        return dict(zip(names, torch.autograd.grad(self.y, inputs, self.problem.grad_y), strict=True))


class NotHereError(RuntimeError):
    """A peer that does not run on this CPU."""


class KtKernel:
    """kt-kernel's operator; without AMX it runs its AVX512 code. With `-spared` behind the weights it is told
    one thread fewer than there are."""

    CLASSES = {"bf16": "AMXBF16_SFT_MOE", "int8": "AMXInt8_SFT_MOE", "int4": "AMXInt4_SFT_MOE"}
    SPARED = "-spared"

    def __init__(self, problem: Problem, weights: str) -> None:
        from kt_kernel import kt_kernel_ext as ext

        p = self.problem = problem
        threads = max(p.threads - weights.endswith(self.SPARED), 1)
        weights = weights.removesuffix(self.SPARED)
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self.pool = ext.CPUInfer(pool)
        self.expert_map = torch.arange(p.experts, dtype=torch.int64)
        config = ext.moe.MOESFTConfig(p.experts, p.top_k, p.hidden, p.intermediate)
        config.max_len, config.max_cache_depth, config.layer_idx = max(p.tokens, 32), 1, 0
        config.lora_rank, config.lora_alpha = RANK, ALPHA
        config.full_weight_grad, config.authoritative_optimizer_grads = p.base_gradients, True
        config.share_backward_bb, config.share_cache_pool = False, False
        config.physical_to_logical_map = self.expert_map.data_ptr()
        for name in ("gate", "up", "down"):
            setattr(config, f"{name}_proj", p.base[name].data_ptr())
        for name, value in p.lora.items():
            setattr(config, name, value.data_ptr())
        config.pool = self.pool.backend_
        if not hasattr(ext.moe, self.CLASSES[weights]):
            raise NotHereError(f"kt-kernel's build for this CPU has no {self.CLASSES[weights]}")
        self.moe = getattr(ext.moe, self.CLASSES[weights])(config)
        self.moe.load_weights()
        self.y, self.grad_x = torch.empty_like(p.x), torch.empty_like(p.x)
        self.grad_w = torch.empty(p.tokens, p.top_k)
        self.grads = {name: torch.zeros_like(value) for name, value in p.lora.items()}
        if p.base_gradients:
            self.grads |= {name: torch.zeros_like(value) for name, value in p.base.items()}
        self.count = torch.tensor([p.tokens], dtype=torch.int32)

    def forward(self) -> torch.Tensor:
        p = self.problem
        pointers = [t.data_ptr() for t in (p.ids, p.weights, p.x, self.y)]
        self.moe.forward_sft(self.count.data_ptr(), p.top_k, *pointers, True)
        return self.y

    def backward(self) -> Result:
        grads = [self.grads[name].data_ptr() for name in LORA_NAMES]
        base = [self.grads[name].data_ptr() if name in self.grads else 0 for name in BASE_NAMES]
        data = self.problem.grad_y.data_ptr(), self.grad_x.data_ptr()
        self.moe.backward(*data, *grads, self.grad_w.data_ptr(), *base, False, 1.0)
        return {"grad_x": self.grad_x, "grad_routing_weights": self.grad_w, **self.grads}


def known_peers() -> list[str]:
    """All names that `build` takes: kernels are those of this build, also where this CPU cannot run them."""
    import amx_sft_moe

    kernels = dict.fromkeys(f"ours-{kernel['name']}" for kernel in amx_sft_moe.info()["kernels"])
    torch_ones = [f"torch-{mode}{dtype}" for mode in Torch.MODES for dtype in ("", "-fp32")]
    kt = [f"kt-{weights}{spared}" for weights in KtKernel.CLASSES for spared in ("", KtKernel.SPARED)]
    return ["ours", "ours-fresh", *kernels, *torch_ones, *kt]


def build(name: str, problem: Problem) -> Ours | Torch | KtKernel:
    family, _, variant = name.partition("-")
    if family == "ours":
        fresh = variant == "fresh"
        return Ours(problem, "auto" if fresh or not variant else variant, not fresh)
    return Torch(problem, variant) if family == "torch" else KtKernel(problem, variant)


def installed(name: str) -> bool:
    module = {"ours": "amx_sft_moe", "kt": "kt_kernel"}.get(name.partition("-")[0], "torch")
    return importlib.util.find_spec(module) is not None


def chosen(peers: str, parser: argparse.ArgumentParser) -> list[str]:
    """The names in `--peers` that are installed; says which are not. Ends with the parser's error for names
    that are unknown: `build` would take them for others."""
    names, known = peers.split(","), known_peers()
    if unknown := [name for name in names if name not in known]:
        parser.error(f"argument --peers: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    for name in names:
        if not installed(name):
            print(f"{name}: not installed, left out", file=sys.stderr)
    return [name for name in names if installed(name)]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20))


def measure(
    peers: dict[str, Ours | Torch | KtKernel], iterations: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, Result]]:
    """Seconds of forward and backward per candidate and turn, and each candidate's results."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    results: dict[str, Result] = {}
    for turn in range(iterations + 1):  # the first warms up
        for name, peer in peers.items():
            time.sleep(PAUSE)
            runs: list[tuple[float, float]] = []
            while len(runs) < 2 or sum(forward + backward for forward, backward in runs[1:]) < A_TURN:
                begin = time.perf_counter()
                y = peer.forward()
                middle = time.perf_counter()
                grads = peer.backward()
                runs.append((middle - begin, time.perf_counter() - middle))
            if turn > 0:
                warm = sorted(runs[1:], key=sum)
                times[name].append(warm[(len(warm) - 1) // 2])
            else:
                results[name] = {key: value.detach().clone() for key, value in {"y": y, **grads}.items()}
    return times, results


def row_of(
    name: str, passes: list[tuple[float, float]], first_step: float, problem: Problem, limit_ms: float
) -> dict:
    step = statistics.median(f + b for f, b in passes)
    return {
        "peer": name,
        "tokens": problem.tokens,
        "forward_ms": round(statistics.median(f for f, _ in passes) * 1e3, 2),
        "backward_ms": round(statistics.median(b for _, b in passes) * 1e3, 2),
        "step_ms": round(step * 1e3, 2),
        "ratio_to_first": round(step / first_step, 3),
        "gflops": round(sum(problem.flop()) / step * 1e-9),
        "of_limit": round(limit_ms / (step * 1e3), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf"))
    parser.add_argument("--iterations", type=positive, default=7)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--peers", default="ours,torch-grouped,torch-loop,kt-bf16,kt-int8")
    parser.add_argument("--base-weights", action="store_true", help="gradients of the base weights too")
    parser.add_argument("--check", action="store_true", help="also each result's difference from the first's")
    args = parser.parse_args()
    os.sched_setaffinity(
        0, cpus_for(args.threads, os.sched_getaffinity(0))
    )  # before the candidates have threads
    torch.set_num_threads(args.threads)

    names = chosen(args.peers, parser)
    problem = Problem.random(args.shape, args.tokens, args.threads, args.routing, args.base_weights)
    limits = Limits()
    limits.measure(args.threads)
    peers = {}
    for name in names:
        try:
            peers[name] = build(name, problem)
        except NotHereError as reason:
            print(f"{name}: left out, {reason}", file=sys.stderr)
    if not peers:
        parser.error(f"argument --peers: expected one that is here, got {args.peers}")
    names = list(peers)
    times, results = measure(peers, args.iterations)
    limits.measure(args.threads)

    first = statistics.median(f + b for f, b in times[names[0]])
    limit_ms = limits.step_ms(problem)
    about = {"shape": args.shape, "routing": args.routing, "limit_ms": round(limit_ms, 2)}
    about |= {"peak_gflops": round(limits.peak), "bandwidth": round(limits.bandwidth, 1)}
    about |= {"huge_pages": round(huge_pages_share(problem.base["gate"]), 2)}
    about |= {"base_gradients": args.base_weights}
    rows = [row_of(name, times[name], first, problem, limit_ms) | about for name in names]
    print(
        f"{args.shape}, T={args.tokens}, {args.routing} routing, r={RANK}, {args.threads} threads, "
        f"{'gradients of base weights too, ' * args.base_weights}{args.iterations} turns, medians, ms\n"
        f"weights: {about['huge_pages']:.0%} in huge pages\n"
        f"limit {limit_ms:.2f} ms: {limits.peak:.0f} GFLOP/s, {limits.bandwidth:.1f} GB/s"
    )
    print(f"{'':16}{'forward':>10}{'backward':>10}{'step':>10}{'ratio':>8}{'GFLOP/s':>9}{'of limit':>10}")
    for row in rows:
        milliseconds = "".join(f"{row[key]:10.2f}" for key in ("forward_ms", "backward_ms", "step_ms"))
        rest = f"{row['ratio_to_first']:8.2f}{row['gflops']:9d}{row['of_limit']:10.2f}"
        print(f"{row['peer']:16}{milliseconds}{rest}")
    for row in rows:
        if args.check:
            mine, theirs = results[names[0]], results[row["peer"]]
            row["relative_to_first"] = {k: round(relative_error(v, mine[k]), 4) for k, v in theirs.items()}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
