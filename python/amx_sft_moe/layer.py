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
            memory = torch.empty(needed, dtype=torch.float32, device="cpu")
        if type(memory) is torch.Tensor:  # and not what a mode of torch makes of it, such as FakeTensorMode
            self._memory[slot] = memory
        return memory.view(dtype)[:count].view(*shape)


class _ThreadState(threading.local):
    """What one thread uses for all its layers. Layers of a model run one after another, so they share scratch
    memory; two threads never do."""

    def __init__(self) -> None:
        self.workspace = _core.Workspace()
        # Each with the memory and the name that it was given.
        self.operators: weakref.WeakKeyDictionary[ExpertWeights, tuple[_core.SftMoe, tuple[Any, ...], str]] = (
            weakref.WeakKeyDictionary()
        )
        self.collects_times = False
        # Sums of operators that went while times were collected: those of memory that moves (FSDP).
        self.times_of_gone: list[tuple[dict[str, Any], dict[str, Any]]] = []
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
    state.collects_times = wanted
    state.times_of_gone.clear()
    for experts, (made, *_) in state.operators.items():
        made.collect_totals(wanted)
        if wanted:
            _keep_times(experts, made)


def take_times() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each operator of the calling thread the sums over its forwards and over its backwards since the last
    call: ``passes``, ``tokens``, ``total_ms``, ``busy_ms``, ``waiting_ms``, and by name ``groups`` and
    ``phases`` (ms), ``flop`` and ``bytes``."""
    state = _of_this_thread
    of_gone = state.times_of_gone[:]
    state.times_of_gone.clear()
    return of_gone + [made.take_totals() for made, *_ in state.operators.values()]


def _keep_times(experts: ExpertWeights, made: _core.SftMoe) -> None:
    """Has :func:`take_times` return what is not taken yet when ``experts`` goes, and its operator with it."""
    gone = _of_this_thread.times_of_gone

    def keep() -> None:
        totals = made.take_totals()
        if any(of_passes["passes"] for of_passes in totals):
            gone.append(totals)

    weakref.finalize(experts, keep).atexit = False


class ExpertWeights:
    """Base weights of one layer: ``gate_up_proj [E, 2I, H]`` (gate rows first) or ``gate_proj``, ``up_proj``
    ``[E, I, H]``, and ``down_proj [E, H, I]``; CPU tensors, all bfloat16 or all float32. Each is one stacked
    tensor or a sequence of one matrix per expert, such as views of mapped files.

    The tensors are kept, not copied. A parameter whose memory moves or changes its dtype, shape or strides
    (``.to()``, FSDP, merging, ``.data``) is noticed at the next use; the matrices of a sequence must stay in
    place.

    Weights and ``biases`` that require a gradient receive one, those that do not are frozen. Weights as one
    matrix per expert are always frozen.
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
        if found is not None and found[1] == memory and found[2] is self._name:
            return found[0]
        made = found[0] if found is not None else None
        if made is None:
            made = _core.SftMoe(**self._options, workspace=state.workspace)
            made.collect_totals(state.collects_times)
            if state.collects_times:
                _keep_times(self, made)
        made.name = self._name
        weights = self._weights
        made.set_base(
            weights.get("gate_proj"),
            weights.get("up_proj"),
            weights.get("down_proj"),
            weights.get("gate_up_proj"),
            _core.Biases(self.biases.tensors()),
        )
        state.operators[self] = (made, memory, self._name)
        return made
