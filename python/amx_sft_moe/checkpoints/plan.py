"""Which tensors of a checkpoint make which expert weights of a model, by transformers' own conversion rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from amx_sft_moe.errors import ArgumentError

WEIGHTS = ("gate_up_proj", "down_proj")
_MXFP4 = ("blocks", "scales")  # what is appended to a parameter's name


@dataclass
class Plan:
    """What becomes of the tensors of a checkpoint. Parameters go by their names in the model."""

    # Parameter to the names of its matrices: parts below each other, in each part one name per expert.
    stacked: dict[str, list[list[str]]] = field(default_factory=dict)
    # Parameter that lies as the model has it to the name of its tensor.
    fused: dict[str, str] = field(default_factory=dict)
    # Parameter that lies as [E, in, out] to the name of its tensor.
    transposed: dict[str, str] = field(default_factory=dict)
    # Parameter that lies as [E, in, out] to the names of its mxfp4 blocks and scales.
    mxfp4: dict[str, tuple[str, str]] = field(default_factory=dict)
    # Tensors that transformers loads itself, and the parameters that they become as they are, where known.
    others: dict[str, str] = field(default_factory=dict)
    # Parameter to the reason why its tensors are among the others, and are copied.
    copied: dict[str, str] = field(default_factory=dict)
    # The rules that matched; transformers keeps them with the model, to save it in the same form.
    rules: list[Any] = field(default_factory=list)

    def names(self, parameter: str) -> list[str]:
        """All tensors of an expert parameter that is not among the others."""
        if parameter in self.stacked:
            return [name for part in self.stacked[parameter] for name in part]
        if parameter in self.mxfp4:
            return list(self.mxfp4[parameter])
        return [self.fused.get(parameter) or self.transposed[parameter]]


def routed_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each layer's routed experts: transformers' decorator for experts has marked it, and
    ``gate_up_proj`` and ``down_proj`` are its own parameters of 3 dimensions."""
    for path, module in model.named_modules():
        if "has_gate" not in module.__dict__:
            continue
        own = dict(module.named_parameters(recurse=False))
        if all(name in own and own[name].dim() == 3 for name in WEIGHTS):
            yield path, module


def make_plan(model: PreTrainedModel, names: Iterable[str]) -> Plan:
    """Sorts the tensors of a checkpoint.

    Args:
        model: of the checkpoint's architecture, on the meta device.
        names: of the checkpoint's tensors.

    Raises:
        ArgumentError: experts of a layer are missing; the message names one.
    """
    modules = {f"{path}.{name}": module for path, module in routed_experts(model) for name in WEIGHTS}
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    meta = model.state_dict()
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    packed: dict[str, dict[str, str]] = defaultdict(dict)
    plan = Plan(rules=rules)
    # Rules that act in groups expect the order in which transformers loads.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
        if target not in meta and name in meta:
            target, pattern = name, None
        parameter, _, kind = target.rpartition("_")
        if kind in _MXFP4 and parameter in modules:
            packed[parameter][kind] = name
        elif target in modules:
            sources[target][pattern or ""].append(name)
        else:
            plan.others[name] = target if pattern is None else ""
    for parameter, by_kind in packed.items():
        if len(by_kind) != len(_MXFP4):
            raise ArgumentError(f"{parameter}: expected mxfp4 {' and '.join(_MXFP4)}, got only {list(by_kind)}")
        plan.mxfp4[parameter] = (by_kind["blocks"], by_kind["scales"])
    for parameter, by_pattern in sources.items():
        _place(plan, parameter, modules[parameter], meta[parameter], by_pattern, converter_of)
    return plan


def _place(
    plan: Plan,
    parameter: str,
    module: nn.Module,
    meta: torch.Tensor,
    by_pattern: dict[str, list[str]],
    converter_of: dict[str, WeightConverter],
) -> None:
    if list(by_pattern) == [""]:
        # Fused on disk under the parameter's own name.
        (name,) = by_pattern[""]
        (plan.transposed if getattr(module, "is_transposed", False) else plan.fused)[parameter] = name
        return
    converter = converter_of.get(next(iter(by_pattern)))
    reason = _not_one_by_one(parameter, module, converter, by_pattern)
    if reason is not None or converter is None:
        plan.copied[parameter] = reason or "no rule is known for them"
        plan.others |= {name: "" for names in by_pattern.values() for name in names}
        return
    experts = meta.shape[0]
    plan.stacked[parameter] = [
        _by_expert(parameter, pattern, by_pattern[pattern], experts, plan.rules)
        for pattern in converter.source_patterns
    ]


def _not_one_by_one(
    parameter: str, module: nn.Module, converter: WeightConverter | None, by_pattern: dict[str, list[str]]
) -> str | None:
    """Why the tensors cannot be used as they lie; None where they can."""
    if converter is None or not set(by_pattern) <= set(converter.source_patterns):
        return f"its tensors match several rules, {sorted(by_pattern)}"
    lost = [pattern for pattern in converter.source_patterns if pattern not in by_pattern]
    if lost:
        raise ArgumentError(f"{parameter}: expected tensors {lost[0]}, got none in the checkpoint")
    stacking = [MergeModulelist, Concatenate] if len(converter.source_patterns) > 1 else [MergeModulelist]
    # Experts along dimension 0, parts of an expert below each other.
    done = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if done != [(kind, number) for number, kind in enumerate(stacking)]:
        return f"they are made by {[repr(operation) for operation in converter.operations]}, not stacked"
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return "the model holds experts transposed or interleaved"
    return None


def expert_of(pattern: str, key: str) -> int | None:
    """The expert's number in a key that has matched a rule's pattern; ``None``: the pattern does not tell.

    Args:
        pattern: a regular expression, but for ``*.``, which transformers reads as any part of a name.
        key: as the rule sees it, after all renamings.
    """
    if pattern.count("*.") != 1:
        return None
    found = re.search(pattern.replace("*.", r"(?P<expert>\d+)\."), key)
    return int(found["expert"]) if found else None


def _by_expert(parameter: str, pattern: str, names: list[str], experts: int, rules: list[Any]) -> list[str]:
    """The names in the order of the experts."""
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    by_index = {}
    for name in names:
        index = expert_of(pattern, apply_renamings(name, renamings))
        if index is None:
            raise ArgumentError(f"{name}: expected a name like {pattern}, with the expert's number at *")
        by_index[index] = name
    lost = sorted(set(range(experts)) - set(by_index))
    if lost or len(by_index) != experts or len(names) != experts:
        what = f"no expert {lost[0]}" if lost else f"{len(names)} tensors"
        raise ArgumentError(f"{parameter}: expected {experts} experts {pattern}, got {what} in the checkpoint")
    return [by_index[index] for index in range(experts)]
