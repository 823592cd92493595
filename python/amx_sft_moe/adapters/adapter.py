"""An adapter in memory, the same for all formats on disk."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch

FUSED, PER_EXPERT, KTRANSFORMERS = "peft-fused", "per-expert", "ktransformers"
FORMATS = (FUSED, PER_EXPERT, KTRANSFORMERS)
PREFIX = "base_model.model."  # of names in PEFT's files
_INNER = ".base_layer"  # what an adapted module's own weights are behind there


@dataclass(frozen=True)
class Factors:
    """LoRA on one projection of one experts module: ``W[e] + scaling * b[e] @ a[e]``.

    Attributes:
        a: E matrices ``[r, in]``, often views into a file.
        b: E matrices ``[out, r]``.
        scaling: alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    scaling: float

    @property
    def rank(self) -> int:
        """Number of rows of each A."""
        return self.a[0].shape[0]

    def delta(self, expert: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """``scaling * b @ a`` of one expert, ``[out, in]``."""
        return self.scaling * (self.b[expert].to(dtype) @ self.a[expert].to(dtype))

    def shares_a_with(self, other: Factors) -> bool:
        """Whether every expert's A has the same bits in both."""
        pairs = zip(self.a, other.a, strict=True)
        return self.rank == other.rank and all(x is y or same_bits(x, y) for x, y in pairs)


@dataclass(frozen=True)
class Linear:
    """LoRA on a plain weight: ``W + scaling * b @ a`` with a ``[r, in]`` and b ``[out, r]``."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return self.a.shape[0]


@dataclass
class Adapter:
    """A whole adapter.

    Attributes:
        config: PEFT's ``adapter_config.json`` as it stands.
        experts: by experts module and projection (``gate_proj``, ``up_proj``, ``down_proj``).
        linears: LoRA elsewhere, by the module's name in the adapter.
        others: entries that are whole weights (PEFT's ``modules_to_save``, biases), as the model names them.
            One of a module in ``linears`` is what its change is added to (see :func:`is_beneath`).
        notes: what a reader had to add or could not know.
    """

    config: dict[str, Any]
    experts: dict[str, dict[str, Factors]] = field(default_factory=dict)
    linears: dict[str, Linear] = field(default_factory=dict)
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plain_name(key: str) -> str:
    """A key of PEFT's file as the base model names it."""
    return key.removeprefix(PREFIX).replace(_INNER, "")


def is_beneath(key: str) -> bool:
    """Whether the key is of a frozen weight that PEFT stores beside the factors of an adapted head: it need not
    be the checkpoint's, since the vocabulary may have been enlarged before training. Biases of adapted modules
    lie behind ``base_layer`` too, and are trained with ``bias="all"``."""
    return key.endswith(f"{_INNER}.weight")


def is_doubled(key: str, keys: Container[str]) -> bool:
    """Whether the key, of ``keys``, is a second one of a module in ``modules_to_save``. Where the vocabulary is
    not the checkpoint's any more PEFT writes all that lies in its place: the new weight again, and the old."""
    plain = re.sub(r"\.(modules_to_save|original_module)\.", ".", key)
    return plain != key and plain in keys


def peft_entries(
    linears: dict[str, Linear], others: dict[str, torch.Tensor], nested: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Entries of PEFT's file for all but the experts' factors. ``nested``: by experts module, how many
    adapters are around it."""
    depths = dict.fromkeys(linears, 1) | nested
    state = {}
    for name, linear in linears.items():
        state[f"{PREFIX}{name}.lora_A.weight"] = linear.a
        state[f"{PREFIX}{name}.lora_B.weight"] = linear.b
    for name, tensor in others.items():
        module, _, parameter = name.rpartition(".")
        state[f"{PREFIX}{module}{_INNER * depths.get(module, 0)}.{parameter}"] = tensor
    return state


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal in type, shape and every bit; NaNs too."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
