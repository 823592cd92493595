"""Training through the Hugging Face Trainer, with one progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from tqdm import tqdm
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from .errors import DivergedError, FinetuneError
from .held_out import held_out_loss
from .packing import TokenBlocks

EVALUATIONS = 6  # held-out losses of a training, the first not counted


@dataclass
class Curve:
    """What a training stage leaves behind. Losses are in nats per token."""

    losses: list[float] = field(default_factory=list)  # of each batch; with the router's, where that is on
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, held-out loss)
    step_seconds: list[float] = field(default_factory=list)  # of each step; evaluations are not in it
    tokens_per_step: float = 0.0  # text, without padding, on average

    @property
    def tokens_per_second(self) -> float:
        """Over all steps. 0 before the first."""
        seconds = sum(self.step_seconds)
        return len(self.step_seconds) * self.tokens_per_step / seconds if seconds else 0.0


class _Progress(TrainerCallback):
    """A tqdm bar in place of the Trainer's printed dictionaries; keeps the curve; evaluates now and then."""

    def __init__(self, title: str, curve: Curve, evaluate: Callable[[], float], evaluate_every: int):
        self.title = title
        self.curve = curve
        self.evaluate = evaluate
        self.evaluate_every = evaluate_every
        self.bar: tqdm | None = None
        self.began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar = tqdm(total=state.max_steps, desc=self.title, unit="step", dynamic_ncols=True, leave=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.curve.step_seconds.append(time.perf_counter() - self.began)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        found = float(logs["loss"])
        done = state.global_step
        if not math.isfinite(found):  # nor will a later one be: the weights have it
            raise DivergedError(
                f"training has diverged: expected a finite loss, got {found} in step {done:,} of "
                f"{state.max_steps:,}"
            )
        self.curve.losses.append(found)
        if done % self.evaluate_every == 0 and done < state.max_steps:
            self.curve.held_out.append((done, self.evaluate()))
        if self.bar is not None:
            speed = f"{self.curve.tokens_per_second:,.0f} tokens/s"
            self.bar.set_postfix_str(f"loss {self.curve.losses[-1]:.3f}, {speed}", refresh=False)
            self.bar.update(1)

    def close(self) -> None:
        """Ends the bar, also after an exception, so that what is printed next has a line of its own."""
        if self.bar is not None:
            self.bar.close()


@contextmanager
def _reproducible() -> Iterator[None]:
    """Torch's deterministic algorithms: else grouped_mm's gather adds up gradients in an order of chance."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module with a property, which its types do not show
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # a search for bugs, paid for in every step
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def _arguments(
    blocks: TokenBlocks, *, steps: int, batch_size: int, learning_rate: float, seed: int, scratch: Path
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(scratch),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(max(steps // 20, 1), steps - 1),  # the first of them has learning rate 0
        max_grad_norm=1.0,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would log 0 for a loss that is none
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,  # the bar is ours
        use_cpu=True,
        seed=seed,
        data_seed=seed,
        dataloader_drop_last=len(blocks) >= batch_size,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def train(
    model: torch.nn.Module,
    blocks: TokenBlocks,
    held_out: TokenBlocks,
    *,
    title: str,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    scratch: Path,
) -> Curve:
    """Trains what requires a gradient for `steps` steps of `batch_size` rows, AdamW with a cosine schedule.

    `blocks` [N, L] are shuffled by `seed` in each pass; fewer than `batch_size` are one short batch. The
    held-out loss is taken before, at most EVALUATIONS - 1 times on the way, and after. The same arguments give
    the same weights, bit for bit. `scratch` is the Trainer's own folder; nothing is left in it.

    Raises FinetuneError where the model has no finite loss to begin with, DivergedError once a step has none.
    """
    curve = Curve(tokens_per_step=blocks.tokens / len(blocks) * blocks.rows_of_step(batch_size))

    def evaluate() -> float:
        return held_out_loss(model, held_out.tensors(), batch_size)

    before = evaluate()
    if not math.isfinite(before):
        raise FinetuneError(
            f"expected a finite held-out loss before {title.strip()}, got {before}: nothing was kept"
        )
    curve.held_out.append((0, before))
    progress = _Progress(title, curve, evaluate, math.ceil(steps / EVALUATIONS))
    arguments = _arguments(
        blocks, steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed, scratch=scratch
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks,
        data_collator=default_data_collator,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    try:
        with _reproducible():
            trainer.train()
    finally:
        progress.close()
    curve.held_out.append((steps, evaluate()))
    return curve
