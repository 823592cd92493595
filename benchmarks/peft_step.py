"""One training step of a layer's experts with PEFT's LoRA: our hook beside stock PEFT and factored torch code.

    python benchmarks/peft_step.py [--tokens 256] [--rank 8] [--turns 7] [--threads 2] [--json]

The layer is transformers' Qwen3MoeExperts, bf16, with an adapter whose gate and up share one A, as PEFT has it:

    ours              PEFT's own modules through `amx_sft_moe.register()`
    peft-grouped      the same, stock: PEFT builds W + BA of all experts, transformers multiplies by grouped_mm
    factored-grouped  x W + (x A) B written by hand over rows sorted by expert, torch's grouped_mm
    factored-loop     the same with one F.linear per expert and factor

A step is forward and backward, with gradients of x, of the routing weights and of the adapter. PEFT keeps its
factors in fp32; those written by hand are bf16, which is quicker. Times: all in one process, taking turns; each
turn runs twice and the second run counts; medians. Memory: each in a process of its own, the peak of resident
memory in the first step above what was resident before it, weights and adapter being there already. What
torch's libraries keep for later calls is part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from whole_numbers import positive

import amx_sft_moe

# ours over the other: what is to be reached
TARGETS = {
    "peft-grouped": {"step": 0.2, "peak_mb": 0.5},
    "factored-grouped": {"step": 0.6},
    "factored-loop": {"step": 0.6},
}
CANDIDATES = ("ours", *TARGETS)
SIZES = ("experts", "top_k", "hidden", "intermediate", "tokens", "rank")


class Layer(nn.Module):
    """What PEFT adapts: a model of one experts module."""

    def __init__(self, sizes: dict[str, int], implementation: str) -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            num_experts=sizes["experts"],
            num_experts_per_tok=sizes["top_k"],
            hidden_size=sizes["hidden"],
            moe_intermediate_size=sizes["intermediate"],
        )
        config._experts_implementation = implementation
        self.experts = Qwen3MoeExperts(config).to(torch.bfloat16)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.experts(*inputs)


class Factored(nn.Module):
    """The same function without PEFT. Weights [E, 2I, H] and [E, H, I]; A [E, r, in], B [E, out, r].

    `loop` takes its experts from one unbind() of each tensor: indexing would make a gradient of all experts,
    zeros, for each of them.
    """

    def __init__(self, sizes: dict[str, int], mode: str) -> None:
        super().__init__()
        e, h, i, r = (sizes[name] for name in ("experts", "hidden", "intermediate", "rank"))
        self.mode = mode

        def parameter(*shape: int, trained: bool) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=trained)

        self.gate_up_proj = parameter(e, 2 * i, h, trained=False)
        self.down_proj = parameter(e, h, i, trained=False)
        self.gate_up_a, self.gate_up_b = parameter(e, r, h, trained=True), parameter(e, 2 * i, r, trained=True)
        self.down_a, self.down_b = parameter(e, r, i, trained=True), parameter(e, h, r, trained=True)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)
        token = order // expert_ids.shape[1]
        counts = torch.bincount(flat, minlength=self.down_proj.shape[0])
        rows = x[token]  # [S, H]
        if self.mode == "grouped":
            ends = counts.cumsum(0).to(torch.int32)
            y = self._experts(
                rows, lambda a, n: torch._grouped_mm(a, self.get_parameter(n).transpose(-2, -1), offs=ends)
            )
        else:
            of_expert = {name: tensor.unbind() for name, tensor in self.named_parameters()}
            parts = rows.split(counts.tolist())
            y = torch.cat(
                [
                    self._experts(part, lambda a, n, e=e: F.linear(a, of_expert[n][e]))
                    for e, part in enumerate(parts)
                    if part.shape[0] > 0
                ]
            )
        y = y * routing_weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, y)

    def _experts(self, rows: torch.Tensor, product: Callable[..., torch.Tensor]) -> torch.Tensor:
        scaling = 2.0  # alpha = 2 r, as below
        lora = product(product(rows, "gate_up_a"), "gate_up_b")
        gate, up = (product(rows, "gate_up_proj") + scaling * lora).chunk(2, dim=-1)
        h = F.silu(gate) * up
        return product(h, "down_proj") + scaling * product(product(h, "down_a"), "down_b")


def build(name: str, sizes: dict[str, int]) -> nn.Module:
    """A candidate; all have the same weights and the same adapter."""
    kind, _, mode = name.partition("-")
    if kind == "factored":
        layer: nn.Module = Factored(sizes, mode)
    else:
        layer = Layer(sizes, "amx_sft_moe" if name == "ours" else "grouped_mm")
        names = ["experts.gate_up_proj", "experts.down_proj"]
        rank = sizes["rank"]
        layer = get_peft_model(
            layer, LoraConfig(r=rank, lora_alpha=2 * rank, target_parameters=names, init_lora_weights=False)
        )
    _fill(layer, sizes)
    return layer


@torch.no_grad()
def _fill(layer: nn.Module, sizes: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    e, h, i, r = (sizes[name] for name in ("experts", "hidden", "intermediate", "rank"))
    shapes = {"gate_up_a": (e, r, h), "gate_up_b": (e, 2 * i, r), "down_a": (e, r, i), "down_b": (e, h, r)}
    factors = {
        name: torch.randn(shape, generator=generator).mul_(0.02).bfloat16() for name, shape in shapes.items()
    }
    parameters = dict(layer.named_parameters())
    for ending, shape in (("gate_up_proj", (e, 2 * i, h)), ("down_proj", (e, h, i))):
        [weight] = [parameter for name, parameter in parameters.items() if name.endswith(ending)]
        assert weight.shape == shape
        weight.normal_(0, 0.02, generator=generator)
    for name, parameter in parameters.items():
        if name in factors:
            parameter.copy_(factors[name])
        elif "lora_" in name:  # PEFT: A [E r, in], B [out, r E]; the outer wrapper is the last one, of down
            of = "gate_up" if ".base_layer." in name else "down"
            if ".lora_A." in name:
                parameter.copy_(factors[f"{of}_a"].reshape(parameter.shape))
            else:
                parameter.copy_(factors[f"{of}_b"].permute(1, 2, 0).reshape(parameter.shape))


class Batch:
    """x and grad_y [T, H] bf16, ids int64 and routing weights bf16 [T, k]."""

    def __init__(self, sizes: dict[str, int]) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = sizes["tokens"], sizes["hidden"]
        self.x, self.grad_y = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
        logits = torch.randn(sizes["tokens"], sizes["experts"], generator=generator)
        weights, self.ids = torch.topk(torch.softmax(logits, -1), sizes["top_k"])
        self.weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()

    def forward(self, layer: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """y, and what backward has to find the gradients of."""
        x, weights = self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        return layer(x, self.ids, weights), [x, weights, *trained]

    def backward(self, y: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the inputs, in their order."""
        return list(torch.autograd.grad(y, inputs, self.grad_y))


def times(
    layers: dict[str, nn.Module], batch: Batch, turns: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[torch.Tensor]]]:
    """Seconds of forward and backward by candidate and turn; y and the gradients of x and of the weights."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    results: dict[str, list[torch.Tensor]] = {}
    for turn in range(turns + 1):  # the first warms up
        for name, layer in layers.items():
            for _ in range(2):
                begin = time.perf_counter()
                y, inputs = batch.forward(layer)
                middle = time.perf_counter()
                gradients = batch.backward(y, inputs)
                end = time.perf_counter()
            if turn > 0:
                found[name].append((middle - begin, end - middle))
            else:
                results[name] = [y.detach(), *gradients[:2]]
            del y, inputs, gradients
    return found, results


def memory(name: str, sizes: dict[str, int]) -> dict[str, float]:
    """MB above what was resident before the first step: at its peak, and between forward and backward."""
    # Code that a first call loads and threads that it starts are nobody's activations. Not too small, or torch
    # takes other code.
    small = sizes | {"hidden": 512, "intermediate": 512, "tokens": 64}
    warm, batch = build(name, small), Batch(small)
    batch.backward(*batch.forward(warm))
    del warm, batch
    layer, batch = build(name, sizes), Batch(sizes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _resident("VmRSS")
    y, inputs = batch.forward(layer)
    between = _resident("VmRSS")
    gradients = batch.backward(y, inputs)
    peak = _resident("VmHWM")
    del gradients
    return {"peak_mb": (peak - before) / 1e6, "between_mb": (between - before) / 1e6}


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status: expected a field {field}, got none")


def memory_in_a_process(name: str) -> dict[str, float]:
    """`memory` with the same options in a fresh process, whose allocator gives back at once what is freed."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(
    found: dict[str, list[tuple[float, float]]],
    results: dict[str, list[torch.Tensor]],
    memories: dict[str, dict[str, float]],
) -> list[dict]:
    """One row a candidate. Ratios are ours over theirs."""

    def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.float() - b.float()).norm() / b.float().norm()

    rows = []
    for name, passes in found.items():
        row: dict = {
            "candidate": name,
            "forward_ms": statistics.median(f for f, _ in passes) * 1e3,
            "backward_ms": statistics.median(b for _, b in passes) * 1e3,
            "step_ms": statistics.median(f + b for f, b in passes) * 1e3,
            **memories[name],
        }
        if name != "ours" and "ours" in found:
            ours = rows[0]
            row["ratio"] = {
                "step": ours["step_ms"] / row["step_ms"],
                "peak_mb": ours["peak_mb"] / row["peak_mb"],
            }
            row["target"] = TARGETS[name]
            differences = [
                difference(theirs, mine) for theirs, mine in zip(results[name], results["ours"], strict=True)
            ]
            row["largest_difference"] = torch.stack(differences).max().item()  # max() would lose a NaN
        rows.append(row)
    return rows


def say_table(rows: list[dict], title: str) -> None:
    """Milliseconds, MB, and ours over each of the others."""
    print(title)
    columns = ("forward_ms", "backward_ms", "step_ms", "peak_mb", "between_mb")
    print(f"{'':18}" + "".join(f"{column:>13}" for column in columns) + "   ours / this: step, peak (target)")
    for row in rows:
        line = f"{row['candidate']:18}" + "".join(f"{row[column]:13.1f}" for column in columns)
        for name, ratio in row.get("ratio", {}).items():
            target = row["target"].get(name)
            line += f"   {ratio:.3f}" + (f" ({target})" if target is not None else "")
        print(line)
    for row in rows:
        if "largest_difference" in row:
            print(f"{row['candidate']}: y and gradients differ from ours by {row['largest_difference']:.1e}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in zip(SIZES, (32, 8, 2048, 768, 256, 8), strict=True):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default)
    parser.add_argument("--turns", type=positive, default=7)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--candidates", default=",".join(CANDIDATES), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in SIZES}
    names = options.candidates.split(",")
    if unknown := set(names) - set(CANDIDATES):
        parser.error(
            f"--candidates: expected some of {', '.join(CANDIDATES)}, got {', '.join(sorted(unknown))}"
        )
    names.sort(key=CANDIDATES.index)  # ours first

    torch.set_num_threads(options.threads)
    amx_sft_moe.register(num_threads=options.threads)
    if options.memory_of is not None:
        print(json.dumps(memory(options.memory_of, sizes)))
        return
    memories = {name: memory_in_a_process(name) for name in names}
    found, results = times({name: build(name, sizes) for name in names}, Batch(sizes), options.turns)
    rows = rows_of(found, results, memories)
    if options.json:
        about = sizes | {"threads": options.threads, "turns": options.turns, "torch": torch.__version__}
        print(json.dumps({"about": about, "rows": rows}))
    else:
        described = ", ".join(f"{name} {value}" for name, value in sizes.items())
        say_table(rows, f"{described}, {options.threads} threads, medians of {options.turns} turns")


if __name__ == "__main__":
    main()
