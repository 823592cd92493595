"""Phase times in what the Trainer of transformers logs: TensorBoard and every other reporter of it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from amx_sft_moe.integrations.layer_names import name_layers
from amx_sft_moe.layer import collect_times, take_times

PREFIX = "amx_sft_moe/"


class PhaseTimesCallback(TrainerCallback):
    """Adds to each of the Trainer's logs where the time of an optimiser step went, as the mean since the last
    log, all layers together:

    ``amx_sft_moe/forward_ms``, ``amx_sft_moe/backward_ms``: inside the operator;
    ``amx_sft_moe/share_of_step``: both, as a share of the step's wall time;
    ``amx_sft_moe/waiting``: of the threads' time in the operator, the share that they waited for each other;
    ``amx_sft_moe/gflops``: useful GFLOP/s inside the operator;
    ``amx_sft_moe/<group>_ms`` and, with ``phases``, ``amx_sft_moe/<phase>_ms``.

    Reporters are told before a callback that is given to the Trainer, so it has to be put before them:
    :func:`log_phase_times` does. Passes of an evaluation between steps do not count, nor do those of other
    threads than the Trainer's. Also names the model's layers (:func:`name_layers`).
    """

    def __init__(self, phases: bool = True) -> None:
        self.phases = phases
        self._sums: Counter[str] = Counter()
        self._steps = 0
        self._seconds = 0.0
        self._began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts to collect."""
        if (model := kwargs.get("model")) is not None:
            name_layers(model)
        collect_times(True)
        self._start_over()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forgets what ran between two steps."""
        take_times()
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds up what the step's passes took, all of its micro-batches."""
        self._seconds += time.perf_counter() - self._began
        self._steps += 1
        for forward, backward in take_times():
            self._sums["forward_ms"] += forward["total_ms"]
            self._sums["backward_ms"] += backward["total_ms"]
            for totals in (forward, backward):
                self._sums["busy_ms"] += totals["busy_ms"]
                self._sums["waiting_ms"] += totals["waiting_ms"]
                self._sums["flop"] += sum(
                    flop for name, flop in totals["flop"].items() if not name.endswith("_total")
                )
                named = totals["phases"] | totals["groups"] if self.phases else totals["groups"]
                self._sums.update({f"{name}_ms": ms for name, ms in named.items()})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the means to ``logs``, and to the history that the Trainer keeps. Not to an evaluation's: those
        are the metrics that it returns."""
        of_training = logs is not None and not {"loss", "train_loss"}.isdisjoint(logs)
        if logs is None or not of_training or not self._steps:
            return
        found = {f"{PREFIX}{name}": value for name, value in self._means().items()}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)
        self._start_over()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops to collect."""
        collect_times(False)

    def _start_over(self) -> None:
        self._sums.clear()
        self._steps, self._seconds = 0, 0.0

    def _means(self) -> dict[str, float]:
        sums = self._sums
        inside = sums["forward_ms"] + sums["backward_ms"]
        threads = sums["busy_ms"] + sums["waiting_ms"]
        means = {
            name: total / self._steps
            for name, total in sums.items()
            if name not in ("busy_ms", "waiting_ms", "flop")
        }
        means["share_of_step"] = inside / (self._seconds * 1e3)
        means["waiting"] = sums["waiting_ms"] / threads if threads else 0.0
        means["gflops"] = sums["flop"] / inside * 1e-6 if inside else 0.0
        return means


class _NotPrinted(TrainerCallback):
    """Takes the times out before the Trainer prints its logs: thirty numbers a line help nobody."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}

    def on_log(self, *_: Any, **kwargs: Any) -> None:
        if (logs := kwargs.get("logs")) is not None:
            self.taken = {name: logs.pop(name) for name in list(logs) if name.startswith(PREFIX)}


class _PutBack(TrainerCallback):
    """Puts them in again, for reporters that were added behind the printer."""

    def __init__(self, not_printed: _NotPrinted) -> None:
        self._not_printed = not_printed

    def on_log(self, *_: Any, **kwargs: Any) -> None:
        if (logs := kwargs.get("logs")) is not None:
            logs.update(self._not_printed.taken)


_OWN = (PhaseTimesCallback, _NotPrinted, _PutBack)


def log_phase_times(trainer: Trainer, *, phases: bool = True) -> PhaseTimesCallback:
    """Adds a :class:`PhaseTimesCallback` to ``trainer``, before the reporters; returns it. What the Trainer
    prints stays as it is. One that the Trainer has already is replaced: times can be taken once.

    Args:
        trainer: whose logs get the times.
        phases: each phase by its published name as well, not only the groups.
    """
    callback = PhaseTimesCallback(phases)
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [one for one in callbacks if not isinstance(one, _OWN)]
    callbacks.insert(0, callback)
    printers = [n for n, one in enumerate(callbacks) if isinstance(one, (PrinterCallback, ProgressCallback))]
    if printers:
        not_printed = _NotPrinted()
        callbacks.insert(printers[-1] + 1, _PutBack(not_printed))
        callbacks.insert(printers[0], not_printed)
    return callback
