"""Adapters on disk, one pair of matrices per expert: the layout that stock PEFT loads and that servers
converge on.

PEFT trains fused experts with one A for gate and up and stores all experts in one matrix, a file that
inference servers drop or reject. :func:`save_per_expert` writes the same adapter as

    base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight    [r, H]
    base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_B.weight    [I, r]

with up_proj and down_proj likewise and attention as it is. A is written for gate and for up; B's rows are
split. PEFT reads it back with ``PeftModel.from_pretrained(base_model, directory)`` (there gate and up become
one adapter of rank 2r with the same ``W + BA``).
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import save_file

from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.integrations.adapters_in_use import Factors, NotUnderstoodError
from amx_sft_moe.integrations.peft_lora import factors_of

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class _Adapted:
    """Rank and scaling of one adapted module, under the name that the per-expert checkpoint has for it."""

    name: str
    rank: int
    alpha: float


def save_per_expert(
    model: PeftModel, directory: str | os.PathLike[str], adapter_name: str | None = None
) -> Path:
    """Writes a LoRA adapter with one pair of matrices per expert and projection, and everything else it
    adapts.

    Files are complete or absent: they are written beside their place and renamed.

    Args:
        model: a PEFT model with LoRA on ``gate_up_proj`` and / or ``down_proj`` of fused experts.
        directory: receives ``adapter_model.safetensors`` and ``adapter_config.json``; made if need be.
        adapter_name: which adapter; ``None``: the active one.

    Returns:
        The directory.

    Raises:
        ArgumentError: no adapted experts, or something that this layout cannot say (the message tells what).
    """
    if not isinstance(model, PeftModel):
        raise TypeError(f"model: expected a peft.PeftModel, got {type(model).__name__}")
    adapter_name = _adapter_of(model, adapter_name)
    experts = dict(_adapted_experts(model, adapter_name))
    if not experts:
        raise ArgumentError(f"model: expected LoRA on fused experts in adapter {adapter_name!r}, got none")
    _require_names_of_checkpoint(model)
    linears = [
        _adapted(name, module, adapter_name)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper) and adapter_name in module.r
    ]
    for linear in linears:
        if linear.name.rpartition(".")[2] in _EXPERT_NAMES:
            raise ArgumentError(
                f"model: expected no adapter on other modules named like the experts', got {linear.name}: "
                "loading would take it for theirs"
            )
    prefixes = {name.removesuffix(".base_layer") for name in experts}
    state = {
        key: tensor.detach().cpu().contiguous()
        for key, tensor in get_peft_model_state_dict(model, adapter_name=adapter_name).items()
        if not any(key.startswith(f"{prefix}.") for prefix in prefixes)
    }
    expert_entries: list[_Adapted] = []
    for prefix, parameter, (a, b, scaling) in experts.values():
        state.update(_per_expert(prefix, parameter, a.detach().cpu(), b.detach().cpu()))
        expert_entries += _names_of(parameter, a.shape[1], scaling)
    if all(parameter == "gate_up_proj" for _, parameter, _ in experts.values()):
        # PEFT loads gate and up only beside an adapter of down: one of zeros.
        default = expert_entries[0]
        for prefix, _, (a, b, _) in experts.values():
            shapes = (a.shape[0], default.rank, b.shape[1] // 2), (a.shape[0], a.shape[2], default.rank)
            zeros = (torch.zeros(shape, dtype=a.dtype) for shape in shapes)
            state.update(_per_expert(prefix, "down_proj", *zeros))
        expert_entries.append(_Adapted("down_proj", default.rank, default.alpha))
    config = _config(model, adapter_name, expert_entries, linears)
    return _write(Path(directory), state, config, _auto_mapping(model, config))


def _adapter_of(model: PeftModel, adapter_name: str | None) -> str:
    active = model.active_adapters
    if adapter_name is None and len(active) != 1:
        raise ArgumentError(
            f"adapter_name: expected one of {list(model.peft_config)}, since {active} are active, got None"
        )
    adapter_name = active[0] if adapter_name is None else adapter_name
    if adapter_name not in model.peft_config:
        raise ArgumentError(f"adapter_name: expected one of {list(model.peft_config)}, got {adapter_name!r}")
    return adapter_name


def _adapted_experts(model: PeftModel, adapter_name: str) -> Iterator[tuple[str, tuple[str, str, Factors]]]:
    """``(module name, (prefix, parameter, factors))`` of each wrapped expert parameter."""
    for name, module in model.named_modules():
        if not isinstance(module, ParamWrapper) or adapter_name not in module.lora_A:
            continue
        prefix = name
        while prefix.endswith(".base_layer"):  # wrappers of several parameters are nested
            prefix = prefix.removesuffix(".base_layer")
        if module.parameter_name not in ("gate_up_proj", "down_proj") or not prefix.endswith(".mlp.experts"):
            raise ArgumentError(
                "model: expected adapted parameters mlp.experts.gate_up_proj and mlp.experts.down_proj only, "
                f"got {prefix}.{module.parameter_name}"
            )
        try:
            yield name, (prefix, module.parameter_name, factors_of(module, adapter_name))
        except NotUnderstoodError as reason:
            raise ArgumentError(f"model: {prefix}.{module.parameter_name}: {reason}") from None


def _require_names_of_checkpoint(model: PeftModel) -> None:
    # PEFT fuses per-expert adapters while loading by the rules that transformers has for the base checkpoint.
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    model_type = getattr(model.config, "model_type", None)
    rules = get_checkpoint_conversion_mapping(model_type) or []
    sources = {pattern for rule in rules for pattern in getattr(rule, "source_patterns", [])}
    if not any(source.startswith("mlp.experts.*.gate_proj") for source in sources):
        raise ArgumentError(
            "model: expected a model type whose checkpoints hold mlp.experts.*.gate_proj, up_proj and "
            f"down_proj, got {model_type!r}"
        )


def _per_expert(prefix: str, parameter: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """A ``[E, r, in]`` and B ``[E, out, r]`` as named matrices. Each owns its memory, as safetensors wants
    it."""
    parts = (
        {"down_proj": b}
        if parameter == "down_proj"
        else dict(zip(_EXPERT_NAMES, b.chunk(2, dim=1), strict=False))
    )
    state = {}
    for projection, rows in parts.items():
        for expert in range(a.shape[0]):
            key = f"{prefix}.{expert}.{projection}"
            state[f"{key}.lora_A.weight"] = a[expert].clone(memory_format=torch.contiguous_format)
            state[f"{key}.lora_B.weight"] = rows[expert].clone(memory_format=torch.contiguous_format)
    return state


def _names_of(parameter: str, rank: int, scaling: float) -> list[_Adapted]:
    names = ("down_proj",) if parameter == "down_proj" else ("gate_proj", "up_proj")
    return [_Adapted(name, rank, scaling * rank) for name in names]


def _adapted(name: str, module: LoraLayer, adapter_name: str) -> _Adapted:
    rank = module.r[adapter_name]
    return _Adapted(name.removeprefix("base_model.model."), rank, module.scaling[adapter_name] * rank)


def _config(model: PeftModel, adapter_name: str, experts: list[_Adapted], linears: list[_Adapted]) -> Any:
    """A LoraConfig that makes stock PEFT give each module the rank and the scaling that it has here."""
    of_expert: dict[str, _Adapted] = {}
    for entry in experts:
        if of_expert.setdefault(entry.name, entry) != entry:
            raise ArgumentError(
                f"model: expected one rank and scaling for the experts' {entry.name} in all layers, got "
                f"{of_expert[entry.name]} and {entry}"
            )
    # Loading takes the rank of the fused gate and up from r itself, twice, whatever rank_pattern says.
    default = of_expert.get("gate_proj") or of_expert["down_proj"]
    config = copy.deepcopy(model.peft_config[adapter_name])
    config.r, config.lora_alpha = default.rank, _plain(default.alpha)
    # alpha holds the scaling as it is; with rslora, doubling the rank of gate and up would change it.
    config.use_rslora = False
    config.rank_pattern, config.alpha_pattern = {}, {}
    if isinstance(config.target_modules, str):
        config.target_modules = {linear.name for linear in linears}
    config.target_modules = sorted({*(config.target_modules or ()), *of_expert})
    config.target_parameters = None
    config.inference_mode = True
    config.init_lora_weights = True
    for entry in [*of_expert.values(), *linears]:
        if entry.rank != default.rank or entry.alpha != default.alpha:
            pattern = re.escape(entry.name)
            config.rank_pattern[pattern] = entry.rank
            config.alpha_pattern[pattern] = _plain(entry.alpha)
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None) or None
    return config


def _plain(alpha: float) -> float:
    return int(alpha) if float(alpha).is_integer() else alpha


def _auto_mapping(model: PeftModel, config: Any) -> dict[str, str] | None:
    if config.task_type is not None:
        return None
    base = type(model.get_base_model())
    return {"base_model_class": base.__name__, "parent_library": base.__module__}


def _write(
    directory: Path, state: dict[str, torch.Tensor], config: Any, auto_mapping: dict[str, str] | None
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".adapter-", dir=directory))
    try:
        save_file(state, work / _WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(work), auto_mapping_dict=auto_mapping)
        for name in (_WEIGHTS, _CONFIG):
            os.replace(work / name, directory / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory
