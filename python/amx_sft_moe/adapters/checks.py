"""Whether an adapter directory is whole, fits its base model, and who can load it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amx_sft_moe.adapters import ktransformers, per_expert
from amx_sft_moe.adapters.adapter import FUSED, KTRANSFORMERS, PER_EXPERT, Adapter, is_beneath
from amx_sft_moe.adapters.base import GATE_UP, BaseModel
from amx_sft_moe.adapters.conversion import base_for
from amx_sft_moe.adapters.files import CONFIG, KT_MANIFEST
from amx_sft_moe.adapters.formats import Files, format_of, fused_the_old_way, pairs_of, read_files, understood
from amx_sft_moe.adapters.inspection import not_finite, others_of, pieces_of
from amx_sft_moe.adapters.kt_manifest import manifest_problems
from amx_sft_moe.adapters.settings import is_meant, require_plain_lora
from amx_sft_moe.errors import ArgumentError

PEFT, OLD_PEFT, SERVERS, KT = "PEFT from 0.20", "PEFT 0.18", "vLLM, SGLang", "KTransformers"


@dataclass(frozen=True)
class Loads:
    """Whether a tool takes the adapter as it is, and why (not)."""

    tool: str
    loads: bool
    reason: str


@dataclass(frozen=True)
class Check:
    """What :func:`check_adapter` found.

    Attributes:
        format: ``peft-fused``, ``per-expert``, ``ktransformers`` or ``None``.
        findings: what is wrong, one sentence each; empty: nothing.
        notes: what could not be checked.
        loads: by tool; facts about layout and scaling, no tool was run.
    """

    format: str | None
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    loads: tuple[Loads, ...]


def check_adapter(directory: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> Check:
    """Reads everything and says what is wrong; raises nothing about the adapter's content.

    Args:
        directory: an adapter directory.
        base: directory (or cached name) of the base model; ``None``: what the adapter names, if that can be
            read here, else shapes and names are not compared with a model.

    Raises:
        ArgumentError: ``base`` was given and cannot be read.
    """
    findings: list[str] = []
    notes: list[str] = []
    try:
        files = read_files(directory)
        pairs, _ = pairs_of(files.tensors)
        kind = format_of(files, pairs)
    except ArgumentError as reason:
        return Check(None, (str(reason),), (), ())
    try:
        require_plain_lora(files.config, str(files.directory / CONFIG))
    except ArgumentError as reason:
        findings.append(str(reason))
    for piece in pieces_of(files, kind):
        _require_finite(piece.name, not_finite(piece.a) + not_finite(piece.b), findings)
    for key, tensor in others_of(files):
        _require_finite(key, not_finite(tensor), findings)
    of_manifest = manifest_problems(files.directory) if kind == KTRANSFORMERS else []
    findings += of_manifest
    model = _base(directory, base, notes)
    if model is None:
        for name, sides in pairs.items():
            if len(sides) != 2:
                findings.append(f"{name}: expected lora_A and lora_B, got lora_{''.join(sides)}")
        return Check(kind, tuple(findings), tuple(notes), ())
    adapter = understood(files, model, findings)
    beneath = [note for note in adapter.notes if is_beneath(note.partition(":")[0])]
    notes += beneath
    findings += [note for note in adapter.notes if note not in beneath]
    if not adapter.experts:
        notes.append("no routed experts are adapted")
    loads = _loads(kind, files, model, adapter, of_manifest)
    return Check(kind, tuple(findings), tuple(notes), tuple(loads))


def _require_finite(name: str, bad: int, findings: list[str]) -> None:
    if bad:
        findings.append(f"{name}: expected finite numbers, got {bad} NaN or Inf")


def _base(
    directory: str | os.PathLike[str], base: str | os.PathLike[str] | None, notes: list[str]
) -> BaseModel | None:
    try:
        return base_for(directory, base)
    except ArgumentError as reason:
        if base is not None:
            raise
        notes.append(f"not compared with a base model ({reason})")
        return None


def _loads(
    kind: str | None, files: Files, base: BaseModel, adapter: Adapter, of_manifest: Sequence[str]
) -> list[Loads]:
    """By tool; names only conversions that are not refused."""
    no_names, no_files = per_expert.refusal(adapter, base), ktransformers.refusal(base)
    to_kt = f"not --to ktransformers: {no_files}" if no_files else "--to ktransformers"
    to_servers = f"adapter merge; not --to per-expert: {no_names}" if no_names else "--to per-expert"
    if kind == PER_EXPERT:
        peft = _why_not_peft(files.config, base, adapter)
        server = _why_not_servers(files.config, adapter, no_names)
        return [
            Loads(PEFT, not peft, peft or "fuses it while loading"),
            Loads(OLD_PEFT, False, "leaves experts out in silence: --to peft-fused --peft-version 0.18"),
            Loads(SERVERS, not server, server or "the format they take"),
            Loads(KT, False, to_kt),
        ]
    if kind == FUSED:
        return [
            *_fused_in_peft(files, base, adapter),
            Loads(SERVERS, False, f"drop or reject fused experts: {to_servers}"),
            Loads(KT, False, to_kt),
        ]
    if kind == KTRANSFORMERS:
        reason = no_files or _why_not_kt(files, base, of_manifest)
        forms = "peft-fused" if no_names else "peft-fused or per-expert"
        peft = _drops_linear(base, adapter) or f"ignores the experts' file: --to {forms}"
        return [
            Loads(PEFT, False, peft),
            Loads(SERVERS, False, to_servers),
            Loads(KT, not reason, reason or "its own format"),
        ]
    return []


def _fused_in_peft(files: Files, base: BaseModel, adapter: Adapter) -> list[Loads]:
    """PEFT's own form in today's PEFT and in 0.18."""
    old = fused_the_old_way(files, base)
    dropout = "refuses lora_dropout on fused parameters" if files.config.get("lora_dropout") else ""
    refused = dropout or _drops_linear(base, adapter)
    new_reason = refused or ("has A and B of 0.18: --to peft-fused" if old else "its own format")
    transposed = all(layout.transposed for layout in base.layouts.values())
    fits_old = old is not None and (old or transposed)
    old_reason = "its own format" if fits_old else "--to peft-fused --peft-version 0.18"
    return [
        Loads(PEFT, old is False and not refused, new_reason),
        Loads(OLD_PEFT, fits_old and not dropout, dropout or old_reason),
    ]


def _why_not_kt(files: Files, base: BaseModel, of_manifest: Sequence[str]) -> str:
    tensors = files.kt_tensors or {}
    if {tensor.dtype for tensor in tensors.values()} != {torch.bfloat16}:
        return "trains in bfloat16 and refuses others: --dtype bfloat16"
    if not (Path(files.directory) / KT_MANIFEST).is_file():
        return f"expects {KT_MANIFEST}"
    if of_manifest:
        return of_manifest[0]
    missing = ktransformers.missing_key(tensors, base)
    return (
        f"expects all six factors of each layer, {missing} is not there: --to ktransformers" if missing else ""
    )


def _why_not_peft(config: dict[str, Any], base: BaseModel, adapter: Adapter) -> str:
    if not base.fused_by_peft:
        return f"leaves experts of a {base.model.config.model_type} out: --to peft-fused"
    if config.get("lora_dropout"):
        return "refuses lora_dropout on fused parameters"
    if lost := _lost_by_peft(config, base, adapter):
        return lost
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        return "expects r and lora_alpha"
    seen = 2 * alpha / math.sqrt(2 * rank) if config.get("use_rslora") else alpha / rank
    for module, projections in adapter.experts.items():
        for name in GATE_UP:
            factors = projections.get(name)
            if factors is None and set(projections) & set(GATE_UP):
                return f"wants gate and up both, {module} has one"
            if factors is not None and (factors.rank != rank or not math.isclose(factors.scaling, seen)):
                return (
                    f"takes rank {rank} and scaling {seen:g} for gate and up, {module} has {factors.rank} and "
                    f"{factors.scaling:g}: convert it to per-expert again"
                )
    return ""


def _lost_by_peft(config: dict[str, Any], base: BaseModel, adapter: Adapter) -> str:
    """Whether PEFT, as the targets are, refuses a per-expert adapter, or drops factors of experts or of linears
    with names of theirs in silence; empty: neither, or the PEFT installed here cannot tell."""
    if dropped := _drops_linear(base, adapter):
        return dropped
    try:
        targets = base.parameters_found_by_peft(config.get("target_modules"), config.get("target_parameters"))
    except ArgumentError as refused:
        return str(refused)
    if targets is None:
        return ""
    for module, projections in adapter.experts.items():
        for name in {"gate_up_proj" if one in GATE_UP else one for one in projections}:
            parameter = f"{module}.{name}"
            if not any(is_meant(parameter, target) for target in targets):
                return f"finds no target for {parameter} and drops its factors: --to per-expert names them"
    return ""


def _drops_linear(base: BaseModel, adapter: Adapter) -> str:
    for name in adapter.linears:
        if (last := name.rpartition(".")[2]) in base.names_taken_by_peft:
            return f"takes {last} for an expert's and drops the adapter of {name}"
    return ""


def _why_not_servers(config: dict[str, Any], adapter: Adapter, no_names: str) -> str:
    """``no_names``: why converting it to per-expert again is refused."""
    # vLLM passes over the weight beneath an adapted head, of which a note tells.
    if adapter.others.keys() - {f"{name}.weight" for name in adapter.linears}:
        return "take no whole weights (modules_to_save, biases)"
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        return "expect r and lora_alpha"
    seen = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    parts = {f"{m}.{p}": f.scaling for m, ps in adapter.experts.items() for p, f in ps.items()}
    parts |= {name: linear.scaling for name, linear in adapter.linears.items()}
    for name, scaling in parts.items():
        if not math.isclose(scaling, seen):
            return f"those that read only lora_alpha / r take {seen:g} for {name}, which has {scaling:g}: " + (
                "adapter merge" if no_names else "--to per-expert --one-scaling"
            )
    return ""


def as_text(directory: str, check: Check) -> str:
    """The result for people."""
    lines = [f"{directory}: {check.format or 'no adapted experts'}"]
    lines += [f"  wrong: {finding}" for finding in check.findings]
    lines += [f"  note: {note}" for note in check.notes]
    if not check.findings:
        lines += [f"  {one.tool:<16}{'yes' if one.loads else 'no':<5}{one.reason}" for one in check.loads]
        lines.append("  nothing wrong found")
    return "\n".join(lines)
