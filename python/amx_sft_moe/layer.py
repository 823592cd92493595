"""Base weights of one layer, and operators for them: one per thread that asks, all of a thread on one
workspace."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from amx_sft_moe import _core
from amx_sft_moe.arguments import MAX_THREADS, as_int, as_text, parse_activation
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.kernels import choice_of

# The order in which the operator has their gradients.
WEIGHT_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")

# One stacked tensor, or one matrix per expert.
Weight = torch.Tensor | Sequence[torch.Tensor]


def _shape_of(name: str, weight: Any) -> torch.Size:
    """``[E, rows, cols]``; that every matrix has the first one's shape is the operator's to check."""
    if isinstance(weight, torch.Tensor):
        shape = weight.shape
    elif isinstance(weight, Sequence) and weight and all(isinstance(matrix, torch.Tensor) for matrix in weight):
        shape = torch.Size((len(weight), *weight[0].shape))
    else:
        raise TypeError(f"{name}: expected a torch.Tensor or one for each expert, got {type(weight).__name__}")
    if len(shape) != 3:
        raise ArgumentError(f"{name}: expected 3 dimensions, got shape {list(shape)}")
    return shape


def require_tensor(name: str, tensor: object) -> None:
    """Refuses what is neither a tensor nor None: the operator reads numpy arrays too, autograd does not."""
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor or None, got {type(tensor).__name__}")


def as_input(weight: Weight | None) -> torch.Tensor | None:
    """A weight as autograd has it; None of one matrix per expert, which are frozen."""
    return weight if isinstance(weight, torch.Tensor) else None


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _memory_of(tensor: Weight) -> tuple[Any, ...]:
    if not isinstance(tensor, torch.Tensor):
        return tuple(map(_memory_of, tensor))
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


@dataclass(frozen=True)
class ExpertBiases:
    """Biases of the projections: ``gate_bias [E, I]``, ``up_bias [E, I]``, ``down_bias [E, H]``; or
    ``gate_up_bias [E, 2I]``, gate entries first, in place of the first two. ``None`` where there is none.

    bfloat16 or float32, whatever the weights are, of any strides: gpt-oss's interleaved bias is
    ``gate_bias=b[:, ::2]``, ``up_bias=b[:, 1::2]``.

    Raises:
        TypeError: one that is no torch.Tensor. (Shapes and dtypes are checked where they are used.)
    """

    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        names = "gate_bias", "up_bias", "down_bias", "gate_up_bias"
        for name, bias in zip(names, self.tensors(), strict=True):
            require_tensor(f"ExpertBiases: {name}", bias)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All four, in the order of the fields."""
        return self.gate_bias, self.up_bias, self.down_bias, self.gate_up_bias


class Scratch:
    """Memory for what lives during one call. It is kept for the next one: memory that is new costs a page fault
    for every 4 KiB, which takes longer than writing to them."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}

    def tensor(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor, the only one in its slot, without values."""
        count = math.prod(shape)
        needed = -(-count * dtype.itemsize // torch.float32.itemsize)
        memory = self._memory.pop(slot, None)
        if memory is None or memory.numel() < needed:
            del memory  # before there is more of it
            # Modes see what happens in each call alone (selective checkpointing counts operations), and make
            # nothing of what is kept (FakeTensorMode).
            with _disable_current_modes():
                memory = torch.empty(needed, dtype=torch.float32, device="cpu")
        self._memory[slot] = memory
        return memory.view(dtype)[:count].view(*shape)


def _add(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _add(sums.setdefault(name, {}), value)
        else:
            sums[name] = sums.get(name, 0) + value


class _Times:
    """Sums, where they are ``wanted``, of a thread's operators that are gone: of one pair, however many."""

    def __init__(self) -> None:
        self.wanted = False
        self._sums: tuple[dict[str, Any], dict[str, Any]] = ({}, {})

    def add(self, totals: tuple[dict[str, Any], dict[str, Any]]) -> None:
        for sums, more in zip(self._sums, totals, strict=True):
            _add(sums, more)

    def take(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        taken, self._sums = self._sums, ({}, {})
        return [taken] if taken[0] else []


@dataclass
class _Operator:
    """A thread's operator of one layer, with the memory and the name that it was given."""

    made: _core.SftMoe
    memory: tuple[Any, ...]
    name: str
    times: _Times

    def __del__(self) -> None:
        if self.times.wanted:
            self.times.add(self.made.take_totals())


class _ThreadState(threading.local):
    """What one thread uses for all its layers. Layers of a model run one after another, so they share scratch
    memory; two threads never do."""

    def __init__(self) -> None:
        self.workspace = _core.Workspace()
        self.operators: weakref.WeakKeyDictionary[ExpertWeights, _Operator] = weakref.WeakKeyDictionary()
        self.times_of_gone = _Times()
        self.scratch: Scratch | None = None


_of_this_thread = _ThreadState()


@contextmanager
def thread_scratch() -> Iterator[Scratch]:
    """The calling thread's, for one call. One within another, as a profiler's callback could make it, has its
    own."""
    taken, _of_this_thread.scratch = _of_this_thread.scratch or Scratch(), None
    try:
        yield taken
    finally:
        _of_this_thread.scratch = taken


def collect_times(wanted: bool) -> None:
    """Whether the calling thread's operators, those of today and those made later, add up what
    :func:`take_times` returns."""
    state = _of_this_thread
    state.times_of_gone.wanted = wanted
    state.times_of_gone.take()
    for operator in state.operators.values():
        operator.made.collect_totals(wanted)


def take_times() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each operator of the calling thread the sums over its forwards and over its backwards since the last
    call: ``passes``, ``tokens``, ``total_ms``, ``busy_ms``, ``waiting_ms``, and by name ``groups`` and
    ``phases`` (ms), ``flop`` and ``bytes``. Those that are gone by now, as where memory moves from forward to
    forward (FSDP), are added up in one pair."""
    state = _of_this_thread
    return state.times_of_gone.take() + [operator.made.take_totals() for operator in state.operators.values()]


class ExpertWeights:
    """Base weights of one layer: ``gate_up_proj [E, 2I, H]`` (gate rows first) or ``gate_proj``, ``up_proj``
    ``[E, I, H]``, and ``down_proj [E, H, I]``; CPU tensors, all bfloat16 or all float32. Each is one stacked
    tensor or a sequence of one matrix per expert, such as views of mapped files.

    The tensors are kept, not copied. A parameter whose memory moves or changes its dtype, shape or strides
    (``.to()``, FSDP, merging, ``.data``) is noticed at the next use; the matrices of a sequence must stay in
    place.

    Weights and ``biases`` that require a gradient receive one, those that do not are frozen. Weights as one
    matrix per expert are always frozen.

    Raises:
        ArgumentError: a shape, device, size or option does not fit, or matrices of a sequence require a
            gradient. TypeError: an element type or a kind of argument does not, or a weight is missing.
            KernelError: the kernel is unknown, not available here, or takes no weights of that dtype.
    """

    def __init__(
        self,
        *,
        top_k: int,
        down_proj: Weight,
        gate_up_proj: Weight | None = None,
        gate_proj: Weight | None = None,
        up_proj: Weight | None = None,
        biases: ExpertBiases | None = None,
        activation: str | Mapping[str, Any] = "silu",
        kernel: str = "auto",
        num_threads: int | None = None,
        name: str = "",
    ) -> None:
        self.name = name
        given = {
            "gate_up_proj": gate_up_proj,
            "gate_proj": gate_proj,
            "up_proj": up_proj,
            "down_proj": down_proj,
        }
        self._weights = {name: weight for name, weight in given.items() if weight is not None}
        shapes = {name: _shape_of(name, weight) for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            if not isinstance(weight, torch.Tensor):
                self._weights[name] = tuple(weight)
                if any(matrix.requires_grad for matrix in weight):
                    raise ArgumentError(
                        f"{name}: expected matrices that require no gradient, as one for each expert they are "
                        "frozen, got requires_grad=True"
                    )
        if "down_proj" not in self._weights:
            raise TypeError("down_proj: expected a torch.Tensor, got None")
        self.num_experts, self.hidden_size, self.intermediate_size = shapes["down_proj"]
        self.biases = ExpertBiases() if biases is None else biases
        if not isinstance(self.biases, ExpertBiases):
            raise TypeError(f"biases: expected ExpertBiases, got {type(biases).__name__}")
        self.top_k = as_int("top_k", top_k, 1)
        self.activation, limit, alpha = parse_activation(activation)
        self._options: dict[str, Any] = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "lora_rank": 0,
            "lora_alpha": None,
            "max_tokens": None,
            "cache_depth": 1,
            "activation": self.activation,
            "limit": limit,
            "alpha": alpha,
            # All threads take what this one found, for each dtype, whatever the environment says by then.
            "kernel": choice_of(kernel),
            "num_threads": 0 if num_threads is None else as_int("num_threads", num_threads, 1, MAX_THREADS),
        }
        self.operator()  # here and not at the first use, what does not fit is refused

    @property
    def name(self) -> str:
        """Of the layer in dumps and traces; may be set at any time."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = as_text("name", name)

    def inputs(self, weights: Mapping[str, Weight] | None = None) -> tuple[torch.Tensor | None, ...]:
        """The base weights as inputs of autograd, in the order of :data:`WEIGHT_NAMES`: these, or ``weights``,
        which are views of the same memory."""
        if weights is None:
            return tuple([as_input(self._weights.get(name)) for name in WEIGHT_NAMES])
        if weights.keys() != self._weights.keys():
            raise ArgumentError(f"weights: expected {sorted(self._weights)}, got {sorted(weights)}")
        for name, weight in weights.items():
            own = self._weights[name]
            if weight is own:
                continue
            _shape_of(f"weights[{name!r}]", weight)
            if _memory_of(weight) != _memory_of(own):
                raise ArgumentError(
                    f"weights[{name!r}]: expected the memory of the experts' {name}, {_memory_of(own)}, got "
                    f"{_memory_of(weight)} (address, dtype, shape, strides)"
                )
        return tuple([as_input(weights.get(name)) for name in WEIGHT_NAMES])

    def versions(self) -> list[int]:
        """Counts of changes in place, one for each weight."""
        return [
            _version_of(weight) if isinstance(weight, torch.Tensor) else sum(map(_version_of, weight))
            for weight in self._weights.values()
        ]

    @property
    def weights(self) -> dict[str, Weight]:
        """The base weights by name."""
        return self._weights

    @property
    def dtype(self) -> torch.dtype:
        """Of the base weights."""
        down = self._weights["down_proj"]
        return down.dtype if isinstance(down, torch.Tensor) else down[0].dtype

    def operator(self) -> _core.SftMoe:
        """The calling thread's operator, its base weights where they are now."""
        state = _of_this_thread
        # Not addresses alone: .data may be given less of the same memory. Matrices of a sequence stay in place.
        memory = tuple(
            [
                _memory_of(weight) if isinstance(weight, torch.Tensor) else None
                for weight in self._weights.values()
            ]
        )
        found = state.operators.get(self)
        if found is not None and found.memory == memory and found.name is self._name:
            return found.made
        if found is None:
            made = _core.SftMoe(**self._options, workspace=state.workspace)
            made.collect_totals(state.times_of_gone.wanted)
        else:
            made = found.made
        made.name = self._name
        weights = self._weights
        made.set_base(
            weights.get("gate_proj"),
            weights.get("up_proj"),
            weights.get("down_proj"),
            weights.get("gate_up_proj"),
            _core.Biases(self.biases.tensors()),
        )
        if found is None:
            state.operators[self] = _Operator(made, memory, self._name, state.times_of_gone)
        else:
            found.memory, found.name = memory, self._name
        return made
