"""A training step of a small mixture model whose experts are in CPU memory and whose other parts are on a GPU.

    python benchmarks/beside_gpu.py [--tokens 128 512 2048] [--layers 2] [--experts 64] [--turns 5] [--json]
    python benchmarks/beside_gpu.py --tokens 128 --profile

The model is transformers' Qwen3-MoE with layers like those of Qwen3-30B-A3B, bf16, and PEFT's LoRA in fp32 on
attention and experts; a batch is one sequence. A step is forward, backward, clipping and fused AdamW.

    ours      experts stay on the CPU: `amx_sft_moe.keep_experts_on_cpu(model)`, then `model.to("cuda")`
    all-gpu   everything on the GPU, stock PEFT and transformers' grouped_mm

Both take turns; a turn is one step that does not count and one that does; medians. The GPU is waited for
between the parts of a step. `operator` is what our passes say that they took, forward and backward together;
what a step takes beyond it is not the operator's. `--profile` prints where torch's profiler sees one step of
ours. `--device cpu` runs without a GPU, to see that it runs: ours then has no activations to move.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from whole_numbers import positive

import amx_sft_moe
from amx_sft_moe.layer import collect_times, take_times

CANDIDATES = {"ours": "amx_sft_moe", "all-gpu": "grouped_mm"}  # by experts_implementation
PARTS = ("forward", "backward", "optimizer")
VOCABULARY = 32768


def make_model(name: str, options: argparse.Namespace) -> nn.Module:
    """A candidate with its adapter, where its parts are to be."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        moe_intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=options.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=1 << 20,
    )
    with init_empty_weights(include_buffers=False):
        model = Qwen3MoeForCausalLM(config)
    fill(model)
    model.set_experts_implementation(CANDIDATES[name])
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(model, lora)
    if name == "ours":
        amx_sft_moe.keep_experts_on_cpu(model)
    return model.to(options.device).train()


def fill(model: nn.Module) -> None:
    """Frozen bf16 weights that repeat 2^20 numbers: drawing all of them would take longer than the rest."""
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.ones if parameter.dim() == 1 else torch.empty
                weight = values(parameter.shape, dtype=torch.bfloat16)
                if parameter.dim() > 1:
                    rows = weight.view(-1).split(numbers.numel())
                    for row in rows:
                        row.copy_(numbers[: row.numel()])
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)


class Step:
    """Training steps of one candidate."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.model = make_model(name, options)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self.device = options.device

    def wait(self) -> float:
        """The time once the GPU is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(self, ids: torch.Tensor) -> list[float]:
        """Seconds of each of PARTS."""
        times = [self.wait()]
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        times.append(self.wait())
        loss.backward()
        times.append(self.wait())
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(self.wait())
        return [end - begin for begin, end in itertools.pairwise(times)]

    def memory(self, run: Callable[[], object]) -> float:
        """MiB on the GPU at their peak while `run` runs, with what is there throughout."""
        if self.device != "cuda":
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() / 2**20


def operator_ms() -> float:
    """What the operator's passes took since the last question."""
    return sum(totals["total_ms"] for passes in take_times() for totals in passes)


def measure(steps: list[Step], tokens: int, turns: int) -> list[dict]:
    """A row for each candidate, in ms."""
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(steps[0].device)
    found: dict[str, list[list[float]]] = {step.name: [] for step in steps}
    inside: list[float] = []
    for turn in range(turns + 1):  # the first warms up
        for step in steps:
            step.run(ids)
            operator_ms()
            parts = step.run(ids)
            spent = operator_ms()
            if turn > 0:
                found[step.name].append(parts)
                inside += [spent] if step.name == "ours" else []
    rows = []
    for step in steps:
        medians = [statistics.median(column) * 1e3 for column in zip(*found[step.name], strict=True)]
        row = {"tokens": tokens, "candidate": step.name, **dict(zip(PARTS, medians, strict=True))}
        row["step"] = statistics.median(map(sum, found[step.name])) * 1e3
        row["operator"] = statistics.median(inside) if step.name == "ours" else 0.0
        rows.append(row)
    return rows


def memories(steps: list[Step], tokens: int) -> dict[str, float]:
    """MiB that a step of each has on the GPU, beyond what the other models hold there."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device=steps[0].device)
    held = torch.cuda.memory_allocated() / 2**20 if steps[0].device == "cuda" else 0.0
    own = {step.name: sum(_bytes_on_gpu(step)) / 2**20 for step in steps}
    return {step.name: step.memory(lambda step=step: step.run(ids)) - held + own[step.name] for step in steps}


def _bytes_on_gpu(step: Step) -> list[int]:
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    tensors = [*step.model.parameters(), *step.model.buffers(), *states]
    return [tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device.type == "cuda"]


def profile(step: Step, tokens: int) -> str:
    """The table of torch's profiler of one step, by time on the CPU."""
    ids = torch.randint(0, VOCABULARY, (1, tokens)).to(step.device)
    for _ in range(2):
        step.run(ids)
    with torch.profiler.profile() as profiler:
        step.run(ids)
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50)


def say_table(rows: list[dict]) -> None:
    """Milliseconds and MiB."""
    columns = (*PARTS, "step", "operator", "gpu_mib")
    print(f"{'tokens':>6} {'candidate':10}" + "".join(f"{column:>11}" for column in columns))
    for row in rows:
        print(
            f"{row['tokens']:6} {row['candidate']:10}" + "".join(f"{row[column]:11.1f}" for column in columns)
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 2, "experts": 64, "hidden": 2048, "intermediate": 768, "rank": 16, "turns": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help="default: %(default)s")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", nargs="+", type=positive, default=[128, 512, 2048])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--candidates", default=",".join(CANDIDATES), help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="one step of ours, part by part")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args()
    names = options.candidates.split(",")
    if unknown := set(names) - set(CANDIDATES):
        parser.error(
            f"--candidates: expected some of {', '.join(CANDIDATES)}, got {', '.join(sorted(unknown))}"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU that torch can use, got none")

    torch.set_num_threads(options.threads)
    amx_sft_moe.register(num_threads=options.threads)
    if options.profile:
        print(profile(Step("ours", options), options.tokens[0]))
        return
    steps = [Step(name, options) for name in CANDIDATES if name in names]
    collect_times(True)
    rows = []
    for tokens in options.tokens:
        found = measure(steps, tokens, options.turns)
        used = memories(steps, tokens)
        rows += [row | {"gpu_mib": used[row["candidate"]]} for row in found]
    if options.json:
        about = {name: getattr(options, name) for name in (*sizes, "threads", "device")}
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
        print(json.dumps({"about": about | {"torch": torch.__version__, "gpu": gpu}, "rows": rows}))
    else:
        say_table(rows)


if __name__ == "__main__":
    main()
