"""From one adapter format to another."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import peft
import torch

from amx_sft_moe.adapters.adapter import Adapter, Factors, Linear
from amx_sft_moe.adapters.base import BaseModel, load_base
from amx_sft_moe.adapters.files import (
    ADAPTER_FILES,
    CONFIG,
    FLOATS,
    read_json,
    replaced_directory,
    require_no_checkpoint,
)
from amx_sft_moe.adapters.formats import fitting, read_adapter, read_files, write_adapter
from amx_sft_moe.adapters.fusing import cast
from amx_sft_moe.adapters.peft_fused import release
from amx_sft_moe.errors import ArgumentError, StateError
from amx_sft_moe.paths import given_directory

logger = logging.getLogger("amx_sft_moe")

_OLDEST_PEFT = (0, 18)  # that was tried

# Of the change itself, where numbers were rounded on the way: some units in the last place of each type.
_ROUNDED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_adapter` did.

    Attributes:
        directory: where the new adapter lies.
        source, target: formats.
        lossless: ``W + scaling * B A`` has exactly the same factors up to zeros, copies and powers of two.
        lost: what was rounded, if not.
        notes: what else to know.
        tensors: how many were written.
        verified: products of factors compared with the source's after writing.
    """

    directory: Path
    source: str
    target: str
    lossless: bool
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    tensors: int
    verified: int


def base_for(directory: str | os.PathLike[str], base: str | os.PathLike[str] | None) -> BaseModel:
    """The base model given, or the one that the adapter names where that can be read here; as the class that
    has the adapter's modules.

    Raises:
        ArgumentError: neither can be, or the adapter cannot.
    """
    found = _named_base(directory) if base is None else load_base(base)
    return fitting(read_files(directory), found)


def _named_base(directory: str | os.PathLike[str]) -> BaseModel:
    directory = given_directory("adapter", directory)
    if not directory.is_dir():
        raise ArgumentError(f"adapter: expected a directory, got {directory}")
    config = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ArgumentError(f"base: expected the base model's directory, since {directory} names none")
    try:
        return load_base(named)
    except ArgumentError as reason:
        raise ArgumentError(f"{reason}; give the directory with its config.json as base") from None


def convert_adapter(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    base: str | os.PathLike[str] | None = None,
    peft_version: str | None = None,
    dtype: torch.dtype | None = None,
    one_scaling: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Writes an adapter in another format, checked against its source before anything is replaced.

    Lossless wherever the formats allow: A is copied bit for bit (twice for gate and up of a shared A), B's
    rows are moved; separate A become one adapter of the ranks' sum with a B of two blocks, and such blocks
    are found again; ranks are evened out with zeros. Scalings that a format cannot hold are multiplied into
    B, which is exact for powers of two and otherwise rounds (``lost`` says where).

    Args:
        source: an adapter directory of any format.
        target: receives the new one; its other files stay. May be ``source``; no directory of a checkpoint.
        to: ``peft-fused``, ``per-expert`` or ``ktransformers``.
        base: directory (or cached name) of the base model; its ``config.json`` is enough. ``None``: what
            ``adapter_config.json`` names.
        peft_version: for whom to write, from 0.18; below 0.19 turns PEFT's fused matrices around. ``None``: the
            one installed.
        dtype: element type of the new factors, torch's float64, float32, float16 or bfloat16; ``None``: the
            source's. Where numbers become zero in it ``lost`` says how many.
        one_scaling: ``per-expert`` only: one scaling for all modules, for servers that read only
            ``lora_alpha / r``.
        overwrite: whether ``target`` may hold an adapter already; it is replaced in one step.

    Raises:
        TypeError: another ``dtype``.
        ArgumentError: something that is not understood or that the format or ``dtype`` cannot hold.
        StateError: what was written is not what was read; ``target`` is as it was.
    """
    source, target = given_directory("source", source), given_directory("target", target)
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"dtype: expected None or one of {list(map(str, FLOATS))}, got {dtype!r}")
    if one_scaling and to != "per-expert":
        raise ArgumentError(f"one_scaling: expected format per-expert, got {to}")
    if peft_version is not None:
        wanted = release(peft_version)
        if wanted is None:
            raise ArgumentError(f"peft_version: expected one like 0.19.1, got {peft_version!r}")
        if wanted < _OLDEST_PEFT:
            raise ArgumentError(f"peft_version: expected at least 0.18, got {peft_version!r}")
    if not overwrite and any((target / name).exists() for name in ADAPTER_FILES):
        raise ArgumentError(f"target: expected a directory without an adapter (or overwrite), got {target}")
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"target: expected a directory, got the file {target}")
    require_no_checkpoint("target", target)
    model = base_for(source, base)
    adapter, kind = read_adapter(source, model)
    if kind is None:
        raise ArgumentError(f"adapter: expected LoRA on routed experts, got none in {source}")
    rounded: list[str] = []
    if dtype is not None:
        adapter = _cast(adapter, dtype, rounded)
    with replaced_directory(target, drop=ADAPTER_FILES) as work:
        lost, tensors = write_adapter(adapter, model, to, work, peft_version or peft.__version__, one_scaling)
        verified = verify(adapter, read_adapter(work, model)[0], exact=not lost)
    lost = [*rounded, *lost]
    if adapter.config.get("lora_dropout"):
        adapter.notes.append("lora_dropout is 0 in the new configuration: PEFT refuses it on fused experts")
    return Conversion(target, kind, to, not lost, tuple(lost), tuple(adapter.notes), tensors, verified)


def _cast(adapter: Adapter, dtype: torch.dtype, rounded: list[str]) -> Adapter:
    """All factors in another element type. ArgumentError where that cannot hold one of their numbers."""
    exact, vanished = True, 0
    experts: dict[str, dict[str, Factors]] = {}
    for module, projections in adapter.experts.items():
        experts[module] = {}
        for name, factors in projections.items():
            experts[module][name], same = cast(factors, dtype)
            exact = exact and same
            vanished += 0 if same else _vanished(f"{module}.{name}", factors, experts[module][name], dtype)
    linears = {}
    for name, linear in adapter.linears.items():
        before = Factors((linear.a,), (linear.b,), linear.scaling)
        one, same = cast(before, dtype)
        linears[name] = Linear(one.a[0], one.b[0], linear.scaling)
        exact = exact and same
        vanished += 0 if same else _vanished(name, before, one, dtype)
    if not exact:
        rounded.append(f"factors were rounded to {str(dtype).removeprefix('torch.')}")
    if vanished:
        rounded.append(f"{vanished:,} numbers of A and B became zero in {str(dtype).removeprefix('torch.')}")
    return Adapter(adapter.config, experts, linears, adapter.others, adapter.notes)


def _vanished(name: str, before: Factors, after: Factors, dtype: torch.dtype) -> int:
    """How many numbers of A and B became zero; refuses those that became infinite."""
    count = 0
    for was, now in zip((*before.a, *before.b), (*after.a, *after.b), strict=True):
        over = was.isfinite() & ~now.isfinite()
        if over.any():
            largest = float(was[over].abs().max())
            raise ArgumentError(
                f"dtype: expected one for numbers up to {largest:g} ({name}), got {dtype}, which ends at "
                f"{torch.finfo(dtype).max:g}"
            )
        count += int(((was != 0) & (now == 0)).sum())
    return count


def verify(before: Adapter, after: Adapter, exact: bool) -> int:
    """Compares ``scaling * B A`` of some experts of every module, and of every other module.

    Returns:
        How many products were compared.

    Raises:
        StateError: one differs by more than rounding explains.
    """
    compared = 0
    for name, wanted, found, dtype in _products(before, after):
        tolerance = 1e-12 if exact else _ROUNDED.get(dtype, 1e-5)
        error = float((found - wanted).abs().max()) if wanted.numel() else 0.0
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        same_infinities = torch.equal(found.nan_to_num(), wanted.nan_to_num())
        if not error <= tolerance * largest and not same_infinities:
            raise StateError(
                f"{name}: expected the same scaling * B A after writing, got a difference of {error:g} where "
                f"the largest is {largest:g}"
            )
        compared += 1
    return compared


def _products(before: Adapter, after: Adapter) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.dtype]]:
    for module, projections in before.experts.items():
        for projection, factors in projections.items():
            found = after.experts.get(module, {}).get(projection)
            if found is None:
                raise StateError(f"{module}.{projection}: expected it in what was written, got nothing")
            last = len(factors.a) - 1
            for expert in sorted({0, last // 2, last}):
                name = f"{module}.{expert}.{projection}"
                yield name, factors.delta(expert), found.delta(expert), factors.b[0].dtype
    if set(before.linears) != set(after.linears) or set(before.others) != set(after.others):
        raise StateError("linears: expected the same modules in what was written, got others")
    for name, linear in before.linears.items():
        pair = [Factors((one.a,), (one.b,), one.scaling) for one in (linear, after.linears[name])]
        yield name, pair[0].delta(0), pair[1].delta(0), linear.b.dtype
