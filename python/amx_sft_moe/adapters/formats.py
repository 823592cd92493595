"""Reading an adapter directory of any format, and writing one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amx_sft_moe.adapters import kt_manifest, ktransformers, peft_fused, per_expert
from amx_sft_moe.adapters.adapter import (
    FORMATS,
    FUSED,
    KTRANSFORMERS,
    PER_EXPERT,
    Adapter,
    Linear,
    is_beneath,
    is_doubled,
    plain_name,
)
from amx_sft_moe.adapters.base import PROJECTIONS, BaseModel
from amx_sft_moe.adapters.files import (
    CONFIG,
    KT_WEIGHTS,
    PICKLED,
    WEIGHTS,
    read_json,
    read_tensors,
    save_json,
    save_tensors,
)
from amx_sft_moe.adapters.settings import name_of_linear, require_plain_lora, require_sound, scaling_of
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.paths import given_directory

_PAIR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_FUSED_NAME = re.compile(r"(?:.*\.)?experts(?:\.base_layer)*")
_EXPERT_NAME = re.compile(r"(?:.*\.)?experts\.\d+\.\w+")


@dataclass(frozen=True)
class Files:
    """What lies in an adapter directory, not yet understood."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    kt_tensors: dict[str, torch.Tensor] | None

    @property
    def weights_path(self) -> str:
        """The file of the PEFT entries, for messages."""
        return str(self.directory / WEIGHTS)


def read_files(directory: str | os.PathLike[str]) -> Files:
    """Opens an adapter directory.

    Raises:
        ArgumentError: not a directory, files missing, empty, truncated or of another kind, experts in two.
    """
    directory = given_directory("adapter", directory)
    if not directory.is_dir():
        raise ArgumentError(f"adapter: expected a directory, got {directory}")
    kt = read_tensors(directory / KT_WEIGHTS) if (directory / KT_WEIGHTS).is_file() else None
    files = [directory / name for name in (WEIGHTS, PICKLED) if (directory / name).is_file()]
    if not files and kt is None:
        raise ArgumentError(f"adapter: expected {WEIGHTS} or {KT_WEIGHTS} in {directory}, got neither")
    needed = kt is None or (directory / CONFIG).is_file()
    config = read_json(directory / CONFIG) if needed else {}
    if config:
        require_sound(config, str(directory / CONFIG))
    tensors = read_tensors(files[0]) if files else {}
    if kt is not None and (doubled := [name for name in pairs_of(tensors)[0] if _experts_format(name)]):
        raise ArgumentError(
            f"adapter: expected experts in {KT_WEIGHTS} or in {files[0].name}, got both in {directory} "
            f"({doubled[0]})"
        )
    return Files(directory, config, tensors, kt)


def pairs_of(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """``module -> {"A": ..., "B": ...}`` and the keys that are no such pair."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    rest = []
    for key, tensor in tensors.items():
        match = _PAIR.fullmatch(key)
        if match is None:
            rest.append(key)
            continue
        sides = pairs.setdefault(match["module"], {})
        if match["side"] in sides:
            raise ArgumentError(f"{key}: expected one lora_{match['side']} of {match['module']}, got two")
        sides[match["side"]] = tensor
    return pairs, rest


def format_of(files: Files, modules: Iterable[str]) -> str | None:
    """One of :data:`FORMATS` by the names of what is adapted; ``None``: no experts."""
    if files.kt_tensors is not None:
        return KTRANSFORMERS
    found = {_experts_format(module) for module in modules} - {None}
    if len(found) > 1:
        raise ArgumentError(f"{files.weights_path}: expected experts fused or one by one, got both in one file")
    return found.pop() if found else None


def _experts_format(module: str) -> str | None:
    """The format by one adapted module's name; ``None``: no experts."""
    kinds = {FUSED: _FUSED_NAME, PER_EXPERT: _EXPERT_NAME}
    return next((kind for kind, name in kinds.items() if name.fullmatch(module)), None)


def read_adapter(directory: str | os.PathLike[str], base: BaseModel) -> tuple[Adapter, str | None]:
    """Reads an adapter of any format.

    Args:
        directory: an adapter directory.
        base: its base model, see :func:`amx_sft_moe.adapters.load_base`. Where the adapter's names are those of
            the class that AutoModelForCausalLM makes of it, that class is meant.

    Returns:
        The adapter and its format, ``None`` where no experts are adapted.

    Raises:
        ArgumentError: anything that is not understood; the message names file and entry.
    """
    files = read_files(directory)
    require_plain_lora(files.config, str(files.directory / CONFIG))
    adapter = understood(files, fitting(files, base))
    return adapter, format_of(files, pairs_of(files.tensors)[0]) if adapter.experts else None


def fitting(files: Files, base: BaseModel) -> BaseModel:
    """``base``, or the same checkpoint as AutoModelForCausalLM loads it, where that knows more of the adapter's
    names: a checkpoint for text and images has adapters of the whole model and of the part for text."""
    pairs, rest = pairs_of(files.tensors)
    keys = [f"{plain_name(name)}.weight" for name in pairs] + [plain_name(key) for key in rest]

    def strangers(model: BaseModel) -> int:
        return sum(not model.knows(key) for key in keys)

    if not strangers(base) or base.as_causal_lm is None:
        return base
    return min(base, base.as_causal_lm, key=strangers)


def understood(files: Files, base: BaseModel, problems: list[str] | None = None) -> Adapter:
    """The adapter of opened files. With ``problems``, what is not understood is told there and left out;
    without, it is an :class:`ArgumentError`."""
    where = files.weights_path
    pairs, rest = pairs_of(files.tensors)
    adapter = Adapter(files.config)
    fused: dict[str, dict[int, Any]] = {}
    single: dict[tuple[str, str], dict[int, Any]] = {}
    for name, sides in pairs.items():
        with _told(problems):
            if set(sides) != {"A", "B"}:
                raise ArgumentError(f"{where}: {name}: expected lora_A and lora_B, got lora_{''.join(sides)}")
            _sort_in(files, base, name, (sides["A"], sides["B"]), adapter, fused, single)
    for key in rest:
        if is_doubled(key, files.tensors):
            continue
        with _told(problems):
            weight = _whole_weight(where, base, key, files.tensors[key])
            if plain_name(key) in adapter.others:
                raise ArgumentError(f"{where}: expected one entry for {plain_name(key)}, got {key} too")
            adapter.others[plain_name(key)] = weight
            if is_beneath(key):
                adapter.notes.append(
                    f"{key}: PEFT puts it in the place of the base model's own, servers do not"
                )
    with _told(problems):
        adapter.experts.update(peft_fused.read(files.config, base, fused, where) if fused else {})
    for place, found in single.items():
        with _told(problems):
            factors = per_expert.read(files.config, base, *place, found, where, adapter.notes)
            adapter.experts.setdefault(place[0], {})[place[1]] = factors
    if files.kt_tensors is not None:
        with _told(problems):
            adapter.experts.update(ktransformers.read(files.config, base, files.kt_tensors, files.directory))
    adapter.experts = {
        module: {name: given[name] for name in PROJECTIONS if name in given}
        for module, given in adapter.experts.items()
    }
    return adapter


@contextmanager
def _told(problems: list[str] | None) -> Iterator[None]:
    try:
        yield
    except ArgumentError as reason:
        if problems is None:
            raise
        problems.append(str(reason))


def _sort_in(
    files: Files,
    base: BaseModel,
    name: str,
    pair: tuple[torch.Tensor, torch.Tensor],
    adapter: Adapter,
    fused: dict[str, dict[int, Any]],
    single: dict[tuple[str, str], dict[int, Any]],
) -> None:
    module = name.replace(".base_layer", "")
    if module in base.layouts:
        fused.setdefault(module, {})[name.count(".base_layer")] = pair
        return
    place = base.place_of(f"{name}.weight")
    if place.module is not None and place.expert is not None and len(place.projections) == 1:
        given = single.setdefault((place.module, place.projections[0]), {})
        if place.expert in given:
            raise ArgumentError(
                f"{name}: expected one adapter of this expert, got {given[place.expert][0]} too"
            )
        given[place.expert] = name, pair
    else:
        adapter.linears[name] = _linear(files, base, name, place.name, pair)


def fused_the_old_way(files: Files, base: BaseModel) -> bool | None:
    """Whether a fused adapter has the orientation of PEFT 0.18; ``None``: it is not understood."""
    fused: dict[str, dict[int, Any]] = {}
    for name, sides in pairs_of(files.tensors)[0].items():
        module = name.replace(".base_layer", "")
        if module in base.layouts and set(sides) == {"A", "B"}:
            fused.setdefault(module, {})[name.count(".base_layer")] = sides["A"], sides["B"]
    try:
        pairs = peft_fused.named(files.config, base, fused, files.weights_path)
        return peft_fused.stored_the_old_way(files.config, pairs)
    except ArgumentError:
        return None


def _linear(files: Files, base: BaseModel, name: str, parameter: str, pair: Any) -> Linear:
    where = files.weights_path
    weight = base.parameters.get(parameter)
    if weight is None:
        raise ArgumentError(f"{where}: expected modules of {base.where}, got {name}")
    a, b = pair
    if (
        weight.dim() != 2
        or a.dim() != 2
        or b.shape != (weight.shape[0], a.shape[0])
        or (a.shape[1] != weight.shape[1])
    ):
        raise ArgumentError(
            f"{where}: {name}: expected lora_A [r, in] and lora_B [out, r] for a weight {list(weight.shape)}, "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    # PEFT matches its patterns with the module's name in the model, or with the parameter's it was given.
    module = name_of_linear(files.config, parameter.removesuffix(".weight"))
    return Linear(a, b, scaling_of(files.config, module, a.shape[0], where))


def _whole_weight(where: str, base: BaseModel, key: str, tensor: torch.Tensor) -> torch.Tensor:
    name = base.place_of(plain_name(key)).name
    weight = base.parameters.get(name)
    if weight is None or "lora_" in key:
        raise ArgumentError(f"{where}: expected LoRA factors and whole weights of {base.where}, got {key}")
    if weight.shape != tensor.shape:
        raise ArgumentError(f"{where}: {key}: expected {list(weight.shape)}, got {list(tensor.shape)}")
    return tensor


def write_adapter(
    adapter: Adapter, base: BaseModel, kind: str, directory: Path, peft_version: str, one_scaling: bool = False
) -> tuple[list[str], int]:
    """Writes the files of one format into an empty directory.

    Returns:
        What was lost (empty: nothing), and the number of tensors.
    """
    if kind not in FORMATS:
        raise ArgumentError(f"to: expected one of {FORMATS}, got {kind!r}")
    if not adapter.experts:
        raise ArgumentError("adapter: expected LoRA on routed experts, got none: there is nothing to convert")
    if kind == KTRANSFORMERS:
        fused, rest, config, lost = ktransformers.write(adapter, base, peft_version)
        save_tensors(fused, directory / KT_WEIGHTS)
    elif kind == PER_EXPERT:
        fused = {}
        rest, config, lost = per_expert.write(adapter, base, peft_version, one_scaling)
    else:
        fused = {}
        rest, config, lost = peft_fused.write(adapter, base, peft_version)
    save_tensors(rest, directory / WEIGHTS)
    save_json(config, directory / CONFIG)
    if kind == KTRANSFORMERS:
        kt_manifest.write_manifest(directory)
    return lost, len(fused) + len(rest)
