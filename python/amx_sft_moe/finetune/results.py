"""What a run found out, in one place: the terminal, metrics.json, report.md and the picture all read it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .comparison import Lane
from .hook import BackwardTimes
from .options import Options
from .training import Curve


@dataclass
class Data:
    """Where text and examples come from, and how much of it there is."""

    prose: str  # what the base is trained on; empty where a checkpoint was given
    examples: str  # what LoRA is trained on
    prose_tokens: int
    prose_held_out_tokens: int
    train_examples: int
    held_out_examples: int
    train_tokens: int
    held_out_tokens: int
    truncated: int  # examples cut to the sequence length
    dropped: int  # examples with nothing to predict: the prompt alone is too long, or all is one token
    vocabulary: int


@dataclass
class Model:
    """Sizes of the model and of its adapter, in numbers (parameters)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    frozen: int
    trained_experts: int
    trained_attention: int


NOT_YET = "this was written before it was tried"


@dataclass
class Adapter:
    """The adapter on disk. Losses in nats per token, on the same held-out tokens."""

    bytes: int
    loss: float  # in this process, experts in the operator
    # A fresh process, stock transformers and PEFT; None: no memory for it, or it failed.
    stock_loss: float | None = None
    stock_error: str = ""  # why it failed
    stock_skipped: str = ""  # why it was not read back; NOT_YET where the run was killed before that
    stock_differs: str = ""  # that its loss is another than here, and which; empty: it is not, or is not known
    fused: str = ""  # why it is not in a pair of factors per expert; empty: it is


@dataclass
class Results:
    """One run. Parts that the options switch off, that failed or that are still to come are None."""

    options: Options
    environment: dict[str, str]
    data: Data
    model: Model
    base: Curve | None
    lora: Curve
    adapter: Adapter
    comparison: list[Lane] | None = None  # ours, then torch's grouped_mm
    backward: BackwardTimes | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    failed: dict[str, str] = field(
        default_factory=dict
    )  # what of it could not be found out or written, and why

    @property
    def errors(self) -> list[str]:
        """What went wrong once the adapter was written, in sentences; empty: nothing."""
        told = [self.adapter.stock_error] if self.adapter.stock_error else []
        if self.failed:
            reasons = "; ".join(f"{what}: {reason}" for what, reason in self.failed.items())
            told.append(f"--output {self.options.output}: the adapter is written, but not {reasons}")
        return told

    @property
    def before(self) -> float:
        """Held-out loss of the base on the examples."""
        return self.lora.held_out[0][1]

    @property
    def after(self) -> float:
        """Held-out loss with the trained adapter."""
        return self.lora.held_out[-1][1]

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values; seconds, nats per token, and counts."""

        def curve(found: Curve) -> dict[str, Any]:
            return {**asdict(found), "tokens_per_second": found.tokens_per_second}

        def lane(found: Lane) -> dict[str, Any]:
            medians = {name: found.median(name) for name in ("step", "forward", "backward")}
            return {**asdict(found), "median": medians, "experts_share": found.share}

        return {
            "options": self.options.as_json(),
            "environment": self.environment,
            "data": asdict(self.data),
            "model": asdict(self.model),
            "base_training": self.base and curve(self.base),
            "lora_training": {
                **curve(self.lora),
                "held_out_before": self.before,
                "held_out_after": self.after,
            },
            "comparison": self.comparison and [lane(found) for found in self.comparison],
            "backward_times": self.backward and asdict(self.backward),
            "adapter": asdict(self.adapter),
            "failed": self.failed,
            "seconds": {**self.seconds, "total": sum(self.seconds.values())},
        }


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_metrics(results: Results, path: Path) -> None:
    """Writes `metrics.json`; numbers that are none (a loss that overflowed) are null, as JSON has no others."""
    write_text(path, json.dumps(_finite(results.as_json()), indent=2, allow_nan=False) + "\n")


def write_times(results: Results, path: Path) -> None:
    """Writes `backward-times.txt`, the timing dump."""
    if results.backward is not None:
        write_text(path, results.backward.text + "\n")


def _finite(value: Any) -> Any:
    """Plain values with None in the place of each float that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
