"""KTransformers' layout: the experts' factors in ``fused_expert_lora.safetensors``, the rest as PEFT has it.

Facts read in kt-kernel 0.7.2 (``sft/lora.py``, ``sft/artifacts.py``, ``sft/convert_kt_to_sglang_adapter.py``):

* keys ``layers.L.experts.NAME``; A ``[E, r, in]`` in ``gate_lora_a``, ``up_lora_a``, ``down_lora_a`` and B
  ``[E, out, r]`` in ``gate_lora_b``, ``up_lora_b``, ``down_lora_b``; all six for each layer, no others;
* one rank and one alpha for all; the scaling is alpha / r, also where the config says rsLoRA;
* training buffers are bfloat16, and loading refuses another dtype; its converter for SGLang takes any;
* loading wants ``adapter_config.json``, one standard adapter file (here always ``adapter_model.safetensors``)
  and ``kt_adapter_manifest.json``, see :mod:`amx_sft_moe.adapters.kt_manifest`.

The file is read back here by kt-kernel's own loader and converter in the tests where kt-kernel is installed;
a training run of KTransformers was not tried. The manifest is written for ``expert_weight_format`` bf16.
"""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from amx_sft_moe.adapters.adapter import Adapter, Factors, peft_entries
from amx_sft_moe.adapters.base import PROJECTIONS, BaseModel
from amx_sft_moe.adapters.files import CONFIG, KT_MANIFEST, KT_WEIGHTS, read_json
from amx_sft_moe.adapters.fusing import zeros
from amx_sft_moe.adapters.per_expert import evened
from amx_sft_moe.adapters.settings import Entry, entries_of_linears, is_number, targets_of_linears, written
from amx_sft_moe.errors import ArgumentError

_KEY = re.compile(r"layers\.(\d+)\.experts\.(gate|up|down)_lora_([ab])")


def read(
    config: dict[str, Any], base: BaseModel, tensors: dict[str, torch.Tensor], directory: Path
) -> dict[str, dict[str, Factors]]:
    """Factors by module and projection; the scaling is that of adapter_config.json or, without one, of the
    manifest."""
    where = str(directory / KT_WEIGHTS)
    found: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    modules = modules_by_layer(base)
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or int(match.group(1)) not in modules:
            raise ArgumentError(
                f"{where}: expected keys layers.L.experts.gate_lora_a and the like for layers "
                f"{sorted(modules)[:8]}, got {key!r}"
            )
        place = modules[int(match.group(1))], f"{match.group(2)}_proj"
        found.setdefault(place, {})[match.group(3)] = tensor
    experts: dict[str, dict[str, Factors]] = {}
    for (module, projection), pair in found.items():
        layout = base.layout(module)
        out_size, in_size = layout.sizes(projection)
        a, b = pair.get("a"), pair.get("b")
        if a is None or b is None or a.dim() != 3:
            raise ArgumentError(f"{where}: {module}.{projection}: expected A and B with three dimensions")
        rank = a.shape[1]
        wanted = (layout.num_experts, rank, in_size), (layout.num_experts, out_size, rank)
        if (tuple(a.shape), tuple(b.shape)) != wanted:
            raise ArgumentError(
                f"{where}: {module}.{projection}: expected {list(wanted[0])} and {list(wanted[1])}, got "
                f"{list(a.shape)} and {list(b.shape)}"
            )
        if is_number(config.get("r")) and config["r"] != rank:
            raise ArgumentError(
                f"{where}: {module}.{projection}: expected rank {config['r']} (r of {CONFIG}), got {rank}: "
                "which of the two lora_alpha belongs to cannot be told"
            )
        alpha = _alpha(config, directory)
        experts.setdefault(module, {})[projection] = Factors(
            tuple(a.unbind(0)), tuple(b.unbind(0)), alpha / rank
        )
    return {module: {p: found[p] for p in PROJECTIONS if p in found} for module, found in experts.items()}


def _alpha(config: dict[str, Any], directory: Path) -> float:
    alpha = config.get("lora_alpha")
    if alpha is None and (directory / KT_MANIFEST).is_file():
        lora = read_json(directory / KT_MANIFEST).get("lora")
        alpha = lora.get("alpha") if isinstance(lora, dict) else None
    if not is_number(alpha):
        raise ArgumentError(f"{directory}: expected lora_alpha in {CONFIG} or {KT_MANIFEST}, got {alpha!r}")
    return float(alpha)


def missing_key(tensors: Container[str], base: BaseModel) -> str:
    """A key that KTransformers wants of this base and that is not there; empty where all are.

    Raises ArgumentError where the base has no layers as it numbers them.
    """
    wanted = (
        f"layers.{number}.experts.{name}_lora_{side}"
        for number in sorted(modules_by_layer(base))
        for name in ("gate", "up", "down")
        for side in "ab"
    )
    return next((key for key in wanted if key not in tensors), "")


def modules_by_layer(base: BaseModel) -> dict[int, str]:
    """The experts module of each layer's number."""
    found: dict[int, str] = {}
    for module in base.layouts:
        match = re.search(r"(?:^|\.)layers\.(\d+)\.", module)
        if match is None or int(match.group(1)) in found:
            raise ArgumentError(
                f"{module}: expected one experts module in each layers.L, as ktransformers numbers them"
            )
        found[int(match.group(1))] = module
    return found


def refusal(base: BaseModel) -> str:
    """Why there are no files for KTransformers of this base; empty: there are."""
    try:
        modules_by_layer(base)
    except ArgumentError as reason:
        return str(reason)
    for module, layout in base.layouts.items():
        if layout.transposed or layout.interleaved:
            return (
                f"{module}: expected experts with gate and up one after the other, [E, out, in], for format "
                "ktransformers, got transposed or interleaved ones"
            )
    return ""


def write(
    adapter: Adapter, base: BaseModel, peft_version: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any], list[str]]:
    """Tensors of the experts' file and of ``adapter_model.safetensors``, the configuration, and what was
    lost (empty: nothing)."""
    if reason := refusal(base):
        raise ArgumentError(reason)
    numbers = {module: number for number, module in modules_by_layer(base).items()}
    lost: list[str] = []
    whole = {}
    # Of each layer, adapted or not: KTransformers refuses a file that lacks one.
    for module, layout in base.layouts.items():
        projections = adapter.experts.get(module) or {}
        some = next(iter((projections or next(iter(adapter.experts.values()))).values()))
        whole[module] = {
            name: projections.get(name) or zeros(layout, name, some.rank, some.scaling, some.a[0].dtype)
            for name in PROJECTIONS
        }
    even = evened(whole, [PROJECTIONS], lost)
    fused = {}
    for module, projections in even.items():
        for name, factors in projections.items():
            key = f"layers.{numbers[module]}.experts.{name.removesuffix('_proj')}_lora"
            fused[f"{key}_a"], fused[f"{key}_b"] = torch.stack(factors.a), torch.stack(factors.b)
    rest = peft_entries(adapter.linears, adapter.others, {})
    some = next(iter(next(iter(even.values())).values()))
    targets = targets_of_linears(adapter.config, adapter.linears, ())
    config = written(
        adapter.config,
        Entry("", some.rank, some.scaling),
        entries_of_linears(adapter.linears),
        targets,
        None,
        peft_version,
    )
    return fused, rest, config, lost
