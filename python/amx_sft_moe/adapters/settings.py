"""PEFT's ``adapter_config.json``: which rank and scaling a module has, and writing one that says so."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

from peft.utils.other import get_pattern_key

from amx_sft_moe.adapters.base import PARAMETERS
from amx_sft_moe.errors import ArgumentError

# LoRA whose W + s BA is not all there is, or whose base weights are not those of the checkpoint.
_NOT_PLAIN = (
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
)
_PLAIN_INITIALISATIONS = (None, True, False, "true", "false", "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Entry:
    """Rank and scaling of what a pattern of ``rank_pattern`` and ``alpha_pattern`` matches."""

    pattern: str
    rank: int
    scaling: float


def require_plain_lora(config: dict[str, Any], where: str) -> None:
    """Refuses what is not ``W + scaling * B A`` on the checkpoint's own weights."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ArgumentError(f"{where}: expected peft_type LORA, got {kind!r}")
    for name in _NOT_PLAIN:
        if config.get(name):
            raise ArgumentError(f"{where}: expected plain LoRA, got {name}={config[name]!r}")
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITIALISATIONS:
        raise ArgumentError(
            f"{where}: expected an initialisation that leaves the base weights as they were, got "
            f"init_lora_weights={init!r}: its factors belong to changed base weights"
        )


def require_sound(config: dict[str, Any], where: str) -> None:
    """Refuses entries of a type that cannot be read."""

    def wants(name: str, what: str, good: Callable[[Any], bool]) -> None:
        if not good(config.get(name)):
            raise ArgumentError(f"{where}: expected {what} as {name}, got {config.get(name)!r}")

    wants("r", "a positive whole number", _is_rank)
    wants("lora_alpha", "a number", is_number)
    wants("rank_pattern", "patterns with whole numbers", lambda table: _is_table(table, _is_rank))
    wants("alpha_pattern", "patterns with numbers", lambda table: _is_table(table, is_number))
    wants("target_parameters", "a list of names", _is_names)
    wants("target_modules", "a list of names or a pattern", lambda v: isinstance(v, str) or _is_names(v))


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number; its whole ones may be too long for a float."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_table(value: Any, good: Callable[[Any], bool]) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(_is_pattern(key) and good(one) for key, one in value.items())


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def scaling_of(config: dict[str, Any], name: str, rank: int, where: str) -> float:
    """The scaling that PEFT gives the module or parameter ``name``, whose factors have ``rank``.

    Raises:
        ArgumentError: the configuration says another rank: PEFT would not load this, and which of the two
            alpha belongs to is anyone's guess.
    """
    stated = _of_pattern(config, "rank_pattern", name, "r")
    if stated is not None and stated != rank:
        raise ArgumentError(f"{where}: {name}: expected factors of rank {stated} (the config's), got {rank}")
    alpha = _of_pattern(config, "alpha_pattern", name, "lora_alpha")
    if not is_number(alpha):
        raise ArgumentError(f"{where}: expected a number as lora_alpha of {name}, got {alpha!r}")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_pattern(config: dict[str, Any], patterns: str, name: str, default: str) -> Any:
    table = config.get(patterns) or {}
    return table.get(get_pattern_key(list(table), name), config.get(default))


def alpha_for(scaling: float, rank: int) -> float:
    """The ``lora_alpha`` for which ``alpha / rank`` is ``scaling``, to the last bit where there is one."""
    alpha = scaling * rank
    near = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    alpha = next((value for value in near if value / rank == scaling), alpha)
    return int(alpha) if float(alpha).is_integer() else alpha


def written(
    source: dict[str, Any],
    default: Entry,
    entries: Iterable[Entry],
    target_modules: list[str],
    target_parameters: list[str] | None,
    peft_version: str,
) -> dict[str, Any]:
    """``source`` with ranks, scalings and targets as given; alphas hold the scalings, so rsLoRA is off."""
    config = dict(source)
    config.update(
        peft_type="LORA",
        r=default.rank,
        lora_alpha=alpha_for(default.scaling, default.rank),
        rank_pattern={},
        alpha_pattern={},
        use_rslora=False,
        # PEFT refuses dropout on fused parameters, and a saved adapter is done with it.
        lora_dropout=0.0,
        target_modules=target_modules,
        target_parameters=target_parameters,
        init_lora_weights=True,
        inference_mode=True,
        peft_version=peft_version,
    )
    for entry in entries:
        if (entry.rank, entry.scaling) != (default.rank, default.scaling):
            config["rank_pattern"][entry.pattern] = entry.rank
            config["alpha_pattern"][entry.pattern] = alpha_for(entry.scaling, entry.rank)
    config.setdefault("bias", "none")
    config.setdefault("task_type", "CAUSAL_LM")
    return config


def name_of_linear(source: dict[str, Any], module: str) -> str:
    """The name with which PEFT looks a linear's settings up: the module's, or its weight's where
    ``target_parameters`` names that."""
    weight = f"{module}.weight"
    through = any(is_meant(weight, target) for target in source.get("target_parameters") or [])
    return weight if through else module


def entries_of_linears(linears: dict[str, Any]) -> list[Entry]:
    """One entry for each, under its full name and its weight's: PEFT from 0.19 makes a parameter of a router
    that ``target_modules`` names, and looks settings up by that."""
    return [
        Entry(f"{re.escape(name)}({re.escape('.weight')})?", linear.rank, linear.scaling)
        for name, linear in linears.items()
    ]


def targets_of_linears(source: dict[str, Any], linears: Iterable[str], taken: Iterable[str]) -> list[str]:
    """``target_modules`` for the adapted linears: the source's own short names where they say it all, the
    modules' full names otherwise. ``taken`` are names that loaders take for those of experts."""
    linears, taken = list(linears), set(taken)
    given = source.get("target_modules")
    short = [] if given is None or isinstance(given, str) else sorted(given)
    short = [
        name
        for name in short
        if name.rpartition(".")[2] not in taken and any(is_meant(linear, name) for linear in linears)
    ]
    if all(any(is_meant(linear, name) for name in short) for linear in linears):
        return short
    return sorted(linears)


def other_targets(source: dict[str, Any], linears: Iterable[str]) -> tuple[list[str], list[str]]:
    """The source's ``target_parameters`` that are not of experts, and those of ``linears`` that are modules
    in their own right, not found through such a parameter."""
    targets = source.get("target_parameters") or []
    other = [target for target in targets if target.rpartition(".")[2] not in PARAMETERS]
    wrapped = [target.rpartition(".")[0] for target in other]
    return other, [name for name in linears if not any(is_meant(name, module) for module in wrapped)]


def short_name(name: str) -> str:
    """``mlp.experts.down_proj`` of ``model.layers.3.mlp.experts.down_proj``."""
    return re.sub(r"^.*\.\d+\.", "", name)


def is_meant(name: str, target: str) -> bool:
    """Whether PEFT takes ``target``, no regular expression, for the module or parameter ``name``."""
    return name == target or name.endswith(f".{target}")
