"""Arguments as callers give them, checked by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from amx_sft_moe.errors import ArgumentError

# As users write them, and as _core names them; gpt_oss alone has constants.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gpt_oss": "gpt_oss",
}

# The published gpt-oss constants (model card and reference implementation).
_GPT_OSS_LIMIT = 7.0
_GPT_OSS_ALPHA = 1.702


# What the compiled module takes: sizes have 64 bits, numbers are floats; an OpenMP that cannot have its threads
# ends the process.
MAX_INDEX = 2**63 - 1
MAX_THREADS = 4096  # kMaxThreads of the library
_MAX_FLOAT = (2 - 2**-23) * 2.0**127


def as_int(name: str, value: Any, minimum: int, maximum: int = MAX_INDEX) -> int:
    """``value`` as an int from ``minimum`` to ``maximum``; raises TypeError or ArgumentError that names
    ``name``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}") from None
    if number < minimum:
        raise ArgumentError(f"{name}: expected at least {minimum}, got {number}")
    if number > maximum:
        raise ArgumentError(f"{name}: expected at most {maximum}, got {number}")
    return number


def as_float(name: str, value: Any) -> float:
    """``value`` as a float; raises TypeError that names ``name``."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}") from None
    except OverflowError:  # an int that not even a double holds
        return math.inf if value > 0 else -math.inf


def as_finite(name: str, value: Any) -> float:
    """The same, neither infinite nor NaN, also once it is a float of 32 bits; raises ArgumentError too."""
    number = as_float(name, value)
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: expected a finite number, got {number}")
    if abs(number) > _MAX_FLOAT:
        raise ArgumentError(f"{name}: expected a finite number in float32, got {number}")
    return number


def as_text(name: str, value: Any) -> str:
    """``value``, which is to be a str that dumps and traces can hold; raises TypeError or ArgumentError that
    names ``name``."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{name}: expected text that UTF-8 can encode, got {value!a}") from None
    return value


def parse_activation(activation: str | Mapping[str, Any]) -> tuple[str, float, float]:
    """``(name, limit, alpha)`` of an activation given as a name or as a mapping with ``limit`` and
    ``alpha``, whose values the operator checks."""
    if isinstance(activation, str):
        if activation not in _ACTIVATIONS:
            names = ", ".join(f'"{name}"' for name in _ACTIVATIONS)
            raise ArgumentError(f'activation: expected one of {names}, got "{activation}"')
        return _ACTIVATIONS[activation], _GPT_OSS_LIMIT, _GPT_OSS_ALPHA
    if not isinstance(activation, Mapping):
        raise TypeError(f"activation: expected a str or a mapping, got {type(activation).__name__}")
    unknown = set(activation) - {"name", "limit", "alpha"}
    if unknown:
        raise ArgumentError(f"activation: expected the keys name, limit and alpha, got also {sorted(unknown)}")
    name = activation.get("name", "gpt_oss")
    if name != "gpt_oss":
        raise ArgumentError(f'activation: expected the name "gpt_oss" beside limit and alpha, got "{name}"')
    limit = as_float("activation.limit", activation.get("limit", _GPT_OSS_LIMIT))
    return name, limit, as_float("activation.alpha", activation.get("alpha", _GPT_OSS_ALPHA))
