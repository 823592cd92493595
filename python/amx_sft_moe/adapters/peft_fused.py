"""PEFT's own layout: one pair of matrices for all experts of a fused parameter.

Checked by reading and running peft 0.18.1, 0.19.1, 0.20.0 and 0.21.2 (``lora.ParamWrapper``): a parameter of
shape ``[E, d1, d2]`` has ``lora_A.weight [E r, in]``, experts one after the other, and ``lora_B.weight
[out, r E]``, experts innermost. From 0.19, ``in, out = d2, d1``, or ``d1, d2`` where the module says
``is_transposed``. In 0.18 always ``d1, d2``: for the usual ``[E, out, in]`` the two matrices change roles and
the product is transposed. Wrappers of several parameters are nested in the order in which the module
registers them, the first innermost: ``experts.base_layer.lora_A`` is ``gate_up_proj``, ``experts.lora_A`` is
``down_proj``; one alone is ``experts.lora_A``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from amx_sft_moe.adapters.adapter import PREFIX, Adapter, Factors, peft_entries
from amx_sft_moe.adapters.base import GATE_UP, PARAMETERS, BaseModel, ExpertsLayout
from amx_sft_moe.adapters.fusing import fused, split_all
from amx_sft_moe.adapters.settings import (
    Entry,
    entries_of_linears,
    other_targets,
    scaling_of,
    short_name,
    targets_of_linears,
    written,
)
from amx_sft_moe.errors import ArgumentError

Pair = tuple[torch.Tensor, torch.Tensor]  # lora_A.weight, lora_B.weight


def parameters_of(config: dict[str, Any], base: BaseModel, module: str, depth: int) -> list[str]:
    """Which parameters the ``depth`` nested wrappers of a module hold, innermost first."""
    targets = config.get("target_parameters") or []
    registered = [name for name, _ in base.model.get_submodule(module).named_parameters(recurse=False)]
    names = [f"{module}.{name}" for name in registered]
    matched = [
        short
        for short, name in zip(registered, names, strict=True)
        if any(name == target or name.endswith(f".{target}") for target in targets)
    ]
    if len(matched) != depth or not set(matched) <= set(PARAMETERS):
        raise ArgumentError(
            f"{module}: expected target_parameters in adapter_config.json that name the {depth} adapted ones "
            f"of {PARAMETERS}, got {sorted(targets)}"
        )
    return matched


def stored_the_old_way(config: dict[str, Any], pairs: list[tuple[ExpertsLayout, str, Pair]]) -> bool:
    """Whether the matrices have the roles of PEFT 0.18: by their shapes; where all shapes fit both ways, by
    ``peft_version``."""
    ways = {False, True}
    for layout, parameter, (a, b) in pairs:
        out_size, in_size = layout.sizes(parameter)
        rows = a.shape[0] if a.dim() == 2 else 0
        fits = a.dim() == b.dim() == 2 and b.shape[1] == rows and rows > 0 and rows % layout.num_experts == 0
        here = set()
        if fits and (a.shape[1], b.shape[0]) == (in_size, out_size):
            here.add(False)
        if fits and (a.shape[1], b.shape[0]) == (out_size, in_size) and not layout.transposed:
            here.add(True)
        if not here & ways:
            raise ArgumentError(
                f"{layout.module}.{parameter}: expected lora_A [{layout.num_experts} r, {in_size}] and lora_B "
                f"[{out_size}, {layout.num_experts} r], in this order or as PEFT 0.18 has them and all alike, "
                f"got {list(a.shape)} and {list(b.shape)}"
            )
        ways &= here
    if len(ways) == 1:
        return ways.pop()
    if all(layout.transposed for layout, _, _ in pairs):
        return False
    version = release(config.get("peft_version"))
    if version is None:
        raise ArgumentError(
            "adapter_config.json: expected peft_version, since these shapes fit PEFT 0.18's order and today's, "
            f"got {config.get('peft_version')!r}"
        )
    return version < (0, 19)


def release(version: Any) -> tuple[int, int] | None:
    """``(0, 19)`` of ``"0.19.1"``; ``None`` where there is none."""
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return (int(found.group(1)), int(found.group(2))) if found else None


def named(
    config: dict[str, Any], base: BaseModel, pairs: dict[str, dict[int, Pair]], where: str
) -> list[tuple[ExpertsLayout, str, Pair]]:
    """Which parameter each pair of ``module -> {depth of nesting: pair}`` belongs to."""
    found: list[tuple[ExpertsLayout, str, Pair]] = []
    for module, nested in pairs.items():
        if set(nested) != set(range(len(nested))):
            raise ArgumentError(f"{where}: {module}: expected all of the nested base_layer adapters, got some")
        names = parameters_of(config, base, module, len(nested))
        # The innermost has base_layer in its name most often.
        found += [(base.layout(module), name, nested[len(nested) - 1 - at]) for at, name in enumerate(names)]
    return found


def read(
    config: dict[str, Any], base: BaseModel, pairs: dict[str, dict[int, Pair]], where: str
) -> dict[str, dict[str, Factors]]:
    """Factors by module and projection from ``module -> {depth of nesting: pair}``."""
    found = named(config, base, pairs, where)
    old = stored_the_old_way(config, found)
    whole: dict[tuple[str, str], Factors] = {}
    for layout, parameter, (a, b) in found:
        rank = a.shape[0] // layout.num_experts
        scaling = scaling_of(config, f"{layout.module}.{parameter}", rank, where)
        whole[layout.module, parameter] = _unpacked(a, b, layout.num_experts, scaling, old)
    return split_all(whole, base)


def _unpacked(a: torch.Tensor, b: torch.Tensor, experts: int, scaling: float, old: bool) -> Factors:
    a3 = a.reshape(experts, -1, a.shape[-1])
    b3 = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    if old:
        a3, b3 = b3.transpose(1, 2), a3.transpose(1, 2)
    return Factors(tuple(a3.unbind(0)), tuple(b3.unbind(0)), scaling)


def _packed(factors: Factors, old: bool) -> Pair:
    a3, b3 = torch.stack(factors.a), torch.stack(factors.b)  # [E, r, in], [E, out, r]
    if old:
        a3, b3 = b3.transpose(1, 2), a3.transpose(1, 2)
    return a3.reshape(-1, a3.shape[-1]), b3.permute(1, 2, 0).reshape(b3.shape[1], -1)


def write(
    adapter: Adapter, base: BaseModel, peft_version: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str]]:
    """Tensors of ``adapter_model.safetensors``, the configuration, and what was lost (empty: nothing)."""
    version = release(peft_version)
    if version is None:
        raise ArgumentError(f"peft_version: expected one like 0.19.1, got {peft_version!r}")
    lost: list[str] = []
    state: dict[str, torch.Tensor] = {}
    entries: dict[str, Entry] = {}
    nested: dict[str, int] = {}
    for module, projections in adapter.experts.items():
        layout = base.layout(module)
        whole = dict(_whole(projections, layout, lost))
        nested[module] = len(whole)
        for parameter, factors in whole.items():
            a, b = _packed(factors, old=version < (0, 19) and not layout.transposed)
            inner = ".base_layer" if parameter == "gate_up_proj" and len(whole) == 2 else ""
            state[f"{PREFIX}{module}{inner}.lora_A.weight"] = a
            state[f"{PREFIX}{module}{inner}.lora_B.weight"] = b
            name = f"{module}.{parameter}"
            entries[name] = Entry(re.escape(name), factors.rank, factors.scaling)
    state |= peft_entries(adapter.linears, adapter.others, nested)
    taken = base.names_taken_by_peft if version >= (0, 19) else frozenset()
    for name in adapter.linears:
        if name.rpartition(".")[2] in taken:
            raise ArgumentError(
                f"{name}: expected no adapter on other modules named like the experts' in format peft-fused, "
                "got one: PEFT from 0.19 takes the name for that of an expert's and drops it"
            )
    return state, _config(adapter, base, entries, taken, peft_version), lost


def _whole(
    projections: dict[str, Factors], layout: ExpertsLayout, lost: list[str]
) -> Iterator[tuple[str, Factors]]:
    gate, up = (projections.get(name) for name in GATE_UP)
    if gate is not None or up is not None:
        factors, exact = fused(gate, up, layout)
        if not exact:
            lost.append(f"{layout.module}: B of gate or up was changed: one scaling for both")
        yield "gate_up_proj", factors
    if "down_proj" in projections:
        yield "down_proj", projections["down_proj"]


def _config(
    adapter: Adapter, base: BaseModel, entries: dict[str, Entry], taken: frozenset[str], peft_version: str
) -> dict[str, Any]:
    linears = entries_of_linears(adapter.linears)
    short: dict[str, set[tuple[int, float]]] = {}
    for name, entry in entries.items():
        short.setdefault(short_name(name), set()).add((entry.rank, entry.scaling))
    everywhere = {short_name(name) for name in entries}
    # Short names reach every layer: only where every layer is adapted, and alike.
    uniform = len(entries) == len(base.layouts) * len(everywhere)
    targets = sorted(everywhere) if uniform else sorted(entries)
    if uniform:
        alike = {name: settings for name, settings in short.items() if len(settings) == 1}
        named = [Entry(re.escape(name), *settings.copy().pop()) for name, settings in alike.items()]
        named += [entry for name, entry in entries.items() if short_name(name) not in alike]
    else:
        named = list(entries.values())
    ordered = [*named, *linears]
    other, plain = other_targets(adapter.config, adapter.linears)
    names = targets_of_linears(adapter.config, plain, taken)
    return written(adapter.config, ordered[0], ordered, names, [*targets, *other], peft_version)
