"""The base model of an adapter, as transformers describes it: which modules hold experts, their shapes and
layout, and what each weight is called in a checkpoint.

Nothing here is a list of model names. The model is built on the meta device (no memory), its experts modules
are recognised by shape and flags, and the names on disk come from the rules by which transformers itself
loads and saves checkpoints.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from amx_sft_moe.adapters.files import read_json
from amx_sft_moe.errors import ArgumentError, cause_of
from amx_sft_moe.paths import given_directory

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PARAMETERS = ("gate_up_proj", "down_proj")
GATE_UP = PROJECTIONS[:2]


@dataclass(frozen=True)
class ExpertsLayout:
    """Shape and memory order of one experts module.

    ``gate_up_proj`` is ``[E, 2I, H]`` with the rows of gate first; ``interleaved``: gate and up alternate.
    ``transposed``: ``[E, H, 2I]`` and ``[E, I, H]``.
    """

    module: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    transposed: bool
    interleaved: bool

    def sizes(self, projection: str) -> tuple[int, int]:
        """``(out, in)`` of ``gate_proj``, ``up_proj``, ``down_proj`` or the fused ``gate_up_proj``."""
        h, i = self.hidden_size, self.intermediate_size
        return {"down_proj": (h, i), "gate_up_proj": (2 * i, h)}.get(projection, (i, h))

    def rows(self, projection: str) -> slice:
        """Where a projection's outputs lie among those of its fused parameter."""
        i = self.intermediate_size
        if projection == "down_proj":
            return slice(None)
        first = projection == "gate_proj"
        if self.interleaved:
            return slice(0 if first else 1, None, 2)
        return slice(0, i) if first else slice(i, None)


@dataclass(frozen=True)
class Place:
    """What a name stands for. ``name`` is the model's own parameter; for experts also which projection and,
    where there is one tensor per expert, which expert."""

    name: str
    module: str | None = None
    projections: tuple[str, ...] = ()
    expert: int | None = None


@dataclass
class BaseModel:
    """A model's configuration and what follows from it; see :func:`load_base`."""

    where: str
    config: Any
    model: Any  # a PreTrainedModel
    layouts: dict[str, ExpertsLayout] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """All entries of the model's ``state_dict``, on the meta device."""
        return self.model.state_dict()

    @cached_property
    def _rules(self) -> tuple[list[Any], list[Any]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules = get_model_conversion_mapping(self.model)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters

    @cached_property
    def as_causal_lm(self) -> BaseModel | None:
        """The same checkpoint as AutoModelForCausalLM loads it; ``None``: it is this class, or none.

        Of a model for text and images it can be the part for text alone, with names of its own.
        """
        try:
            model = _on_meta(self.config, causal_lm=True)
        except Exception:  # no causal language model; the model's own code raises whatever it likes
            return None
        return None if type(model) is type(self.model) else _described(self.where, self.config, model)

    def knows(self, key: str) -> bool:
        """Whether a checkpoint's key is a weight here; ``.weight`` of a module of fused experts is one too."""
        try:
            return key.removesuffix(".weight") in self.layouts or self.place_of(key).name in self.parameters
        except ArgumentError:
            return False

    def place_of(self, key: str) -> Place:
        """What a checkpoint's key (``...experts.3.w1.weight``) is in the model.

        Raises:
            ArgumentError: transformers converts this weight in a way that is not understood here.
        """
        from transformers.core_model_loading import apply_renamings, rename_source_key

        from amx_sft_moe.checkpoints.plan import expert_of

        renamings, converters = self._rules
        prefix = getattr(self.model, "base_model_prefix", "")
        name, pattern = rename_source_key(key, renamings, converters, prefix, self.parameters)
        module, _, parameter = name.rpartition(".")
        fused = module in self.layouts and parameter in PARAMETERS
        if pattern is None:
            return Place(name, module, _projections(parameter)) if fused else Place(name)
        rule = next(rule for rule in converters if pattern in rule.source_patterns)
        kinds = [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
        merges = [("MergeModulelist", 0)]
        expert = expert_of(pattern, apply_renamings(key, renamings))
        if fused and expert is not None and not self.layouts[module].transposed:
            if kinds == merges and len(rule.source_patterns) == 1:
                return Place(name, module, _projections(parameter), expert)
            if kinds == [*merges, ("Concatenate", 1)] and len(rule.source_patterns) == 2:
                if self.layouts[module].interleaved or parameter != "gate_up_proj":
                    raise ArgumentError(f"{key}: expected gate and up one after the other in {name}")
                return Place(name, module, (GATE_UP[rule.source_patterns.index(pattern)],), expert)
        raise ArgumentError(
            f"{key}: expected a weight that is loaded as it is or as one expert of {name}, got one that "
            f"transformers converts by {[kind for kind, _ in kinds]}"
        )

    @cached_property
    def names_on_disk(self) -> dict[tuple[str, str], list[str]]:
        """``(module, projection) -> E`` names without ``.weight``, where checkpoints hold one tensor per
        expert; empty where they hold fused ones."""
        from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

        fused = {
            f"{module}.{parameter}": self.parameters[f"{module}.{parameter}"]
            for module in self.layouts
            for parameter in PARAMETERS
        }
        found: dict[tuple[str, str], list[str]] = {}
        for key in sorted(revert_weight_conversion(self.model, fused), key=dot_natural_key):
            place = self.place_of(key)
            if place.module is None or place.expert is None or len(place.projections) != 1:
                continue
            names = found.setdefault((place.module, place.projections[0]), [])
            if place.expert == len(names):
                names.append(key.removesuffix(".weight"))
        return {
            place: names for place, names in found.items() if len(names) == self.layouts[place[0]].num_experts
        }

    @cached_property
    def names_taken_by_peft(self) -> frozenset[str]:
        """Last parts of names (``gate_proj`` ...) that stock PEFT takes for those of routed experts when they
        stand in ``target_modules``; empty for models where it does not (it knows them by a list)."""
        names = {found[0].rpartition(".")[2] for found in self.names_on_disk.values()}
        return frozenset(names) if self.parameters_found_by_peft(sorted(names), None) else frozenset()

    def parameters_found_by_peft(self, modules: Any, parameters: Any) -> frozenset[str] | None:
        """``target_parameters`` as PEFT has them once it has made those of ``target_modules`` that name experts
        of old into parameters; ``None``: the PEFT installed here, before 0.19, does not do that.

        Raises:
            ArgumentError: PEFT refuses these targets.
        """
        try:
            from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
        except ImportError:
            return None
        try:
            trial = LoraConfig(target_modules=modules, target_parameters=parameters)
            convert_peft_config_for_transformers(trial, self.model, None)
        except (ValueError, re.error, RecursionError) as error:  # gate_proj without up_proj, no expression
            raise ArgumentError(f"targets: PEFT refuses them: {cause_of(error)}") from error
        return frozenset(trial.target_parameters or ())

    @property
    def fused_by_peft(self) -> bool:
        """Whether stock PEFT fuses an adapter's experts while loading: it wants rules of the model type itself,
        which one for text and images can lack."""
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        return get_checkpoint_conversion_mapping(self.model.config.model_type) is not None

    def layout(self, module: str) -> ExpertsLayout:
        """The layout of an experts module, or an error that lists those there are."""
        if module not in self.layouts:
            raise ArgumentError(f"{module}: expected one of the experts modules {sorted(self.layouts)[:4]} ...")
        return self.layouts[module]


def load_base(where: str | os.PathLike[str]) -> BaseModel:
    """Reads a model's configuration; needs no weights and no network.

    Args:
        where: a directory with ``config.json``, or a name in the local Hugging Face cache.

    Raises:
        ArgumentError: no configuration there, or one that transformers does not know.
    """
    given_directory("base", where)
    where = os.fspath(where)
    config_file = Path(where) / "config.json"
    # "./x", "/x" and "~/x" are no names of the Hugging Face cache.
    is_path = Path(where).exists() or where.startswith((".", "/", "~"))
    if is_path and not config_file.is_file():
        missing = "" if Path(where).exists() else ", which does not exist"
        raise ArgumentError(f"base: expected a directory with config.json, got {where}{missing}")
    try:
        config = _config_of(where, config_file)
        model = _on_meta(config)
    except Exception as reason:
        # transformers, json and the model's own code raise whatever they like for a file that is not theirs.
        if not is_path and not _is_cached(where):
            raise ArgumentError(
                "base: expected a directory with config.json, or a name in the local Hugging Face cache, got "
                f"{where}: no such folder, and not in the cache"
            ) from None
        raise ArgumentError(
            f"base: expected the config.json of a model that transformers knows, got {where}: "
            + cause_of(reason)
        ) from None
    return _described(where, config, model)


def _config_of(where: str, config_file: Path) -> Any:
    """Of the architecture that the file names where its model type is another's (Kimi K2 is a DeepSeek-V3)."""
    from transformers import AutoConfig

    from amx_sft_moe.checkpoints.loading import config_class_of, without_type

    try:
        return AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except Exception:
        raw = read_json(config_file) if config_file.is_file() else {}
        known = config_class_of(raw)
        if known is None:
            raise
        return known.from_dict(without_type(raw))


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no name that a cache could have
        return False


def base_like(model: nn.Module) -> BaseModel:
    """The same for a transformers model in memory, adapted or not; its weights are not touched."""
    config = copy.deepcopy(model.config)
    return _described(getattr(model, "name_or_path", "") or "the model", config, _on_meta(config, type(model)))


def _described(where: str, config: Any, model: nn.Module) -> BaseModel:
    return BaseModel(where, config, model, {layout.module: layout for layout in _layouts(model)})


def _on_meta(config: Any, model_class: Any = None, *, causal_lm: bool = False) -> nn.Module:
    """The model without memory: of the class given, or of the one that the configuration names first, or
    (``causal_lm``, or it names none) as AutoModelForCausalLM makes it."""
    import transformers

    from amx_sft_moe.checkpoints.loading import own_config

    names = getattr(config, "architectures", None) or []
    if model_class is None and names and not causal_lm:
        model_class = getattr(transformers, names[0], None)
    with torch.device("meta"), _quiet("transformers"):
        if model_class is not None:
            return model_class(own_config(model_class, config))
        # Without the argument transformers may ask at the terminal whether to run code from elsewhere.
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _layouts(model: nn.Module) -> Iterator[ExpertsLayout]:
    for name, module in model.named_modules():
        shapes = {key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)}
        gate_up, down = shapes.get("gate_up_proj", ()), shapes.get("down_proj", ())
        flags = [getattr(module, flag, None) for flag in ("is_transposed", "is_concatenated", "has_gate")]
        if len(gate_up) != 3 or len(down) != 3 or None in flags or not flags[2]:
            continue
        transposed, concatenated = bool(flags[0]), bool(flags[1])
        experts, first, second = gate_up
        hidden, doubled = (first, second) if transposed else (second, first)
        intermediate = doubled // 2
        other = (experts, intermediate, hidden) if transposed else (experts, hidden, intermediate)
        if doubled % 2 == 0 and down == other:
            yield ExpertsLayout(name, experts, hidden, intermediate, transposed, not concatenated)


def _projections(parameter: str) -> tuple[str, ...]:
    return GATE_UP if parameter == "gate_up_proj" else (parameter,)
