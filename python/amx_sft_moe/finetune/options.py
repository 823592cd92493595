"""What a run is asked to do, and the two sets of defaults: minutes on 2 cores, or seconds for a test."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from amx_sft_moe.arguments import MAX_THREADS
from amx_sft_moe.system.process import DEFAULT_THREADS, default_threads

_LARGEST_FLOAT32 = 2.0**128 - 2.0**104
_LARGEST_SEED = 2**32 - 1  # numpy's, which transformers seeds too
_LARGEST_BATCH, _LONGEST_SEQUENCE = 2**16, 2**20  # far above what trains, below what overflows
_LARGEST_RANK, _MOST_STEPS = 2**16, 10**9

OURS = "amx_sft_moe"  # experts_implementation: this package's operator
CHECKPOINT_LEARNING_RATE = 2e-4  # for a model that has learnt a lot; one made here needs and stands more
TORCH_GROUPED = "grouped_mm"  # experts_implementation: torch's grouped matrix product, the one to compare with


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the Qwen3-MoE that is made when no checkpoint is given."""

    vocabulary: int = 4096
    layers: int = 4
    hidden: int = 256  # H
    intermediate: int = 512  # I, of one expert
    experts: int = 16  # E
    top_k: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head: int = 64  # size of one attention head


@dataclass(frozen=True)
class Options:
    """One run. Every field is what will happen: nothing is filled in later."""

    model: Path | None = None  # a local checkpoint; None makes and trains a small model
    cache_dir: Path | None = None  # for experts that need another layout; None: in the checkpoint's folder
    data: Path | None = None  # JSON lines; None takes the standard library's questions and answers
    output: Path = Path("finetune-output")
    rank: int = 8
    alpha: float = 16.0
    steps: int = 200  # LoRA steps
    base_steps: int = 450
    batch_size: int = 4  # sequences
    sequence_length: int = 256  # tokens
    learning_rate: float = 4e-3  # of the LoRA stage
    base_learning_rate: float = 1e-3
    held_out: float = 0.04  # share of the text, and of the examples
    evaluation_rows: int = 64  # most sequences that a held-out loss is taken over
    kernel: str = "auto"
    threads: int = 1
    seed: int = 0
    compare_steps: int = 8
    dtype: str = "bfloat16"  # of the frozen experts in the LoRA stage
    dense_dtype: str = "bfloat16"  # of the rest of it, and of torch's own experts in the comparison
    quick: bool = False
    texts: int | None = None  # most documents and most examples taken; None takes all
    shape: ModelShape = field(default_factory=ModelShape)

    @property
    def dtypes(self) -> str:
        """Of the frozen base, in words."""
        if self.dense_dtype == self.dtype:
            return self.dtype
        return f"{self.dtype} (experts) and {self.dense_dtype} (the rest)"

    def as_json(self) -> dict[str, Any]:
        """Plain values, for metrics.json."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


_QUICK = Options(
    rank=4,
    alpha=8.0,
    steps=30,
    base_steps=20,
    batch_size=4,
    sequence_length=64,
    learning_rate=2e-2,
    base_learning_rate=5e-3,
    evaluation_rows=16,
    compare_steps=2,
    quick=True,
    texts=200,
    shape=ModelShape(
        vocabulary=512,
        layers=2,
        hidden=64,
        intermediate=96,
        experts=4,
        top_k=2,
        heads=2,
        key_value_heads=1,
        head=32,
    ),
)


def _at_least(smallest: int, largest: int | None = None) -> Any:
    def integer(text: str) -> int:
        value = int(text)  # argparse turns a ValueError into its own message
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        if largest is not None and value > largest:
            raise argparse.ArgumentTypeError(f"{value} is more than {largest}")
        return value

    return integer


def _path(text: str) -> Path:
    if not text:  # to Path the current directory, and mostly a script's unset variable
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _positive_float32(text: str) -> float:
    value = _positive(text)
    if value > _LARGEST_FLOAT32:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LARGEST_FLOAT32:g}, the largest of float32")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line. A default of None means: that of the normal run, or of `--quick`."""
    result = argparse.ArgumentParser(
        prog="python -m amx_sft_moe finetune",
        description="Fine-tunes a Mixture-of-Experts model with LoRA on this CPU, offline. Without --model "
        "and --data it makes a small Qwen3-MoE, trains it on the Python standard library's prose and "
        "fine-tunes it on the library's documented signatures.",
    )
    new = Options()

    def add(flag: str, meaning: str, **rest: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        value, quick = getattr(new, name, None), getattr(_QUICK, name, None)
        if value is not None:
            meaning += f" (default: {value}{'' if quick == value else f', with --quick {quick}'})"
        group.add_argument(flag, help=meaning, **rest)

    group = result.add_argument_group("what is trained")
    add(
        "--model",
        "a local checkpoint of a model with routed experts, with its tokenizer: no base training",
        type=_path,
        metavar="DIR",
    )
    add(
        "--cache-dir",
        "where experts that lie transposed in the checkpoint (gpt-oss) are written once as the operator reads "
        "them (default: in the checkpoint's folder)",
        type=_path,
        metavar="DIR",
    )
    add("--data", 'lines {"prompt": ..., "completion": ...} or {"text": ...}', type=_path, metavar="FILE.jsonl")
    add("--output", "where everything is written", type=_path, metavar="DIR")
    add("--dtype", "of the frozen experts while LoRA is trained", choices=("bfloat16", "float32"))
    group.add_argument(
        "--dense-dtype",
        choices=("bfloat16", "float32"),
        help="of everything else, and of torch's own experts in the comparison (default: that of the experts; "
        "float32 on CPUs without AVX512, where torch has no fast bfloat16 products)",
    )
    group = result.add_argument_group("how long and how")
    add("--rank", "rank of the adapters", type=_at_least(1, _LARGEST_RANK), metavar="R")
    group.add_argument("--alpha", type=_positive_float32, help="scaling is alpha / rank (default: 2 * rank)")
    add("--steps", "LoRA steps", type=_at_least(1, _MOST_STEPS), metavar="N")
    add("--base-steps", "steps of base training before them", type=_at_least(1, _MOST_STEPS), metavar="N")
    add("--batch-size", "sequences a step", type=_at_least(1, _LARGEST_BATCH), metavar="N")
    add("--sequence-length", "tokens a sequence", type=_at_least(8, _LONGEST_SEQUENCE), metavar="N")
    add(
        "--learning-rate",
        f"of the LoRA stage, with --model {CHECKPOINT_LEARNING_RATE} in any case",
        type=_positive,
        metavar="LR",
    )
    add("--seed", "of weights, adapter and order of the data", type=_at_least(0, _LARGEST_SEED))
    group = result.add_argument_group("on what")
    add(
        "--kernel",
        "kernel of the operator; `python -m amx_sft_moe info` lists those of this CPU",
        metavar="NAME",
    )
    group.add_argument(
        "--threads", type=_at_least(1), metavar="N", help=f"threads (default: {DEFAULT_THREADS})"
    )
    group = result.add_argument_group("reporting")
    add(
        "--compare-steps",
        "steps to compare with torch's grouped_mm, 0 for none",
        type=_at_least(0, _MOST_STEPS),
        metavar="N",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, few steps, and of all examples, those of --data too, at most "
        f"{_QUICK.texts}: to see in a minute or two that everything works",
    )
    return result


def _dense_dtype(dtype: str) -> str:
    import torch  # not before it is needed: --help and wrong options are answered at once

    from amx_sft_moe.checkpoints.dense import dense_dtype_of

    return str(dense_dtype_of("auto", getattr(torch, dtype))).removeprefix("torch.")


def _require_utf8(command: argparse.ArgumentParser, paths: dict[str, Path]) -> None:
    """Refuses what safetensors and tokenizers cannot write to, which they say only after training."""
    for name, path in paths.items():
        absolute = os.path.realpath(path)  # the current directory may be what is not UTF-8
        try:
            absolute.encode("utf-8")
        except UnicodeEncodeError:
            command.error(f"--{name.replace('_', '-')}: expected a path in UTF-8, got {absolute!r}")


def parse(argv: list[str]) -> Options:
    """The options of a command line. Exits with argparse's message and status 2 where it is not valid."""
    command = parser()
    given = {name: value for name, value in vars(command.parse_args(argv)).items() if value is not None}
    paths = {name: value for name, value in given.items() if isinstance(value, Path)}
    _require_utf8(command, {"output": Options().output, **paths})
    if "model" in given and "base_steps" in given:
        command.error(f"--base-steps: expected no --model, whose base is not trained, got {given['model']}")
    if "cache_dir" in given and "model" not in given:
        command.error(f"--cache-dir: expected a --model to convert, got {given['cache_dir']} without")
    dtype = given.get("dtype", Options().dtype)
    if given.get("dense_dtype", dtype) not in (dtype, "float32"):
        command.error(f"--dense-dtype: expected float32, as --dtype, got {given['dense_dtype']}")
    threads = given.get("threads", default_threads())
    if threads > MAX_THREADS:  # OMP_NUM_THREADS can say as much
        command.error(f"--threads: expected at most {MAX_THREADS}, got {threads}")
    defaults = _QUICK if given["quick"] else Options()
    derived: dict[str, Any] = {"threads": threads, "dense_dtype": _dense_dtype(dtype)}
    if "rank" in given:
        derived["alpha"] = 2.0 * given["rank"]
    if "model" in given:
        derived["learning_rate"] = CHECKPOINT_LEARNING_RATE
    return replace(defaults, **{**derived, **given})
