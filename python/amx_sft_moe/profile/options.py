"""What the experiment is asked to do; the published parameters are the defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from amx_sft_moe.arguments import MAX_INDEX, MAX_THREADS
from amx_sft_moe.system.process import DEFAULT_THREADS, default_threads

from .shapes import PUBLISHED, SHAPES, LayerShape

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Options:
    """One run. Every field is what will happen; `experts` of the shape may still be cut to the memory."""

    name: str = PUBLISHED  # of the shape
    shape: LayerShape = SHAPES[PUBLISHED]
    rank: int = 16
    alpha: float = 32.0
    check_tokens: int = 4
    tokens: int = 128
    warmup: int = 5
    iterations: int = 20
    threads: int = 1
    kernel: str = "auto"
    dtype: str = "bfloat16"  # of the base weights and the activations
    lora_dtype: str = "bfloat16"
    memory: int | None = None  # bytes to use at most; None: most of what is available
    seed: int = 0
    machine: bool = True  # measure the machine's peaks


def _at_least(smallest: int, largest: int = MAX_INDEX) -> Any:
    def integer(text: str) -> int:
        value = int(text)  # argparse turns a ValueError into its own message
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        if value > largest:
            raise argparse.ArgumentTypeError(f"{value} is more than {largest}")
        return value

    return integer


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _gigabytes(text: str) -> int:
    """In bytes."""
    size = _positive(text) * 1e9
    if size > MAX_INDEX:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_INDEX // 10**9} GB")
    return int(size)


def parser() -> argparse.ArgumentParser:
    """The command line. What is not given has the default of Options, or the shape's own size."""
    new = Options()
    result = argparse.ArgumentParser(
        prog="python -m amx_sft_moe profile",
        description="Where the time of one MoE layer's LoRA step goes on this machine: checks the operator "
        "against float64, then times forward, backward and both, phase by phase. AMX_SFT_MOE_TRACE=file.json "
        "records the same run for Perfetto; docs/profiling.md explains every figure.",
    )
    add = result.add_argument_group("the layer").add_argument
    add("--shape", choices=SHAPES, default=new.name, help="of a known model (default: %(default)s)")
    for flag, meaning in (
        ("--experts", "experts E"),
        ("--hidden", "hidden size H"),
        ("--intermediate", "intermediate size I of an expert"),
        ("--top-k", "routes a token"),
    ):
        add(flag, type=_at_least(1), metavar="N", help=f"{meaning} (default: the shape's)")
    add("--rank", type=_at_least(0), metavar="R", help=f"of the LoRA factors (default: {new.rank})")
    add("--alpha", type=_positive, help=f"scaling is alpha / rank (default: {new.alpha:g})")
    add("--dtype", choices=DTYPES, help=f"of weights and activations (default: {new.dtype})")
    add("--lora-dtype", choices=DTYPES, help=f"of the LoRA factors (default: {new.lora_dtype})")
    add("--memory", type=_gigabytes, metavar="GB", help="to use at most (default: 3/4 of what is available)")
    add = result.add_argument_group("the experiment").add_argument
    add("--check-tokens", type=_at_least(1), metavar="T", help=f"of the check (default: {new.check_tokens})")
    add("--tokens", type=_at_least(1), metavar="T", help=f"of the timing (default: {new.tokens})")
    add("--warmup", type=_at_least(0), metavar="N", help=f"iterations before timing (default: {new.warmup})")
    add("--iterations", type=_at_least(1), metavar="N", help=f"timed (default: {new.iterations})")
    add("--threads", type=_at_least(1, MAX_THREADS), metavar="N", help=f"(default: {DEFAULT_THREADS})")
    add("--kernel", metavar="NAME", help="of `python -m amx_sft_moe info` (default: auto)")
    add("--seed", type=_at_least(0), help=f"of weights, inputs and routing (default: {new.seed})")
    add("--no-machine", dest="machine", action="store_false", help="do not measure the machine's peaks")
    return result


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line. Exits with argparse's message and status 2 where it is not valid."""
    command = parser()
    given = {name: value for name, value in vars(command.parse_args(argv)).items() if value is not None}
    shape = SHAPES[name := given.pop("shape")]
    sizes = {key: given.pop(key) for key in ("experts", "hidden", "intermediate", "top_k") if key in given}
    shape = replace(shape, **sizes)
    if sizes.keys() - {"experts"}:  # fewer experts are left out of a known layer; others make another one
        name = "custom"
    if shape.top_k > shape.experts:
        command.error(f"--top-k: {shape.top_k} routes a token, but {shape.experts} experts")
    given.setdefault("threads", default_threads())
    return replace(Options(), name=name, shape=shape, **given)
