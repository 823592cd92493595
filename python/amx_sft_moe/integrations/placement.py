"""Models whose experts stay in CPU memory wherever the rest of them goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.integrations import experts_hook
from amx_sft_moe.integrations.trained_parts import is_within, routed_experts, unwrapped
from amx_sft_moe.nn import SftMoeExperts

_Conversion = Callable[[torch.Tensor], torch.Tensor]


def keep_experts_on_cpu(model: nn.Module) -> None:
    """Has the routed experts of ``model``, and LoRA on them, stay in CPU memory wherever it is moved.

    ``model.to("cuda")``, and what calls it (the Trainer, accelerate), then moves attention, router, shared
    experts, embeddings and head. Activations come to the experts and go back by themselves. Experts that are
    elsewhere when this is called come back. Conversions to another dtype reach them as before. Adapters may be
    made before or after; a parameter stays the one that an optimizer knows. Idempotent.

    For one process with one GPU: DistributedDataParallel refuses parameters on devices of two types, and
    DataParallel, which the Trainer takes where it sees several GPUs, copies modules to each.

    Args:
        model: whose experts all run here, through :func:`amx_sft_moe.register` or as
            :class:`amx_sft_moe.nn.SftMoeExperts`.

    Raises:
        ArgumentError: no routed experts below ``model``, or some that run elsewhere: their weights would be in
            CPU memory, and their activations not. Nothing is changed then.
    """
    modules = dict(model.named_modules())
    found = {one.name: one.module for one in routed_experts(model)}
    for name, module in found.items():
        if reason := _why_elsewhere(module):
            raise ArgumentError(f"keep_experts_on_cpu: {name}: {reason}")
    names = [name for name in modules if name and unwrapped(name) in found]
    outermost = [name for name in names if not any(is_within(name, other) for other in names if other != name)]
    if not outermost:
        raise ArgumentError(
            "keep_experts_on_cpu: expected a model with routed experts in it, got a "
            f"{type(model).__name__} with none"
        )
    for name in outermost:
        block, _, leaf = name.rpartition(".")
        _stay_below(modules[block], leaf)
        modules[name].to("cpu")


def _why_elsewhere(module: nn.Module) -> str | None:
    if isinstance(module, SftMoeExperts):
        return None
    if not experts_hook.is_ours(module):
        config = getattr(module, "config", None)
        return (
            "expected experts_implementation='amx_sft_moe', or another name given to register(), got "
            f"{type(module).__name__} with {getattr(config, '_experts_implementation', None)!r}"
        )
    return experts_hook.why_not(module)


def _stay_below(block: nn.Module, name: str) -> None:
    kept = block.__dict__.get("_apply")
    if not isinstance(kept, _KeepsChildren):
        kept = _KeepsChildren(block)
        block._apply = kept  # type: ignore[method-assign]
    kept.names.add(name)


class _KeepsChildren:
    """``nn.Module._apply`` of one block, through which every move and conversion of a module goes. Its children
    of these names are converted and not moved, whatever wraps them by then.

    Knows its block weakly, so that what the block holds dies with it; copies and pickles have one of their own.
    """

    def __init__(self, block: nn.Module, names: set[str] | None = None) -> None:
        self._block = weakref.ref(block)
        self.names = set() if names is None else names

    def __call__(self, fn: _Conversion, recurse: bool = True) -> nn.Module:
        block: Any = self._block()
        if recurse:
            for name, child in block.named_children():
                child._apply(_staying(fn) if name in self.names else fn)
        return type(block)._apply(block, fn, recurse=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> _KeepsChildren:
        return _KeepsChildren(memo[id(self._block())], set(self.names))

    def __reduce__(self) -> tuple[Any, ...]:
        return _KeepsChildren, (self._block(), self.names)


def _staying(fn: _Conversion) -> _Conversion:
    """``fn`` without what it does to a tensor's device."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        probe = fn(torch.empty(0, dtype=tensor.dtype))
        return fn(tensor) if probe.device.type == "cpu" else tensor.to(probe.dtype)

    return convert
