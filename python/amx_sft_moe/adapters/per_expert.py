"""The serving layout: one pair of matrices per expert and projection, named as in the base checkpoint.

    base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight    [r, H]
    base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_B.weight    [I, r]

with up_proj and down_proj likewise (``w1``, ``w3``, ``w2`` where checkpoints say so). Stock PEFT from 0.20
(0.19.1 with transformers 5.5) fuses it while loading (checked by running 0.19.1, 0.20.0 and 0.21.2): gate and
up become one adapter of twice the rank ``r`` of adapter_config.json, whatever its patterns say, with twice its
alpha. So here gate and up have one rank and one scaling in all layers, those of ``r`` and ``lora_alpha``;
down_proj may have others, under a pattern that is of the experts only where other modules of its name may be
adapted too (a shared expert's).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from amx_sft_moe.adapters.adapter import PREFIX, Adapter, Factors, peft_entries
from amx_sft_moe.adapters.base import GATE_UP, PARAMETERS, PROJECTIONS, BaseModel
from amx_sft_moe.adapters.fusing import common_scaling, folded, padded, zeros
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

Pair = tuple[torch.Tensor, torch.Tensor]


def read(
    config: dict[str, Any],
    base: BaseModel,
    module: str,
    projection: str,
    given: dict[int, tuple[str, Pair]],
    where: str,
    notes: list[str],
) -> Factors:
    """One projection's factors from ``expert -> (name, pair)``."""
    layout = base.layout(module)
    out_size, in_size = layout.sizes(projection)
    settings = set()
    for name, (a, b) in given.values():
        if a.dim() != 2 or b.shape != (out_size, a.shape[0]) or a.shape[1] != in_size:
            raise ArgumentError(
                f"{where}: {name}: expected lora_A [r, {in_size}] and lora_B [{out_size}, r], got "
                f"{list(a.shape)} and {list(b.shape)}"
            )
        settings.add((a.shape[0], scaling_of(config, name, a.shape[0], where)))
    if len(settings) != 1 or max(given) >= layout.num_experts:
        raise ArgumentError(
            f"{where}: {module}: expected one rank and scaling for all experts' {projection}, and experts "
            f"up to {layout.num_experts - 1}, got {sorted(settings)} and experts up to {max(given)}"
        )
    rank, scaling = settings.pop()
    some = next(iter(given.values()))[1]
    nothing = zeros(layout, projection, rank, scaling, some[0].dtype)
    missing = [expert for expert in range(layout.num_experts) if expert not in given]
    if missing:
        notes.append(f"{module}.{projection}: experts {missing} have no adapter: zeros")
    pairs = [
        given[expert][1] if expert in given else (nothing.a[expert], nothing.b[expert])
        for expert in range(layout.num_experts)
    ]
    return Factors(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), scaling)


def refusal(adapter: Adapter, base: BaseModel) -> str:
    """Why this adapter has no form per expert; empty: it has one."""
    names = base.names_on_disk
    for module in adapter.experts:
        if (module, "down_proj") not in names or (module, "gate_proj") not in names:
            return (
                f"{module}: expected a model whose checkpoints hold one tensor per expert, got one that holds "
                "them fused: there are no names for a per-expert adapter"
            )
    for name in adapter.linears:
        if name.rpartition(".")[2] in base.names_taken_by_peft:
            return (
                f"{name}: expected no adapter on other modules named like the experts' in format per-expert, "
                "got one: loading would take it for theirs"
            )
    return ""


def write(
    adapter: Adapter, base: BaseModel, peft_version: str, one_scaling: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str]]:
    """Tensors of ``adapter_model.safetensors``, the configuration, and what was lost (empty: nothing).

    ``one_scaling``: all modules get the experts' scaling, so that servers which read only ``lora_alpha / r``
    are right too.
    """
    names = base.names_on_disk
    if reason := refusal(adapter, base):
        raise ArgumentError(reason)
    lost: list[str] = []
    experts = complete(adapter, base)
    even = evened(experts, [GATE_UP, ("down_proj",)], lost)
    default = next(iter(even.values()))
    first = (default.get("gate_proj") or default["down_proj"]).scaling
    linears = adapter.linears
    if one_scaling:
        everywhere = [f.scaling for found in even.values() for f in found.values()]
        scaling = common_scaling([first, *everywhere, *(linear.scaling for linear in linears.values())])
        even = {m: {p: _fold(f, scaling, f"{m}.{p}", lost) for p, f in ps.items()} for m, ps in even.items()}
        linears = {name: _folded_linear(name, linear, scaling, lost) for name, linear in linears.items()}
    state: dict[str, torch.Tensor] = {}
    for module, projections in even.items():
        for projection, factors in projections.items():
            for name, a, b in zip(names[module, projection], factors.a, factors.b, strict=True):
                state[f"{PREFIX}{name}.lora_A.weight"] = a
                state[f"{PREFIX}{name}.lora_B.weight"] = b
    # Loading fuses gate and up into one adapter.
    nested = {module: len({*projections} - {"up_proj"}) for module, projections in even.items()}
    state |= peft_entries(linears, adapter.others, nested)
    return state, _config(adapter, even, linears, base, peft_version), lost


def complete(adapter: Adapter, base: BaseModel) -> dict[str, dict[str, Factors]]:
    """All three projections wherever a loader wants all three: zeros for those that are missing."""
    present = {name for projections in adapter.experts.values() for name in projections}
    wanted = [name for name in PROJECTIONS if name in present or present & set(GATE_UP)]
    found = {}
    for module, projections in adapter.experts.items():
        some = next(iter(projections.values()))
        found[module] = {
            name: projections.get(name)
            or zeros(base.layout(module), name, some.rank, some.scaling, some.a[0].dtype)
            for name in wanted
        }
    return found


def evened(
    experts: dict[str, dict[str, Factors]], groups: list[tuple[str, ...]], lost: list[str]
) -> dict[str, dict[str, Factors]]:
    """One rank and one scaling for each group of projections, in all modules."""
    found = {module: dict(projections) for module, projections in experts.items()}
    for group in groups:
        members = [(m, p) for m, projections in experts.items() for p in group if p in projections]
        if not members:
            continue
        rank = max(experts[m][p].rank for m, p in members)
        scaling = common_scaling(experts[m][p].scaling for m, p in members)
        for module, projection in members:
            factors = padded(experts[module][projection], rank)
            found[module][projection] = _fold(factors, scaling, f"{module}.{projection}", lost)
    return found


def _fold(factors: Factors, scaling: float, name: str, lost: list[str]) -> Factors:
    changed, exact = folded(factors, scaling)
    if not exact:
        how = "became zero: its scaling of 0" if factors.scaling == 0 else "was rounded: its scaling"
        lost.append(f"{name}: B {how} had to become {scaling:g}")
    return changed


def _folded_linear(name: str, linear: Any, scaling: float, lost: list[str]) -> Any:
    factors = _fold(Factors((linear.a,), (linear.b,), linear.scaling), scaling, name, lost)
    return type(linear)(factors.a[0], factors.b[0], scaling)


def _config(
    adapter: Adapter,
    experts: dict[str, dict[str, Factors]],
    linears: dict[str, Any],
    base: BaseModel,
    peft_version: str,
) -> dict[str, Any]:
    taken = base.names_taken_by_peft
    leaf = {place[1]: name[0].rpartition(".")[2] for place, name in base.names_on_disk.items()}
    some = next(iter(experts.values()))
    # A bare name would be that of a shared expert's down_proj too, where that may be adapted.
    of_experts = "" if taken else rf"{re.escape(next(iter(experts)).rpartition('.')[2])}\.(\d+\.)?"
    entries = []
    for projection, factors in some.items():
        # PEFT asks for the fused parameter's name, servers for the expert's.
        down = projection == "down_proj"
        ways = sorted({leaf[projection], projection} if down else {leaf[projection]})
        before = of_experts if down else ""
        entries += [Entry(before + re.escape(way), factors.rank, factors.scaling) for way in ways]
    default = next((e for e in entries if e.pattern == re.escape(leaf["gate_proj"])), entries[0])
    other, plain = other_targets(adapter.config, linears)
    targets = targets_of_linears(adapter.config, plain, taken)
    if taken:
        targets = sorted({*targets, *(leaf[projection] for projection in some)})
    else:
        # Here PEFT would look for linear layers of these names; it does fuse the tensors, so name the result.
        present = [name for name in PARAMETERS if name in some or (name != "down_proj" and "gate_proj" in some)]
        other = sorted({f"{short_name(module)}.{name}" for module in experts for name in present} | {*other})
        doubled = Entry("gate_up_proj", 2 * default.rank, default.scaling)
        entries += [doubled] if "gate_proj" in some else []
    entries += entries_of_linears(linears)
    return written(adapter.config, default, entries, targets, other or None, peft_version)
