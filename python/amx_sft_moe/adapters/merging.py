"""An adapter merged into a checkpoint, tensor by tensor, in the checkpoint's own layout.

Merging changes no name, shape or element type, so each shard of the result has the header of the shard it
comes from: shards are copied as files (by the kernel) and the adapted matrices are then overwritten in the
copy. Memory: the adapter, mapped, and some rows of one matrix.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from amx_sft_moe.adapters.adapter import Adapter, Linear, same_bits
from amx_sft_moe.adapters.base import BaseModel, Place
from amx_sft_moe.adapters.conversion import base_for
from amx_sft_moe.adapters.files import ADAPTER_FILES, CONFIG, replaced_directory, sync, tensor_positions
from amx_sft_moe.adapters.formats import read_adapter
from amx_sft_moe.checkpoints.files import INDEX, WHOLE, listed_files
from amx_sft_moe.checkpoints.transposed import FOLDER
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.paths import given_directory

logger = logging.getLogger("amx_sft_moe")

# Of a matrix, as many rows at a time: bounds memory also for a vocabulary of 150,000.
BLOCK_BYTES = 16 << 20
# Files with weights, and indices of such, by their names in small letters: a loader may prefer them.
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.npz", "*.onnx"),
    "*.index.json",
)
_NO_WEIGHTS = ("tokenizer*", "training_args.bin")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Merged:
    """What :func:`merge_adapter` wrote: the directory, how many of its tensors changed, of how many, and the
    bytes of its shards; ``left_out`` names the checkpoint's files with other weights, which were not copied;
    ``notes``: what else to know of the adapter."""

    directory: Path
    changed: int
    tensors: int
    bytes: int
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Change:
    """``scaling * b @ a`` for the outputs ``where`` of a matrix ``[out, in]``."""

    where: slice
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class _Matrix:
    """One matrix of a shard to be changed: row-major ``[rows, columns]`` from byte ``offset`` of the file.
    ``transposed``: its columns are the outputs. ``whole`` replaces it, before the changes."""

    key: str
    offset: int
    rows: int
    columns: int
    dtype: torch.dtype
    changes: tuple[_Change, ...] = ()
    transposed: bool = False
    whole: torch.Tensor | None = None


def merge_adapter(
    adapter: str | os.PathLike[str],
    base_checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> Merged:
    """Writes a checkpoint with ``W + scaling * B A`` in the place of every adapted ``W``.

    The sum is taken in float32 (float64 for a float64 checkpoint) and rounded once to the checkpoint's type.
    Whole weights in the adapter (``modules_to_save``) replace the checkpoint's. So does one beneath an adapted
    head, except where the checkpoint's is the same number, not yet rounded to the adapter's type.

    All other files beside the shards are copied, but those of an adapter, which ``from_pretrained`` would apply
    again, and those that hold weights by their names (``.safetensors``, ``.bin``, ``.pt``, ``.pth``, ``.gguf``
    and the like, and indices of them), which would be the base's: a warning names these. Folders are not
    copied.

    Args:
        adapter: an adapter directory of any format.
        base_checkpoint: a directory with ``config.json`` and safetensors shards (or one file), experts one by
            one or fused, not quantised.
        out: appears when it is complete; memory stays below the adapter's size plus some tens of MB.
        overwrite: whether ``out`` may hold a checkpoint or an adapter; all of it is then replaced in one step.
        progress: a tqdm bar on stderr.

    Raises:
        ArgumentError: something that is not understood, an adapted module that the checkpoint lacks, one of two
            tied weights adapted alone, a sum that the checkpoint's type cannot hold, too little space, or other
            things than a checkpoint in ``out``. ``out`` is as it was then.
    """
    adapter = given_directory("adapter", adapter)
    source, out = given_directory("base_checkpoint", base_checkpoint), given_directory("out", out)
    if out.exists() and not (overwrite and out.is_dir()):
        raise ArgumentError(f"out: expected a path that does not exist (or overwrite), got {out}")
    for name, inside in (("base checkpoint", source), ("adapter", adapter)):
        if inside.resolve().is_relative_to(out.resolve()):
            raise ArgumentError(f"out: expected another directory than one that holds the {name}, got {out}")
    if out.exists():
        _require_replaceable(out)
    base = base_for(adapter, source)
    if getattr(base.config, "quantization_config", None):
        raise ArgumentError(f"base_checkpoint: expected weights that are not quantised, got {source}")
    read, _ = read_adapter(adapter, base)
    shards = [path.name for path in listed_files(source)]
    plan, tensors = _plan(read, base, source, shards)
    others, left_out = _others(source, shards)
    total = _size(source, shards)
    _require_space(out, total + _size(source, others))
    if left_out:
        logger.warning("%s: left out, since they would hold unmerged weights: %s", out, ", ".join(left_out))
    with replaced_directory(out) as work:
        for name in others:
            shutil.copy2(source / name, work / name)
            sync(work / name)
        matrices = sum(len(found) for found in plan.values())
        with tqdm(total=matrices, desc="merging", unit=" matrices", disable=not progress) as bar:
            for shard in shards:
                shutil.copyfile(source / shard, work / shard)
                with open(work / shard, "r+b") as file:
                    for matrix in plan[shard]:
                        _change(file, matrix)
                        bar.update()
                sync(work / shard)
    changed = len({(shard, matrix.key) for shard, found in plan.items() for matrix in found})
    return Merged(out, changed, tensors, total, tuple(left_out), tuple(read.notes))


def _require_replaceable(out: Path) -> None:
    """Refuses to replace what does not look like this tool's own result: all of it would be lost."""
    entries = sorted(out.iterdir())
    names = [entry.name for entry in entries]
    folders = [entry.name for entry in entries if entry.is_dir() and entry.name != FOLDER]
    ours = bool({"config.json", CONFIG} & {*names}) and any(name.endswith(".safetensors") for name in names)
    if folders or (names and not ours):
        raise ArgumentError(
            "out: expected, to overwrite, an empty directory or one with config.json and safetensors and no "
            f"folders, got {out} with {', '.join((folders or names)[:4])}"
            + (f" and {len(folders or names) - 4} more" if len(folders or names) > 4 else "")
        )


def _require_space(out: Path, needed: int) -> None:
    place = out.resolve().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ArgumentError(f"out: expected {needed:,} bytes of free space on {place}, got {free:,}")


def _size(directory: Path, names: list[str]) -> int:
    return sum((directory / name).stat().st_size for name in names)


def _others(source: Path, shards: list[str]) -> tuple[list[str], list[str]]:
    """The files beside the shards: those to be copied, and those with weights that were not read."""
    # Where there is one whole file the index is not read.
    read = {*shards} if WHOLE in shards else {*shards, INDEX}
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    left_out = [name for name in names if name not in read | {*ADAPTER_FILES} and _holds_weights(name)]
    return [name for name in names if name not in {*shards, *ADAPTER_FILES, *left_out}], left_out


def _holds_weights(name: str) -> bool:
    def is_one_of(patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)

    return is_one_of(_WEIGHTS) and not is_one_of(_NO_WEIGHTS)


def _plan(
    adapter: Adapter, base: BaseModel, source: Path, shards: list[str]
) -> tuple[dict[str, list[_Matrix]], int]:
    """The matrices to change, by shard; refuses an adapter of which something would be left out."""
    left = {
        (module, projection, expert)
        for module, projections in adapter.experts.items()
        for projection, factors in projections.items()
        for expert in range(len(factors.a))
    }
    linears = {base.place_of(f"{name}.weight").name: linear for name, linear in adapter.linears.items()}
    wholes = {base.place_of(name).name: tensor for name, tensor in adapter.others.items()}
    unplaced = set(linears) | set(wholes)
    held: set[str] = set()
    plan: dict[str, list[_Matrix]] = {}
    count = 0
    for shard in shards:
        start, positions = tensor_positions(source / shard)
        count += len(positions)
        plan[shard] = []
        for key, entry in positions.items():
            place = _place(base, key)
            if place is None:
                continue
            held.add(place.name)
            if place.name in wholes and place.expert is None:
                found = [_whole_matrix(key, entry, start, wholes[place.name], linears.get(place.name))]
            elif place.module is not None:
                found = list(_expert_matrices(adapter, base, place, key, entry, start, left))
            elif place.name in linears:
                found = [_matrix(key, entry, start, 0, _of_linear(linears[place.name]))]
            else:
                continue
            # Whole experts have no place in a checkpoint that holds them one by one.
            if found:
                unplaced.discard(place.name)
            plan[shard] += found
    alone = {name: tensor for name, tensor in wholes.items() if name not in linears}
    unplaced -= _tied_to_another(base, held, set(linears), alone)
    if left or unplaced:
        missing = sorted(unplaced) or [f"{m}.{e}.{p}" for m, p, e in sorted(left)]
        raise ArgumentError(
            f"adapter: expected only modules that the checkpoint {source} holds, got {missing[0]} "
            f"({len(missing)} are missing there)"
        )
    return plan, count


def _tied_to_another(
    base: BaseModel, held: set[str], linears: set[str], wholes: dict[str, torch.Tensor]
) -> set[str]:
    """Those of the adapter's weights that the checkpoint (which holds ``held``) has under a tied name, and that
    the adapter changes there alike. ArgumentError where it changes one of two: PEFT trains a copy of a tied
    weight, and what is merged would change both."""
    ties: dict[str, str] = getattr(base.model, "all_tied_weights_keys", None) or {}
    alike = set()
    for tied, kept in ties.items():
        pair = {tied, kept}
        given = sorted(pair & (linears | set(wholes)))
        absent = pair - held
        if not given or len(absent) != 1:
            continue
        if not pair <= set(wholes) or not same_bits(wholes[tied], wholes[kept]):
            what = "different ones of the two" if len(given) == 2 else f"{given[0]} alone"
            raise ArgumentError(
                f"adapter: expected the same new weight for {kept} and {tied}, which are tied in the "
                f"checkpoint (PEFT's ensure_weight_tying), got {what}"
            )
        alike |= absent
    return alike


def _place(base: BaseModel, key: str) -> Place | None:
    try:
        return base.place_of(key)
    except ArgumentError as reason:
        # A weight that transformers rearranges while loading; only a problem if the adapter changes it, and
        # then its name is found to be missing.
        logger.debug("%s is left as it is: %s", key, reason)
        return None


def _expert_matrices(
    adapter: Adapter,
    base: BaseModel,
    place: Place,
    key: str,
    entry: dict[str, Any],
    start: int,
    left: set[tuple[str, str, int]],
) -> Iterator[_Matrix]:
    module = place.module or ""
    layout = base.layout(module)
    given = adapter.experts.get(module, {})
    parts = [(name, given[name]) for name in place.projections if name in given]
    if not parts:
        return
    fused = place.expert is None
    experts = range(layout.num_experts) if place.expert is None else [place.expert]
    shape = list(entry["shape"])
    sizes = layout.sizes(place.name.rpartition(".")[2] if len(place.projections) > 1 else place.projections[0])
    matrix = list(reversed(sizes)) if layout.transposed else list(sizes)
    if shape != ([layout.num_experts, *matrix] if fused else matrix):
        raise ArgumentError(f"{key}: expected {matrix} for each expert, got {shape}")
    for expert in experts:
        changes = []
        for projection, factors in parts:
            left.discard((module, projection, expert))
            rows = layout.rows(projection) if len(place.projections) > 1 else slice(None)
            changes.append(_Change(rows, factors.a[expert], factors.b[expert], factors.scaling))
        yield _matrix(key, entry, start, expert if fused else 0, changes, transposed=layout.transposed)


def _matrix(
    key: str,
    entry: dict[str, Any],
    start: int,
    index: int,
    changes: list[_Change],
    transposed: bool = False,
) -> _Matrix:
    dtype = _dtype(key, entry)
    rows, columns = entry["shape"][-2:]
    offset = start + entry["data_offsets"][0] + index * rows * columns * dtype.itemsize
    return _Matrix(key, offset, rows, columns, dtype, tuple(changes), transposed)


def _of_linear(linear: Linear) -> list[_Change]:
    return [_Change(slice(None), linear.a, linear.b, linear.scaling)]


def _whole_matrix(
    key: str, entry: dict[str, Any], start: int, tensor: torch.Tensor, linear: Linear | None
) -> _Matrix:
    if list(tensor.shape) != entry["shape"]:
        raise ArgumentError(f"{key}: expected {entry['shape']}, got {list(tensor.shape)}")
    columns = tensor.shape[-1] if tensor.dim() else 1
    offset, dtype = start + entry["data_offsets"][0], _dtype(key, entry)
    rows = tensor.numel() // max(columns, 1)
    changes = tuple(_of_linear(linear)) if linear is not None else ()
    return _Matrix(key, offset, rows, columns, dtype, changes, whole=tensor.reshape(rows, columns))


def _dtype(key: str, entry: dict[str, Any]) -> torch.dtype:
    if entry["dtype"] not in _DTYPES:
        raise ArgumentError(f"{key}: expected one of {sorted(_DTYPES)}, got {entry['dtype']}")
    return _DTYPES[entry["dtype"]]


def _change(file: Any, matrix: _Matrix) -> None:
    """Reads, changes and writes back a matrix, some rows at a time."""
    row_bytes = matrix.columns * matrix.dtype.itemsize
    step = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for first in range(0, matrix.rows, step):
        rows = slice(first, min(first + step, matrix.rows))
        total = _unchanged(file, matrix, rows)
        finite = total.isfinite()
        for change in matrix.changes:
            _add(total, change, rows, matrix.transposed)
        block = total.to(matrix.dtype).contiguous()
        _require_held(matrix, finite, total, block)
        file.seek(matrix.offset + first * row_bytes)
        file.write(block.view(torch.uint8).numpy().data)


def _unchanged(file: Any, matrix: _Matrix, rows: slice) -> torch.Tensor:
    """What the changes of these rows are added to, in the type of the sum."""
    if matrix.whole is not None and not matrix.changes:
        return matrix.whole[rows]
    count, row_bytes = rows.stop - rows.start, matrix.columns * matrix.dtype.itemsize
    file.seek(matrix.offset + rows.start * row_bytes)
    data = bytearray(count * row_bytes)
    if file.readinto(data) != len(data):
        raise ArgumentError(f"{matrix.key}: expected {len(data)} bytes, got the end of the file")
    held = torch.frombuffer(data, dtype=matrix.dtype).reshape(count, matrix.columns)
    held = held.to(torch.float64 if matrix.dtype == torch.float64 else torch.float32)
    if matrix.whole is None:
        return held
    # A copy of the checkpoint's in a smaller type says less than the checkpoint.
    given = matrix.whole[rows]
    return torch.where(held.to(given.dtype) == given, held, given.to(held.dtype))


def _require_held(matrix: _Matrix, finite: torch.Tensor, wanted: torch.Tensor, block: torch.Tensor) -> None:
    """Refuses finite numbers that have become infinite or NaN, in the sum or in the checkpoint's type."""
    over = finite & ~block.isfinite()
    if over.any():
        largest = float(wanted[over].abs().max())
        raise ArgumentError(
            f"{matrix.key}: expected numbers up to {torch.finfo(matrix.dtype).max:g} ({matrix.dtype}), got "
            f"{largest:g}"
        )


def _add(total: torch.Tensor, change: _Change, rows: slice, transposed: bool) -> None:
    """Adds the part of a change that falls on ``rows`` of its matrix to ``total``, those rows."""
    if transposed:
        part = change.a[:, rows].to(total.dtype).T @ change.b.to(total.dtype).T
        total[:, change.where] += change.scaling * part
        return
    first, _, step = change.where.indices(rows.stop)  # row i of b is row first + i * step
    begin = max(0, -((first - rows.start) // step))
    end = min(change.b.shape[0], max(0, -((first - rows.stop) // step)))
    if begin < end:
        part = change.b[begin:end].to(total.dtype) @ change.a.to(total.dtype)
        at = first + begin * step - rows.start
        total[at : at + (end - begin - 1) * step + 1 : step] += change.scaling * part
