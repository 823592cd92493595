"""The same steps from the same start with two implementations of the experts, turn by turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from .clock import ExpertClock
from .model import adapter_state, bare_model, expert_modules, restore_adapter
from .packing import TokenBlocks


@dataclass
class Lane:
    """What one implementation did. One entry a step in each list; seconds."""

    name: str  # of the experts_implementation
    losses: list[float] = field(default_factory=list)  # before the step, nats per token
    step: list[float] = field(default_factory=list)  # forward, backward, clipping, optimiser
    forward: list[float] = field(default_factory=list)  # of the experts, all layers
    backward: list[float] = field(default_factory=list)  # of the experts, all layers

    def median(self, what: str) -> float:
        """Median over the steps of the list named `what`, without the first of several: it warms up."""
        values = getattr(self, what)
        return statistics.median(values[1:] or values)

    @property
    def experts(self) -> float:
        """Seconds of the experts in a step."""
        return self.median("forward") + self.median("backward")

    @property
    def share(self) -> float:
        """The experts' part of a step, 0 to 1."""
        return self.experts / self.median("step")


def batches(blocks: TokenBlocks, steps: int, batch_size: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """`steps` batches of as many rows as in training, drawn by `seed`, each row once before any comes again.

    Each is made when it is asked for: all of many steps would not fit into memory.
    """
    generator = torch.Generator().manual_seed(seed)
    count = blocks.rows_of_step(batch_size)
    rows: list[int] = []
    for _ in range(steps):
        while len(rows) < count:
            rows += torch.randperm(len(blocks), generator=generator).tolist()
        yield blocks.batch(rows[:count])
        del rows[:count]


class _Runner:
    """One lane's training: its own adapter and optimiser state, on a model that lanes may share.

    Where one model serves both, comparing needs no second copy of the weights; each lane's adapter is
    copied in before its step and out after it, outside the time that is measured.
    """

    def __init__(self, model: torch.nn.Module, name: str, start: dict[str, torch.Tensor], learning_rate: float):
        self.model = model
        self.lane = Lane(name)
        self.adapter = start
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.clock = ExpertClock()

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        bare_model(self.model).set_experts_implementation(self.lane.name)
        restore_adapter(self.model, self.adapter)
        self.clock.reset()
        with self.clock.attached(expert_modules(self.model)):
            began = time.perf_counter()
            loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds = time.perf_counter() - began
        self.adapter = adapter_state(self.model)
        self.lane.losses.append(loss.item())
        self.lane.step.append(seconds)
        self.lane.forward.append(self.clock.forward)
        self.lane.backward.append(self.clock.backward)


@contextmanager
def _left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Adapter, mode and implementation of the model are afterwards as before."""
    before = adapter_state(model)
    implementation = bare_model(model).config._experts_implementation
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        restore_adapter(model, before)
        bare_model(model).set_experts_implementation(implementation)
        model.train(was_training)


def compare(
    models: Mapping[str, torch.nn.Module],
    start: dict[str, torch.Tensor],
    steps: Iterable[dict[str, torch.Tensor]],
    count: int,
    learning_rate: float,
) -> list[Lane]:
    """Runs each of the `count` batches of `steps` once per implementation, each lane from the adapter `start`.

    `models` has the model of each implementation, by its name; it may be one for all. The lanes take turns, and
    who goes first changes with every batch, so that what else the machine does meets both. The models are
    afterwards as before.
    """
    runners = [_Runner(model, name, start, learning_rate) for name, model in models.items()]
    with ExitStack() as stack:
        for model in {id(model): model for model in models.values()}.values():
            stack.enter_context(_left_as_it_was(model))
        bar = tqdm(steps, desc="compare", total=count, unit="step", dynamic_ncols=True)
        for batch in stack.enter_context(bar):
            for runner in runners:
                runner.step(batch)
            runners.reverse()
    by_name = {runner.lane.name: runner.lane for runner in runners}
    return [by_name[name] for name in models]
