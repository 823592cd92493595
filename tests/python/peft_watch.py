"""What is watched while PEFT's adapters run: memory of the size of the base weights, and the factors read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amx_sft_moe.autograd import LoraFactors
from amx_sft_moe.integrations import peft_lora
from amx_sft_moe.integrations.adapters_in_use import ActiveAdapters, lora_of
from amx_sft_moe.integrations.peft_lora import delta_of

VERSION = tuple(map(int, peft.__version__.split(".")[:2]))
# `make peft-versions` says which PEFT it means, so that the installed one is never taken for it.
EXPECTED_VERSION = os.environ.get("AMX_SFT_MOE_EXPECTED_PEFT", peft.__version__)


class LargeTensors(TorchDispatchMode):
    """Names of the operations that made a tensor of at least ``elements`` elements in memory of its own."""

    def __init__(self, elements: int, model: nn.Module) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._elements = elements
        self._of_model = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:  # of scratch memory too, which may be as large as what ran before needed
            return result
        for tensor in torch.utils._pytree.tree_leaves(result):
            large = isinstance(tensor, torch.Tensor) and tensor.numel() >= self._elements
            if large and tensor.untyped_storage().data_ptr() not in self._of_model:
                self.seen.append(f"{func} {list(tensor.shape)}")
        return result


@contextmanager
def without_our_place_in_peft() -> Iterator[None]:
    """PEFT as it is for versions that this was not tested with."""
    ours = ParamWrapper._activate_lora
    ParamWrapper._activate_lora = getattr(ours, peft_lora._MARK)
    try:
        yield
    finally:
        ParamWrapper._activate_lora = ours


def wrappers_of(module: nn.Module) -> list[Any]:
    """The nested ParamWrappers from the outermost on."""
    found = []
    while isinstance(module, ParamWrapper):
        found.append(module)
        module = module.base_layer
    return found


def experts_of(model: nn.Module, layer: int = 0) -> nn.Module:
    """The outermost wrapper of a layer's experts, or the experts."""
    return next(m for n, m in model.named_modules() if n.endswith(f"layers.{layer}.mlp.experts"))


def factors_in_use(outermost: nn.Module) -> LoraFactors:
    """What the hook reads during a call of the experts below."""
    module = outermost.get_base_layer()
    adapters = []
    for wrapper in wrappers_of(outermost):
        names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        adapters.append(
            ActiveAdapters(
                module=module,
                parameter=wrapper.parameter_name,
                read=lambda wrapper=wrapper, names=names: [delta_of(wrapper, name) for name in names],
                as_peft_does_it=nullcontext,
            )
        )
    return _lora_of(module, adapters)


def factors_in_proxies(outermost: nn.Module) -> LoraFactors:
    """What the hook reads where PEFT was left alone."""
    module = outermost.get_base_layer()
    with without_our_place_in_peft(), ExitStack() as active:
        for wrapper in wrappers_of(outermost):
            active.enter_context(wrapper._activate_lora(wrapper.active_adapters))
        return _lora_of(module, [])


def _lora_of(module: nn.Module, adapters: list[ActiveAdapters]) -> LoraFactors:
    layout = {"transposed": module.is_transposed, "interleaved": not module.is_concatenated}
    return lora_of(module, adapters, module.down_proj.shape[0], **layout)
