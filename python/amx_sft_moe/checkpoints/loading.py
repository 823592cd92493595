"""Models from local checkpoints whose expert weights stay in their files, mapped into memory."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

import amx_sft_moe
from amx_sft_moe.checkpoints import transposed
from amx_sft_moe.checkpoints.dense import DenseDtype, cast_dense, dense_dtype_of, torch_multiplies_bf16
from amx_sft_moe.checkpoints.files import CheckpointFiles, require_folder
from amx_sft_moe.checkpoints.plan import Plan, make_plan, routed_experts
from amx_sft_moe.errors import ArgumentError, cause_of
from amx_sft_moe.integrations.mapped_experts import (
    MappedStack,
    as_parameter,
    leave_out_of_data_parallel,
    mapped_bytes,
    refuse_casts,
    refuse_merging,
)
from amx_sft_moe.paths import given_directory

logger = logging.getLogger("amx_sft_moe")

_FLOATS = (torch.bfloat16, torch.float32)


def load_model(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    dense_dtype: DenseDtype = None,
    experts_implementation: str = "amx_sft_moe",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """A causal language model of a local safetensors checkpoint, its routed experts left in the mapped files.

    Works for every architecture of transformers whose experts go by its ``experts_implementation`` and have a
    gate (Nemotron-H's have none). Which tensor belongs where is read from transformers' own conversion rules:

    - one tensor per expert (``experts.0.gate_proj.weight``): used as they lie. The model's stacked parameters
      are frozen and take no memory; what they can and cannot do is said at
      :class:`amx_sft_moe.integrations.mapped_experts.MappedStack`;
    - fused ``[E, 2I, H]``, ``[E, H, I]``: mapped as they lie, ordinary parameters;
    - fused ``[E, in, out]`` (gpt-oss), in bf16, fp32 or mxfp4: written once, in the other orientation and in
      bf16 where it was mxfp4, into ``cache_dir``, expert by expert with a progress bar, then mapped. An
      interrupted conversion goes on where it was; a changed checkpoint is converted anew.

    Everything else is loaded by transformers. Where a file's dtype is not the one asked for, experts lie at
    odd addresses of a file, or are made by rules other than stacking, they are loaded into memory too, and a
    warning says why. Another warning says that a PEFT adapter beside the checkpoint is not applied, as
    ``from_pretrained`` would do.

    The model refers to the files as long as it lives: do not overwrite them.

    Args:
        directory: with ``config.json`` and ``model.safetensors`` or its index and shards.
        dtype: torch.bfloat16 or torch.float32; ``None``: that of the experts in the files, bfloat16 for mxfp4.
        dense_dtype: of everything but the routed experts; ``None``: ``dtype``. torch.float32 beside bfloat16
            experts makes attention many times faster on CPUs without AVX512, where torch has no fast bfloat16
            products, and takes twice the memory; ``"auto"`` does so on such CPUs. There ``None`` warns.
        experts_implementation: a registered name; ``"amx_sft_moe"`` is registered with default options if it is
            not yet.
        cache_dir: for experts in another orientation; ``None``: the folder ``amx_sft_moe-experts`` of
            ``directory``.
        progress: whether a one-time conversion shows a bar on standard error.
        options: go to ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        ArgumentError: no such checkpoint; a shard missing or cut off, an expert or another weight missing; an
            architecture without routed experts, or with experts without a gate; a quantisation other than
            mxfp4; no space for ``cache_dir``; a ``device_map`` with a module on disk.
        TypeError: another ``dtype``, or one of ``options`` that this function sets itself or that names other
            files (``state_dict``, ``subfolder``, ...).
    """
    _require_options(dtype, options)
    directory = given_directory("directory", directory)
    if cache_dir is not None:
        cache_dir = given_directory("cache_dir", cache_dir)
    config = read_config(directory)
    if experts_implementation == "amx_sft_moe" and experts_implementation not in ALL_EXPERTS_FUNCTIONS:
        amx_sft_moe.register()
    files = CheckpointFiles(directory)
    meta = meta_model(config, directory)
    plan = make_plan(meta, files)
    dtype = _dtype_of(plan, files, config) if dtype is None else dtype
    dense = dense_dtype_of(dense_dtype, dtype)
    _copy_the_unusable(plan, files, dtype)
    _warn(directory, plan, dtype, dense_dtype)
    stacks = {name: _stack(files, name, parts) for name, parts in plan.stacked.items()}
    conversions = [transposed.of_transposed(files, *item) for item in plan.transposed.items()]
    conversions += [transposed.of_mxfp4(files, name, *pair) for name, pair in plan.mxfp4.items()]
    _require_shapes(directory, meta, _shapes(plan, files, stacks, conversions))
    state = _state(plan, files, stacks, dtype) | transposed.converted(files, conversions, cache_dir, progress)
    config = own_config(type(meta), config)
    model = _load(type(meta), config, directory, state, dtype, experts_implementation, options)
    for name, stack in stacks.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, as_parameter(stack))
    cast_dense(model, dtype, dense)
    # transformers keeps there what saving turns back.
    model._weight_conversions = [rule for rule in plan.rules if rule.was_used()]  # type: ignore[assignment]
    if stacks:
        refuse_merging()
        refuse_casts(model)
        leave_out_of_data_parallel(model)
        logger.info("%.1f GB of expert weights stay in %s", mapped_bytes(model) / 1e9, directory)
    return model


def _require_options(dtype: torch.dtype | None, options: Mapping[str, Any]) -> None:
    if dtype is not None and dtype not in _FLOATS:
        raise TypeError(f"dtype: expected torch.bfloat16 or torch.float32, got {dtype}")
    if taken := sorted({"config", "output_loading_info", "state_dict", "torch_dtype"} & options.keys()):
        raise TypeError(
            f"options: expected none that load_model sets itself (dtype=, ...), got {', '.join(taken)}"
        )
    if other := sorted({"subfolder", "variant", "revision"} & options.keys()):
        raise TypeError(f"options: expected the files of directory itself, got {', '.join(other)}")
    _refuse_disk(options.get("device_map"))


def _refuse_disk(device_map: object) -> None:
    places = device_map if isinstance(device_map, Mapping) else {"": device_map}
    for module, place in places.items():
        if place == "disk":
            raise ArgumentError(
                f"device_map: expected no module on disk, got {module!r}: experts stay in their files, "
                "which take no memory that the system could not have back"
            )


def _warn(directory: Path, plan: Plan, dtype: torch.dtype, dense_dtype: DenseDtype) -> None:
    """Says what is not as one may expect of files that are mapped."""
    if (directory / ADAPTER_CONFIG_NAME).is_file():
        logger.warning(
            "%s lies beside the checkpoint and is not applied, as from_pretrained would do: "
            "PeftModel.from_pretrained(model, directory) does",
            directory / ADAPTER_CONFIG_NAME,
        )
    if dense_dtype is None and dtype == torch.bfloat16 and not torch_multiplies_bf16():
        logger.warning(
            "torch multiplies bfloat16 slowly on this CPU (no AVX512): dense_dtype=torch.float32 is faster, in "
            "twice the memory for everything but the experts"
        )
    for reason, parameters in _by_reason(plan.copied).items():
        rest = f" and {len(parameters) - 1} more expert weights" if len(parameters) > 1 else ""
        logger.warning("%s%s loaded into memory, not mapped: %s", parameters[0], rest, reason)
    if plan.mxfp4 and dtype != torch.bfloat16:
        logger.warning(
            "%s and %d more expert weights loaded into memory, not mapped: mxfp4 is written as bfloat16, "
            "not %s",
            next(iter(plan.mxfp4)),
            len(plan.mxfp4) - 1,
            dtype,
        )


def _shapes(
    plan: Plan,
    files: CheckpointFiles,
    stacks: Mapping[str, MappedStack],
    conversions: list[transposed.Conversion],
) -> dict[str, tuple[int, ...]]:
    """Of the parameters that the files make, where the plan tells."""
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {one.parameter: (one.shape[0], one.shape[2], one.shape[1]) for one in conversions}
    shapes |= {target: files.shape(name) for name, target in plan.others.items() if target}
    shapes |= {name: files.shape(source) for name, source in plan.fused.items()}
    return shapes | {name: tuple(stack.shape) for name, stack in stacks.items()}


def _state(
    plan: Plan, files: CheckpointFiles, stacks: Mapping[str, MappedStack], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What transformers loads, but for what is converted."""
    # What is stacked or converted is copied then; what becomes a parameter as it lies has to be aligned.
    state = {
        name: files.aligned(name) if target else files.tensor(name) for name, target in plan.others.items()
    }
    state |= {name: files.aligned(source) for name, source in plan.fused.items()}
    # Stand in for the stacks while transformers loads: views of one number, which take no memory either.
    nothing = torch.tensor(float("nan"), dtype=dtype)
    return state | {name: nothing.expand(stack.shape) for name, stack in stacks.items()}


def read_config(directory: str | os.PathLike[str]) -> PreTrainedConfig:
    """The configuration of a local checkpoint with weights that can be used.

    A ``model_type`` that transformers does not know, beside an ``architectures`` that it does (Kimi K2 is a
    DeepSeek-V3), is read as that architecture's.

    Raises:
        ArgumentError: no readable ``config.json``, an unknown architecture, or a quantisation other than mxfp4.
    """
    directory = given_directory("directory", directory)
    require_folder(directory)
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: expected a configuration, got: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: expected JSON, got: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("quantization_config") or {}, dict):
        raise ArgumentError(f"{path}: expected a JSON object, quantization_config too, got {str(raw)[:80]}")
    quantization = raw.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if quantization and method != "mxfp4":
        raise ArgumentError(
            f"{path}: expected weights in bfloat16, float32 or mxfp4, got quant_method {method!r}; write a "
            "bfloat16 copy first, for fp8 by from_pretrained(..., dtype=torch.bfloat16, "
            "quantization_config=FineGrainedFP8Config(dequantize=True)) and save_pretrained"
        )
    try:
        # Without the last argument transformers may ask at the terminal whether to run code from there.
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' own checks of a configuration raise what they like
        known = config_class_of(raw)
        if known is None:
            raise ArgumentError(
                f"{path}: expected a model that transformers {transformers.__version__} knows, got model_type "
                f"{raw.get('model_type')!r}: {cause_of(error)}"
            ) from error
        try:
            config = known.from_dict(without_type(raw))
        except Exception as reason:
            raise ArgumentError(
                f"{path}: expected the configuration of a {known.__name__}, got one that transformers refuses: "
                f"{cause_of(reason)}"
            ) from reason
    if quantization:
        del config.quantization_config
    return config


def config_class_of(raw: Mapping[str, Any]) -> Any:
    """The class of configurations of the architecture that ``config.json`` names; ``None``: transformers has
    none of that name."""
    architecture = getattr(transformers, (raw.get("architectures") or [""])[0], None)
    return getattr(architecture, "config_class", None)


def without_type(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``config.json`` is for another class than the one it names, or than code beside it has."""
    return {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}


def own_config(architecture: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """What a model class is made of: the whole configuration or, where it is a class for text alone and the
    configuration one for text and images, the part for text. The rule is AutoModelForCausalLM's."""
    text = config.sub_configs.get("text_config")
    return config.get_text_config() if text is not None and text is architecture.config_class else config


def meta_model(config: PreTrainedConfig, directory: str | os.PathLike[str]) -> PreTrainedModel:
    """The model without memory for its weights.

    ArgumentError where it cannot be built or has no routed experts.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise ArgumentError(
            f"{directory}: expected a causal language model, got {config.model_type!r}: {cause_of(error)}"
        ) from error
    except Exception as error:  # the model's own code raises what it likes for a value that it does not know
        raise ArgumentError(
            f"{Path(directory) / 'config.json'}: expected a configuration of which {config.model_type!r} can "
            f"be made, got {cause_of(error)}"
        ) from error
    if next(routed_experts(model), None) is None:
        raise ArgumentError(
            f"{directory}: expected routed experts (gate_up_proj and down_proj of 3 dimensions, run "
            f"by transformers' experts_implementation), got none in this {config.model_type!r} model"
        )
    return model


def _dtype_of(plan: Plan, files: CheckpointFiles, config: PreTrainedConfig) -> torch.dtype:
    for parameter in (*plan.stacked, *plan.fused, *plan.transposed):
        found = files.dtype(plan.names(parameter)[0])
        return found if found in _FLOATS else torch.bfloat16
    return config.dtype if config.dtype in _FLOATS else torch.bfloat16


def _require_shapes(directory: Path, meta: PreTrainedModel, shapes: dict[str, tuple[int, ...]]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in meta.state_dict().items()}
    for name, shape in shapes.items():
        if shape != expected.get(name, shape):
            raise ArgumentError(
                f"{directory}: {name}: expected {list(expected[name])} by config.json, got {list(shape)}"
            )


def _by_reason(copied: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for parameter, reason in copied.items():
        found.setdefault(reason, []).append(parameter)
    return found


def _copy_the_unusable(plan: Plan, files: CheckpointFiles, dtype: torch.dtype) -> None:
    """Leaves to transformers what cannot be used as it lies."""
    for group in (plan.stacked, plan.fused, plan.transposed):
        for parameter in list(group):
            names = plan.names(parameter)
            kinds = {files.dtype(name) for name in names}
            if kinds != {dtype}:
                reason = f"the files hold {', '.join(sorted(map(str, kinds)))}, not {dtype}"
            elif group is not plan.transposed and (odd := _unaligned(names, files)):
                reason = f"{odd} does not begin at a multiple of {dtype.itemsize} bytes in its file"
            else:
                continue
            plan.copied[parameter] = reason
            if group is plan.fused and kinds == {dtype}:
                continue  # a copy, but as it lies
            plan.others |= dict.fromkeys(names, "")
            del group[parameter]


def _unaligned(names: list[str], files: CheckpointFiles) -> str | None:
    return next((name for name in names if not files.is_aligned(name)), None)


def _stack(files: CheckpointFiles, parameter: str, parts: list[list[str]]) -> MappedStack:
    return MappedStack([[files.tensor(name) for name in part] for part in parts], parameter)


def require_all_weights(directory: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """ArgumentError where transformers' report of loading misses a weight, which is then drawn at random."""
    if lost := sorted(report["missing_keys"]):
        raise ArgumentError(
            f"{directory}: expected all weights of {type(model).__name__}, got no {lost[0]}"
            + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
        )


def _load(
    architecture: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: Path,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
    experts_implementation: str,
    options: dict[str, Any],
) -> PreTrainedModel:
    if (directory / "generation_config.json").is_file():
        try:
            found = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as reason:
            raise ArgumentError(f"{directory}: expected a readable generation_config.json: {reason}") from None
        options = {"generation_config": found, **options}
    loaded: Any = architecture.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        experts_implementation=experts_implementation,
        output_loading_info=True,
        **options,
    )
    model, report = loaded
    require_all_weights(directory, model, report)
    # What PEFT writes into an adapter as its base.
    model.config.name_or_path = model.name_or_path = str(directory)
    return model
