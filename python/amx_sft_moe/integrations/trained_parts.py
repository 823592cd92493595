"""What of a model trains, by part: routed experts, router, shared experts, attention, ...

Parts are told apart by where parameters lie and by their shapes. Routed experts are a module with two or more
stacked parameters ``[E, ..., ...]`` of its own (transformers' fused experts, ours), or modules numbered below
one called ``experts``. What stands beside them in their block is the router where it has a matrix of E rows,
and the shared experts where it is called that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amx_sft_moe.nn import SftMoeExperts

ROUTED = "routed experts"
SHARED = "shared experts"
ROUTER = "router"
ATTENTION = "attention"
EMBEDDINGS = "embeddings and head"
DENSE = "dense MLP"
OTHER = "other"

# Levels of names that adapters put between a module and what it wraps.
_WRAPPING = re.compile(
    r"^base_model\.model\.|\.base_layer(?=\.|$)|\.(modules_to_save\.[^.]+|original_module)(?=\.|$)"
)
_PEFT_LORA = re.compile(r"^(?P<layer>.*)\.lora_(?:embedding_)?[AB]\.(?P<adapter>[^.]+)(?:\.weight)?$")
_OUR_LORA = re.compile(r"^(?P<target>\w+)_lora_[ab]$")
_NUMBERED_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.\d+\.(?P<target>.+)$")


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of one layer."""

    name: str
    module: nn.Module  # below whatever wraps it
    num_experts: int
    fused: bool


@dataclass(frozen=True)
class PartKey:
    """Where parameters lie and how they train; ``how`` is empty where they do not."""

    group: str
    target: str
    how: str
    dtype: torch.dtype


@dataclass
class Part:
    """Parameters of one kind, over all layers."""

    key: PartKey
    modules: set[str] = field(default_factory=set)
    parameters: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class LoraOfExperts:
    """Ranks of one layer's active adapters together, by projection."""

    gate: int = 0
    up: int = 0
    down: int = 0


def unwrapped(name: str) -> str:
    """A name as the model without adapters has it."""
    return _WRAPPING.sub("", name)


def routed_experts(model: nn.Module) -> list[RoutedExperts]:
    """Routed experts by layer, in the model's order."""
    found: dict[str, RoutedExperts] = {}
    for name, module in model.named_modules():
        stacked = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
        if len(stacked) >= 2 and len({p.shape[0] for p in stacked}) == 1 and _are_experts(module, stacked):
            name = unwrapped(name)
            found[name] = RoutedExperts(name, module, stacked[0].shape[0], fused=True)
        elif isinstance(module, nn.ModuleList) and name.endswith(".experts"):
            name = unwrapped(name)
            found[name] = RoutedExperts(name, module, len(module), fused=False)
    return list(found.values())


def _are_experts(module: nn.Module, stacked: list[nn.Parameter]) -> bool:
    # One of each is a layer's only expert, or what an image encoder adds to its patches.
    return stacked[0].shape[0] > 1 or "down_proj" in module._parameters


def parts_of(model: nn.Module, experts: list[RoutedExperts]) -> list[Part]:
    """All parameters of the model, each once, by part; trained ones first."""
    modules = dict(model.named_modules())
    groups = _Groups(model, experts)
    parts: dict[PartKey, Part] = {}
    for name, parameter in model.named_parameters():
        target, how = _target(name, modules)
        group = groups.of(name)
        key = PartKey(group, target, how if parameter.requires_grad else "", parameter.dtype)
        part = parts.setdefault(key, Part(key))
        lora = _PEFT_LORA.match(name)
        part.modules.add(unwrapped(lora["layer"]) if lora else _module_of(unwrapped(name)))
        part.parameters += parameter.numel()
        part.bytes += parameter.numel() * parameter.element_size()
    order = [ROUTED, ROUTER, SHARED, DENSE, ATTENTION, EMBEDDINGS, OTHER]
    return sorted(parts.values(), key=lambda p: (not p.key.how, order.index(p.key.group), p.key.target))


def lora_ranks(experts: RoutedExperts, model: nn.Module) -> LoraOfExperts:
    """Summed ranks of the active adapters of fused experts; gate and up each have that of ``gate_up_proj``."""
    ranks = dict.fromkeys(("gate", "up", "gate_up", "down"), 0)
    for name, parameter in experts.module._parameters.items():
        projection = name.removesuffix("_lora_a")
        if parameter is not None and projection in ranks and projection != name:
            ranks[projection] += parameter.shape[1]
    for wrapper, applied in _applied_adapters(experts, model):
        target = wrapper.parameter_name.removesuffix("_proj")
        ranks[target] = sum(wrapper.r[adapter] for adapter in applied)
    return LoraOfExperts(ranks["gate"] + ranks["gate_up"], ranks["up"] + ranks["gate_up"], ranks["down"])


def bytes_turned(experts: RoutedExperts, model: nn.Module) -> int:
    """Bytes of the applied factors that PEFT keeps with the expert last, B ``[out, r E]`` of each projection,
    and of their gradients where they train.

    Of several adapters the call has one joined factor, which is laid out anew.
    """
    factors = [
        wrapper.lora_B[applied[0]].weight
        for wrapper, applied in _applied_adapters(experts, model)
        if len(applied) == 1 and experts.num_experts > 1
    ]
    return sum(factor.numel() * factor.element_size() * (1 + factor.requires_grad) for factor in factors)


def _applied_adapters(experts: RoutedExperts, model: nn.Module) -> Iterator[tuple[Any, list[str]]]:
    """PEFT's wrappers of fused experts' parameters, each with the names of its active adapters."""
    for name, module in model.named_modules():
        wrapper: Any = module
        is_wrapper = isinstance(getattr(module, "parameter_name", None), str) and hasattr(
            module, "active_adapters"
        )
        if is_wrapper and unwrapped(name) == experts.name:
            yield wrapper, [adapter for adapter in wrapper.active_adapters if adapter in wrapper.r]


class _Groups:
    """The part that a parameter belongs to, by its name."""

    def __init__(self, model: nn.Module, experts: list[RoutedExperts]) -> None:
        self._experts = {one.name for one in experts}
        self._beside = {one.name.rpartition(".")[0]: one.num_experts for one in experts}
        self._routers = set(self._find_routers(model))
        self._embeddings = set(_embeddings(model))

    def of(self, name: str) -> str:
        name = unwrapped(name)
        parents = list(_parents(name))
        if any(parent in self._experts for parent in parents) or _NUMBERED_EXPERT.match(name):
            return ROUTED
        if any(parent in self._routers for parent in parents):
            return ROUTER
        words = name.lower().split(".")
        if any("shared" in word and "expert" in word for word in words):
            return SHARED
        if any(("attn" in word or "attention" in word) and "norm" not in word for word in words):
            return ATTENTION
        if any(parent in self._embeddings for parent in parents):
            return EMBEDDINGS
        if any(word in ("mlp", "feed_forward", "ffn") for word in words) and "norm" not in name.lower():
            return DENSE
        return OTHER

    def _find_routers(self, model: nn.Module) -> Iterator[str]:
        for name, parameter in model.named_parameters():
            if parameter.dim() != 2 or "lora_" in name:
                continue
            module = _module_of(unwrapped(name))
            block, _, leaf = module.rpartition(".")
            if block not in self._beside and ("router" in block or "gate" in block):
                # The router holds its matrix in a layer of its own.
                module = block
                block, _, leaf = module.rpartition(".")
            if parameter.shape[0] == self._beside.get(block) and leaf and "shared" not in leaf:
                yield module


def _embeddings(model: nn.Module) -> Iterator[str]:
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    try:
        head = get_head()
    except (AttributeError, NotImplementedError):  # a model without a head
        head = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or (head is not None and module is head):
            yield unwrapped(name)


def _target(name: str, modules: dict[str, nn.Module]) -> tuple[str, str]:
    """What a parameter belongs to within its part, and how it trains where it does."""
    plain = unwrapped(name)
    if lora := _PEFT_LORA.match(name):
        layer: Any = modules[lora["layer"]]
        adapter = lora["adapter"]
        target = getattr(layer, "parameter_name", None) or _leaf(unwrapped(lora["layer"]))
        how = f"LoRA r={layer.r[adapter]}, scaling {layer.scaling[adapter]:.4g}"
        return target, how if adapter == "default" else f"{how} ({adapter})"
    layer = modules.get(_module_of(name))
    if (lora := _OUR_LORA.match(_leaf(plain))) and isinstance(layer, SftMoeExperts):
        scaling = 1.0 if layer.lora_alpha is None else layer.lora_alpha / layer.lora_rank
        return f"{lora['target']}_proj", f"LoRA r={layer.lora_rank}, scaling {scaling:.4g}"
    if expert := _NUMBERED_EXPERT.match(plain):
        return expert["target"].removesuffix(".weight"), _way(name, modules)
    module, leaf = _module_of(plain), _leaf(plain)
    return (_leaf(module) if leaf in ("weight", "bias") else leaf), _way(name, modules)


def _way(name: str, modules: dict[str, nn.Module]) -> str:
    if ".modules_to_save." in name:
        return "full (a copy)"
    for parent in filter(None, _parents(name)):
        if hasattr(modules.get(parent), "base_layer") and not name.startswith(f"{parent}.base_layer"):
            return f"adapter {type(modules[parent]).__name__}"
    return "full"


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parents(name: str) -> Iterator[str]:
    """Names of the modules that a parameter lies in, the innermost first, and last ``""``, the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_within(name: str, outer: str) -> bool:
    """Whether ``name`` is the module ``outer`` or lies in it; ``""`` is the whole model."""
    return not outer or (name + ".").startswith(outer + ".")
