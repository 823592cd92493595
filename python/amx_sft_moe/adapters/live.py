"""Saving the adapter of a model in memory in the serving format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper

from amx_sft_moe.adapters.adapter import PER_EXPERT, PREFIX, Adapter, Factors, Linear, is_doubled, plain_name
from amx_sft_moe.adapters.base import PARAMETERS, BaseModel, base_like
from amx_sft_moe.adapters.conversion import verify
from amx_sft_moe.adapters.files import (
    KT_MANIFEST,
    KT_WEIGHTS,
    PICKLED,
    replaced_directory,
    require_no_checkpoint,
)
from amx_sft_moe.adapters.formats import pairs_of, read_adapter, write_adapter
from amx_sft_moe.adapters.fusing import split_all
from amx_sft_moe.adapters.settings import require_plain_lora
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.integrations.adapters_in_use import NotUnderstoodError
from amx_sft_moe.integrations.peft_lora import delta_of
from amx_sft_moe.paths import given_directory

logger = logging.getLogger("amx_sft_moe")

_GATE_UP = "gate_up_proj"
_IN_ONE_PAIR = rf".*\.{_GATE_UP}"  # rank_pattern's key where PEFT itself has put gate and up into one pair


def save_per_expert(
    model: PeftModel, directory: str | os.PathLike[str], adapter_name: str | None = None
) -> Path:
    """Writes a LoRA adapter with one pair of matrices per expert and projection, and everything else it
    adapts.

    PEFT trains fused experts with one A for gate and up and stores all experts in one matrix, a file that
    inference servers drop or reject; this is the form they take (see
    :mod:`amx_sft_moe.adapters.per_expert`). ``PeftModel.from_pretrained(base_model, directory)`` reads it
    back from PEFT 0.20 on.

    The directory changes in one step: a reader or a crash sees all of the old files or all of the new.

    PEFT reads it with twice the rank for gate and up. Where that is trained on, so that the rank is needed, all
    of it is saved, and a warning says how to go on without doubling it each time.

    Args:
        model: a PEFT model with LoRA on ``gate_up_proj`` and / or ``down_proj`` of fused experts.
        directory: receives ``adapter_model.safetensors`` and ``adapter_config.json``; made if need be; an
            adapter there in any format is replaced, all other files stay. No directory of a checkpoint.
        adapter_name: which adapter; ``None``: the active one.

    Returns:
        The directory.

    Raises:
        ArgumentError: no adapted experts, something that this layout cannot say (the message tells what), or a
            checkpoint in ``directory``.
        StateError: what was written does not read as what was trained; ``directory`` is as it was.
        TypeError: ``model`` is no PeftModel.
    """
    if not isinstance(model, PeftModel):
        raise TypeError(f"model: expected a peft.PeftModel, got {type(model).__name__}")
    directory = given_directory("directory", directory)
    require_no_checkpoint("directory", directory)
    adapter_name = _adapter_of(model, adapter_name)
    base = base_like(model.get_base_model())
    adapter = _adapter(model, adapter_name, base)
    grown = _grown_rank(adapter)
    # An older adapter of another format there would be read with or instead of this one.
    with replaced_directory(directory, drop=(PICKLED, KT_WEIGHTS, KT_MANIFEST)) as work:
        lost, _ = write_adapter(adapter, base, PER_EXPERT, work, peft.__version__)
        verify(adapter, read_adapter(work, base)[0], exact=not lost)
    if lost:
        rest = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        logger.warning("%s: not what was trained to the last bit: %s%s", directory, lost[0], rest)
    if grown:
        logger.warning(
            "%s: gate and up of rank %d: PEFT has put those of rank %d into one pair of twice that, and "
            "training has filled it. To train on without doubling it again, load what PEFT's own "
            "save_pretrained writes, or what `adapter convert --to peft-fused` makes of this adapter",
            directory,
            grown,
            grown // 2,
        )
    return directory


def _grown_rank(adapter: Adapter) -> int:
    """Twice the rank that gate and up had before PEFT put them into one pair, where they have it now; else 0.

    As long as B is two blocks, as before the first step, they are found again with their own rank.
    """
    config = adapter.config
    rank = (config.get("rank_pattern") or {}).get(_IN_ONE_PAIR)
    by_peft = rank == 2 * config["r"] and _GATE_UP in (config.get("target_parameters") or ())
    ranks = {parts["gate_proj"].rank for parts in adapter.experts.values() if "gate_proj" in parts}
    return rank if by_peft and rank in ranks else 0


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


def _adapter(model: PeftModel, adapter_name: str, base: BaseModel) -> Adapter:
    adapter = Adapter(_config(model, adapter_name))
    require_plain_lora(adapter.config, "model")
    whole: dict[tuple[str, str], Factors] = {}
    wrappers = set()
    for name, module, parameter, factors in _adapted_experts(model, adapter_name, base):
        wrappers.add(name)
        whole[module, parameter] = factors
    adapter.experts = split_all(whole, base)
    if not adapter.experts:
        raise ArgumentError(f"model: expected LoRA on fused experts in adapter {adapter_name!r}, got none")
    scalings = {
        name.removeprefix(PREFIX): module.scaling[adapter_name]
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and name not in wrappers and adapter_name in module.r
    }
    state = get_peft_model_state_dict(model, adapter_name=adapter_name)
    state = {key: tensor.detach().cpu() for key, tensor in state.items()}
    pairs, rest = pairs_of(state)
    for name, sides in pairs.items():
        if name in scalings:
            adapter.linears[name] = Linear(sides["A"], sides["B"], scalings[name])
    if unknown := [key for key in rest if "lora_" in key]:
        raise ArgumentError(
            f"model: expected LoRA on linear layers and experts only, got {unknown[0]}: loaders of this layout "
            "would leave it out (PEFT's own save_pretrained keeps it)"
        )
    adapter.others = {plain_name(key): state[key] for key in rest if not is_doubled(key, state)}
    return adapter


def _adapted_experts(
    model: PeftModel, adapter_name: str, base: BaseModel
) -> Iterator[tuple[str, str, str, Factors]]:
    """``(module name, experts module in the base model, parameter, factors)`` of each wrapped parameter."""
    for name, module in model.named_modules():
        if not isinstance(module, ParamWrapper) or adapter_name not in module.lora_A:
            continue
        experts = plain_name(name)
        if module.parameter_name == "weight" and experts not in base.layouts:
            continue  # a router's: one matrix, like any linear layer
        if module.parameter_name not in PARAMETERS:
            raise ArgumentError(
                f"model: expected adapted parameters {PARAMETERS} of experts only, got "
                f"{experts}.{module.parameter_name}"
            )
        if getattr(module.get_base_layer(), "is_transposed", False):
            raise ArgumentError(
                f"model: {experts}.{module.parameter_name}: expected LoRA on a parameter [E, out, in], got a "
                "transposed one [E, in, out]: its adapter has no form per expert"
            )
        try:
            b, a, scaling = delta_of(module, adapter_name)
        except NotUnderstoodError as reason:
            raise ArgumentError(f"model: {experts}.{module.parameter_name}: {reason}") from None
        a, b = a.detach().cpu(), b.detach().cpu()
        yield name, experts, module.parameter_name, Factors(tuple(a.unbind(0)), tuple(b.unbind(0)), scaling)


def _config(model: PeftModel, adapter_name: str) -> dict[str, Any]:
    """The adapter's configuration as PEFT would save it."""
    config = model.peft_config[adapter_name].to_dict()
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    base = model.get_base_model()
    if config.get("base_model_name_or_path") is None:
        config["base_model_name_or_path"] = getattr(base, "name_or_path", None) or None
    if config.get("task_type") is None:
        config["auto_mapping"] = {
            "base_model_class": type(base).__name__,
            "parent_library": type(base).__module__,
        }
    return config
