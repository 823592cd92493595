"""Models whose experts stay in CPU memory wherever the rest of them goes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.integrations import hook_in_use
from amx_sft_moe.integrations.trained_parts import is_within, routed_experts, unwrapped
from amx_sft_moe.nn import SftMoeExperts

_Conversion = Callable[[torch.Tensor], torch.Tensor]
_STAY = "_amx_sft_moe_stay"  # attribute of a block: names of the children that stay


def keep_experts_on_cpu(model: nn.Module) -> None:
    """Has the routed experts of ``model``, and LoRA on them, stay in CPU memory wherever it is moved.

    ``model.to("cuda")``, and what calls it (the Trainer, accelerate), then moves attention, router, shared
    experts, embeddings and head. Activations come to the experts and go back by themselves. Experts that are
    elsewhere when this is called come back. Conversions to another dtype reach them as before. Adapters may be
    made before or after; a parameter stays the one that an optimizer knows. Idempotent.

    For one process with one GPU: DistributedDataParallel refuses parameters on devices of two types, and so
    does DataParallel, which the Trainer takes where it sees several GPUs (``CUDA_VISIBLE_DEVICES=0`` shows it
    one).

    Args:
        model: whose experts all run here, through :func:`amx_sft_moe.register` or as
            :class:`amx_sft_moe.nn.SftMoeExperts`. The modules that hold them get a class of the same name,
            derived from their own.

    Raises:
        ArgumentError: no routed experts below ``model``, or some that run elsewhere: their weights would be in
            CPU memory, and their activations not. Nothing is changed then.
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # each path: whichever is moved along
    found = {one.name: one.module for one in routed_experts(model)}
    for name, module in found.items():
        if reason := _why_elsewhere(module):
            raise ArgumentError(f"keep_experts_on_cpu: {name}: {reason}")
    own = {id(module) for module in found.values()}
    names = [name for name, module in modules.items() if unwrapped(name) in found or id(module) in own]
    outermost = [name for name in names if not any(is_within(name, other) for other in names if other != name)]
    if not outermost or "" in outermost:
        what = "is one layer's experts itself" if outermost else "has none"
        raise ArgumentError(
            f"keep_experts_on_cpu: expected a model with routed experts in it, got a {type(model).__name__}, "
            f"which {what}"
        )
    for name in outermost:
        block, _, leaf = name.rpartition(".")
        _stay_below(modules[block], leaf)
    for name in outermost:
        modules[name]._apply(_come_back)


def _why_elsewhere(module: nn.Module) -> str | None:
    if isinstance(module, SftMoeExperts):
        return None
    hook = hook_in_use()
    if hook is None or not hook.is_ours(module):
        config = getattr(module, "config", None)
        return (
            "expected experts_implementation='amx_sft_moe', or another name given to register(), got "
            f"{type(module).__name__} with {getattr(config, '_experts_implementation', None)!r}"
        )
    why: str | None = hook.why_not(module)
    return why


def _come_back(tensor: torch.Tensor) -> torch.Tensor:
    # What has no memory yet cannot be moved; it gets some on the CPU (_staying).
    return tensor if tensor.device.type == "meta" else tensor.to("cpu")


def _stay_below(block: nn.Module, name: str) -> None:
    if not isinstance(block, _KeepsChildren):
        cls: Any = type(block)  # whose metaclass has no types that functools.cache would take
        block.__class__ = _keeping(cls)
        block.__dict__[_STAY] = set()
    block.__dict__[_STAY].add(name)


class _KeepsChildren:
    """The first base of a block's class: its children of some names are converted and not moved, whatever wraps
    them by then."""

    def _apply(self: Any, fn: _Conversion, recurse: bool = True) -> nn.Module:
        """Every move and conversion of a module goes through this function of torch's."""
        if recurse:
            for name, child in self.named_children():
                child._apply(_staying(fn) if name in self.__dict__[_STAY] else fn)
        return super()._apply(fn, recurse=False)  # type: ignore[misc]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles name the class that it was before: this one has no place in a module."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _restored, (type(self).__mro__[2],), state


@functools.cache
def _keeping(cls: Any) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_KeepsChildren, cls), names)


def _restored(cls: Any) -> nn.Module:
    made = _keeping(cls)
    return made.__new__(made)


def _staying(fn: _Conversion) -> _Conversion:
    """``fn`` without what it does to a tensor's device."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":  # to_empty(), or torch's refusal to move what is not there
            moved = fn(tensor)
            return moved if moved.device.type == "meta" else torch.empty_like(moved, device="cpu")
        probe = fn(torch.empty(0, dtype=tensor.dtype, device="cpu"))
        return fn(tensor) if probe.device.type == "cpu" else tensor.to(probe.dtype)

    return convert
