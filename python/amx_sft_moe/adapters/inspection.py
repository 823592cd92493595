"""What an adapter directory holds, without its base model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amx_sft_moe.adapters.adapter import FUSED, PER_EXPERT
from amx_sft_moe.adapters.base import PARAMETERS
from amx_sft_moe.adapters.files import ADAPTER_FILES
from amx_sft_moe.adapters.formats import Files, format_of, pairs_of, read_files
from amx_sft_moe.adapters.settings import scaling_of
from amx_sft_moe.errors import ArgumentError


@dataclass
class _Group:
    """All adapted weights of one name: ``gate_proj`` of every expert, ``q_proj`` of every layer."""

    experts: bool
    weights: int = 0
    layers: set[int] = field(default_factory=set)
    ids: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    scalings: set[float] = field(default_factory=set)
    max_abs_a: float = 0.0
    max_abs_b: float = 0.0
    not_finite: int = 0
    zero_b: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """For JSON; experts whose B is all zero are named up to a dozen."""
        found: dict[str, Any] = {
            "weights": self.weights,
            "layers": sorted(self.layers),
            "ranks": sorted(self.ranks),
            "scalings": sorted(self.scalings),
            "max_abs_a": self.max_abs_a,
            "max_abs_b": self.max_abs_b,
            "not_finite": self.not_finite,
            "zero_b": len(self.zero_b),
            "zero_b_first": self.zero_b[:12],
        }
        if self.experts:
            found["experts"] = len(self.ids)
        return found


@dataclass(frozen=True)
class Piece:
    """One A ``[r, in]`` and one B ``[out, r]`` of a file, in the file's own orientation."""

    group: str
    name: str
    layer: int | None
    expert: int | None
    a: torch.Tensor
    b: torch.Tensor
    scaling: float | None


def inspect_adapter(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Format, ranks, scalings, layers, experts, types, sizes and magnitudes of an adapter.

    Returns:
        A dictionary that JSON can hold: ``directory``, ``format`` (``peft-fused``, ``per-expert``,
        ``ktransformers`` or ``None`` without adapted experts), ``peft_version``, ``base_model``, ``rslora``,
        ``files`` (bytes), ``dtypes``, ``tensors``, ``parameters``, ``bytes``, ``experts`` and ``others`` (per
        name: ``weights``, ``layers``, ``ranks``, ``scalings``, ``max_abs_a``, ``max_abs_b``, ``not_finite``
        (numbers), ``zero_b`` (how many weights have a B that is all zero), ``zero_b_first`` (the names of up to
        12 of them), and in ``experts`` also ``experts`` (how many are adapted)), ``whole_weights`` and
        ``not_understood`` (keys).

    Raises:
        ArgumentError: not an adapter directory, or a file that cannot be read.
    """
    files = read_files(directory)
    pairs, rest = pairs_of(files.tensors)
    kind = format_of(files, pairs)
    # A shared expert's down_proj is no routed one's.
    routed: dict[str, _Group] = {}
    others: dict[str, _Group] = {}
    for piece in pieces_of(files, kind):
        of_expert = piece.expert is not None
        _count((routed if of_expert else others).setdefault(piece.group, _Group(of_expert)), piece)
    tensors = [*files.tensors.values(), *(files.kt_tensors or {}).values()]
    unpaired = [name for name, sides in pairs.items() if len(sides) != 2]
    path = Path(directory)
    return {
        "directory": os.fspath(path),
        "format": kind,
        "peft_version": files.config.get("peft_version"),
        "base_model": files.config.get("base_model_name_or_path"),
        "rslora": bool(files.config.get("use_rslora")),
        "files": {name: (path / name).stat().st_size for name in ADAPTER_FILES if (path / name).is_file()},
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}),
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "experts": {name: group.summary() for name, group in routed.items()},
        "others": {name: group.summary() for name, group in others.items()},
        "whole_weights": [key for key in rest if "lora_" not in key],
        "not_understood": [*unpaired, *(key for key in rest if "lora_" in key)],
    }


def _count(group: _Group, piece: Piece) -> None:
    group.weights += 1
    group.ranks.add(piece.a.shape[0])
    if piece.layer is not None:
        group.layers.add(piece.layer)
    if piece.expert is not None:
        group.ids.add(piece.expert)
    if piece.scaling is not None:
        group.scalings.add(piece.scaling)
    for side in (piece.a, piece.b):
        group.not_finite += not_finite(side)
    group.max_abs_a = max(group.max_abs_a, _largest(piece.a))
    group.max_abs_b = max(group.max_abs_b, _largest(piece.b))
    if not bool(piece.b.any()):
        group.zero_b.append(piece.name)


def not_finite(tensor: torch.Tensor) -> int:
    """How many numbers are NaN or Inf."""
    return int((~torch.isfinite(tensor)).sum())


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0


def pieces_of(files: Files, kind: str | None) -> Iterator[Piece]:
    """All pairs of a directory, those of fused parameters expert by expert where the config tells how many."""
    pairs, _ = pairs_of(files.tensors)
    both = {name.replace(".base_layer", "") for name in pairs if name.endswith(".base_layer")}
    for name, sides in pairs.items():
        if not _is_pair(sides):
            continue
        a, b = sides["A"], sides["B"]
        layer = re.search(r"\.(\d+)\.", f".{name}.")
        number = int(layer.group(1)) if layer else None
        expert = re.fullmatch(r".*experts\.(\d+)\.(\w+)", name) if kind == PER_EXPERT else None
        module = name.replace(".base_layer", "")
        if expert is not None:
            scaling = _scaling(files, name, a.shape[0])
            yield Piece(expert.group(2), name, number, int(expert.group(1)), a, b, scaling)
        elif kind == FUSED and re.fullmatch(r"(?:.*\.)?experts", module):
            yield from _of_fused(files, module, _parameter(files, name, module in both), number, a, b)
        else:
            yield Piece(module.rpartition(".")[2], name, number, None, a, b, _scaling(files, name, a.shape[0]))
    for key, match, a, b in _kt_pairs(files):
        alpha = files.config.get("lora_alpha")
        scaling = alpha / a.shape[1] if isinstance(alpha, int | float) else None
        for at, (one_a, one_b) in enumerate(zip(a, b, strict=True)):
            group = f"{match.group(2)}_proj"
            yield Piece(group, f"{key}[{at}]", int(match.group(1)), at, one_a, one_b, scaling)


def others_of(files: Files) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a directory that are in none of its pieces, by their keys."""
    pairs, rest = pairs_of(files.tensors)
    yield from ((key, files.tensors[key]) for key in rest)
    for name, sides in pairs.items():
        if not _is_pair(sides):
            yield from ((f"{name}.lora_{side}.weight", tensor) for side, tensor in sides.items())
    paired = {f"{key[:-1]}{side}" for key, *_ in _kt_pairs(files) for side in "ab"}
    yield from ((key, tensor) for key, tensor in (files.kt_tensors or {}).items() if key not in paired)


def _is_pair(sides: dict[str, torch.Tensor]) -> bool:
    return set(sides) == {"A", "B"} and all(side.dim() == 2 for side in sides.values())


def _kt_pairs(files: Files) -> Iterator[tuple[str, re.Match[str], torch.Tensor, torch.Tensor]]:
    """A's key and its match, A and B, both with experts first."""
    tensors = files.kt_tensors or {}
    for key, a in tensors.items():
        match, b = re.fullmatch(r"layers\.(\d+)\.experts\.(\w+)_lora_a", key), tensors.get(f"{key[:-1]}b")
        if match is not None and b is not None and a.dim() == b.dim() == 3 and len(a) == len(b):
            yield key, match, a, b


def _parameter(files: Files, name: str, nested: bool) -> str:
    if nested:
        return "gate_up_proj" if name.endswith(".base_layer") else "down_proj"
    targets = [f".{target}" for target in files.config.get("target_parameters") or []]
    named = [parameter for parameter in PARAMETERS if f".{name}.{parameter}".endswith(tuple(targets))]
    return named[0] if len(named) == 1 else "experts"


def _of_fused(
    files: Files, module: str, parameter: str, layer: int | None, a: torch.Tensor, b: torch.Tensor
) -> Iterator[Piece]:
    name = f"{module}.{parameter}"
    rank, rows = _rank(files, name), a.shape[0]
    if not rank or rows % rank or b.shape[1] != rows:
        yield Piece(parameter, name, layer, -1, a, b, None)
        return
    experts = rows // rank
    split_b = b.reshape(b.shape[0], rank, experts).permute(2, 0, 1)
    for at, (one_a, one_b) in enumerate(zip(a.reshape(experts, rank, -1), split_b, strict=True)):
        yield Piece(parameter, f"{name}[{at}]", layer, at, one_a, one_b, _scaling(files, name, rank))


def _rank(files: Files, name: str) -> int | None:
    from peft.utils.other import get_pattern_key

    table = files.config.get("rank_pattern") or {}
    rank = table.get(get_pattern_key(list(table), name), files.config.get("r"))
    return rank if isinstance(rank, int) and rank > 0 else None


def _scaling(files: Files, name: str, rank: int) -> float | None:
    try:
        return scaling_of(files.config, name, rank, "")
    except ArgumentError:
        return None


def as_text(found: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [
        f"{found['directory']}: {found['format'] or 'no adapted experts'}",
        f"  base model    {found['base_model'] or 'not named'}",
        f"  PEFT version  {found['peft_version'] or 'not named'}{', rsLoRA' if found['rslora'] else ''}",
        f"  size          {found['parameters']:,} parameters in {found['tensors']:,} tensors, "
        f"{found['bytes']:,} bytes, {', '.join(found['dtypes'])}",
    ]
    head = f"  {'adapted':<16}{'weights':>8}{'layers':>8}{'experts':>8}{'rank':>8}{'scaling':>10}"
    lines.append(f"{head}{'max |A|':>11}{'max |B|':>11}  remarks")
    for name, group in (*found["experts"].items(), *found["others"].items()):
        remarks = [f"{group['not_finite']} NaN or Inf"] if group["not_finite"] else []
        remarks += [f"B is zero in {group['zero_b']} of {group['weights']}"] if group["zero_b"] else []
        lines.append(
            f"  {name:<16}{group['weights']:>8}{len(group['layers']):>8}{group.get('experts', '-'):>8}"
            f"{_several(group['ranks']):>8}{_several(group['scalings']):>10}"
            f"{group['max_abs_a']:>11.4g}{group['max_abs_b']:>11.4g}  {'; '.join(remarks)}"
        )
    for title, keys in (("whole weights", "whole_weights"), ("not understood", "not_understood")):
        if found[keys]:
            lines.append(f"  {title}: {', '.join(found[keys][:6])}{' ...' if len(found[keys]) > 6 else ''}")
    return "\n".join(lines)


def _several(values: list[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else "various" if values else "?"
