"""PEFT's LoRA on fused experts without ever building ``W + BA``.

PEFT's ``ParamWrapper._activate_lora`` registers a parametrization for the duration of a call, and torch
evaluates it
once to check it: ``W + BA`` for all experts and both weights, in every layer and every step. For modules that
run through our hook this is replaced by a note in a context variable, from which the hook reads the wrapper's
parameters.

This touches private names. It is done for the PEFT versions it was tested with and where the names are as
expected; otherwise PEFT is left alone and the hook reads PEFT's own proxies.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import peft
from peft.tuners.lora import layer as peft_layer
from torch import nn

from amx_sft_moe.integrations.adapters_in_use import (
    ActiveAdapters,
    Factors,
    NotUnderstoodError,
    active,
    in_out_by_in,
    mark_as_adapted,
)

logger = logging.getLogger("amx_sft_moe")

_TESTED = {(0, 21)}
_PARAMETERS = ("gate_up_proj", "down_proj")
_PARAMETERS_OF_METHOD = ["self", "active_adapters"]
_MARK = "_amx_sft_moe_original"


def install(is_ours: Callable[[nn.Module], bool]) -> bool:
    """Takes the place of ``ParamWrapper._activate_lora`` for modules that ``is_ours``.

    Idempotent. Returns whether it did; where not, PEFT is as it was.
    """
    wrapper_class = getattr(peft_layer, "ParamWrapper", None)
    original = getattr(wrapper_class, "_activate_lora", None)
    version = re.match(r"(\d+)\.(\d+)", peft.__version__)
    tested = version is not None and tuple(map(int, version.groups())) in _TESTED
    if original is None or not tested or list(inspect.signature(original).parameters) != _PARAMETERS_OF_METHOD:
        logger.info(
            "peft %s is not one this was tested with: LoRA is read from its parametrizations", peft.__version__
        )
        return False
    if hasattr(original, _MARK):
        return True

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        module = self.get_base_layer()
        names = [name for name in active_adapters if name in self.lora_A]
        if not names or self.parameter_name not in _PARAMETERS or not is_ours(module):
            with original(self, active_adapters):
                yield
            return
        adapters = ActiveAdapters(
            module=module,
            parameter=self.parameter_name,
            read=lambda: [factors_of(self, name) for name in names],
            as_peft_does_it=lambda: _as_peft_does_it(original, self, active_adapters),
        )
        mark_as_adapted(module)
        token = active.set((*active.get(), adapters))
        try:
            yield
        finally:
            active.reset(token)
        if not adapters.used:
            name = f"{type(module).__name__}.{self.parameter_name}"
            raise RuntimeError(
                f"{name}: expected a call through the registered experts implementation, got another: the "
                "experts ran without their LoRA adapters"
            )

    setattr(_activate_lora, _MARK, original)
    wrapper_class._activate_lora = _activate_lora
    return True


def _as_peft_does_it(
    original: Callable[..., Any], wrapper: Any, adapters: list[str]
) -> AbstractContextManager[Any]:
    return original(wrapper, adapters)


def factors_of(wrapper: Any, adapter: str) -> Factors:
    """A ``[E, r, in]``, B ``[E, out, r]`` as views of a wrapper's parameters, and the adapter's scaling."""
    if adapter in getattr(wrapper, "lora_variant", {}):
        raise NotUnderstoodError(
            f"expected plain LoRA, got the variant {type(wrapper.lora_variant[adapter]).__name__}"
        )
    a = wrapper.lora_A[adapter].weight
    b = wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    a, b = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    # What PEFT adds to the parameter as it is stored: B A, or its transpose where it took [E, in, out] for it.
    swapped = getattr(wrapper, "_did_swap_in_out_features", False)
    lhs, rhs = (b, a) if swapped else (a.transpose(1, 2), b.transpose(1, 2))
    transposed = bool(getattr(wrapper.get_base_layer(), "is_transposed", False))
    return in_out_by_in(lhs, rhs, wrapper.scaling[adapter], transposed)
