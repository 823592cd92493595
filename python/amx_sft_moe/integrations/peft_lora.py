"""PEFT's LoRA on fused experts without ever building ``W + BA``.

PEFT's ``ParamWrapper._activate_lora`` registers a parametrization for the duration of a call, and torch
evaluates it once to check it: ``W + BA`` for all experts and both weights, in every layer and every step;
peft 0.18 to 0.20 build the dense ``BA`` before that, too. For modules that run through our hook this is
replaced by a note in a context variable, from which the hook reads the wrapper's parameters.

This touches private names. It is done for the PEFT versions it was tested with and where the names are as
expected. Otherwise PEFT is left alone, one warning says so, and what PEFT leaves is read: factors where it has
them (0.21 and its like, one adapter), or else transformers' default implementation runs on PEFT's ``W + BA``.
What that costs: a layer with H=512 I=256 E=16 r=8 and 64 tokens took, forward / backward in bf16 on two cores,
2 / 3 ms in place of PEFT's method, 24 / 8 ms left alone with peft 0.21 and 20 / 20 ms with 0.18 and 0.20 (least
of 60 calls); it grows with E times the size of an expert, whatever the number of tokens.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.lora import layer as peft_layer
from torch import nn

from amx_sft_moe.errors import StateError
from amx_sft_moe.integrations.adapters_in_use import ActiveAdapters, Delta, NotUnderstoodError, in_use

logger = logging.getLogger("amx_sft_moe")

_TESTED = {(0, 18), (0, 19), (0, 20), (0, 21)}
_PARAMETERS = ("gate_up_proj", "down_proj")
_PARAMETERS_OF_METHOD = ["self", "active_adapters"]
_MARK = "_amx_sft_moe_original"

_left_alone: set[str] = set()  # versions that the warning was given for


def install(is_ours: Callable[[nn.Module], bool]) -> bool:
    """Takes the place of ``ParamWrapper._activate_lora`` for modules that ``is_ours``.

    Idempotent. Returns whether it did; where not, PEFT is as it was.
    """
    wrapper_class: Any = getattr(peft_layer, "ParamWrapper", None)
    original = getattr(wrapper_class, "_activate_lora", None)
    if hasattr(original, _MARK):
        return True
    if original is None or not _is_tested() or _parameters_of(original) != _PARAMETERS_OF_METHOD:
        _say_that_it_is_left_alone()
        return False

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
            read=lambda: [delta_of(self, name) for name in names],
            as_peft_does_it=lambda: original(self, active_adapters),
        )
        with in_use(adapters):
            yield
        if not adapters.used:
            name = f"{type(module).__name__}.{self.parameter_name}"
            raise StateError(
                f"{name}: expected a call through the registered experts implementation, got another: the "
                "experts ran without their LoRA adapters"
            )

    setattr(_activate_lora, _MARK, original)
    wrapper_class._activate_lora = _activate_lora
    return True


def delta_of(wrapper: Any, adapter: str) -> Delta:
    """What an adapter adds to the parameter ``[E, rows, cols]`` of a ``ParamWrapper``, as views of its factors.

    PEFT keeps A ``[E r, in]`` and B ``[out, r E]``, and which dimension of the parameter it calls ``in``
    depends: the last one where ``_did_swap_in_out_features`` says so (from peft 0.19.1 on for parameters
    ``[E, out, in]``, in 0.19.0 for transposed ones ``[E, in, out]``), the middle one otherwise (peft 0.18
    always). A parameter of one expert gets ``B A`` as it is.
    """
    if adapter in getattr(wrapper, "lora_variant", {}):
        raise NotUnderstoodError(
            f"expected plain LoRA, got the variant {type(wrapper.lora_variant[adapter]).__name__}"
        )
    experts = wrapper.num_experts
    a = _by_expert(wrapper.lora_A[adapter].weight, 0, experts)  # [E, r, in]
    b = _by_expert(wrapper.lora_B[adapter].weight, 1, experts)  # [E, out, r]
    if experts == 1 or getattr(wrapper, "_did_swap_in_out_features", False):
        return Delta(b, a, float(wrapper.scaling[adapter]))
    return Delta(a.transpose(1, 2), b.transpose(1, 2), float(wrapper.scaling[adapter]))


def _by_expert(weight: torch.Tensor, dim: int, experts: int) -> torch.Tensor:
    if weight.dim() != 2 or weight.shape[dim] % experts != 0:
        raise NotUnderstoodError(
            f"expected LoRA factors [E r, in] and [out, r E] with E={experts}, got {list(weight.shape)}"
        )
    rank = weight.shape[dim] // experts
    if dim == 0:
        return weight.reshape(experts, rank, weight.shape[1])
    return weight.reshape(weight.shape[0], rank, experts).permute(2, 0, 1)


def _is_tested() -> bool:
    version = re.match(r"(\d+)\.(\d+)", peft.__version__)
    return version is not None and tuple(map(int, version.groups())) in _TESTED


def _parameters_of(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)


def _say_that_it_is_left_alone() -> None:
    if peft.__version__ in _left_alone:
        return
    _left_alone.add(peft.__version__)
    logger.warning(
        "peft %s is none of the versions this was tested with (%s): PEFT itself evaluates W + BA of all "
        "experts in each call, which may take longer than the experts",
        peft.__version__,
        ", ".join(f"{major}.{minor}" for major, minor in sorted(_TESTED)),
    )
