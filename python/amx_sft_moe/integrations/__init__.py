"""Plug-ins for the libraries around torch: the experts of transformers models, LoRA of PEFT, phase times in the
Trainer's logs (``PhaseTimesCallback``, ``log_phase_times``, ``name_layers``)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from amx_sft_moe.sft_moe import SftMoe


def register(
    name: str = "amx_sft_moe", *, kernel: str = "auto", num_threads: int | None = None, peft: bool = True
) -> None:
    """Makes ``experts_implementation=name`` work in transformers models, with PEFT's LoRA on their experts.

    Call it before the model is made: ``from_pretrained(..., experts_implementation="amx_sft_moe")`` or
    ``model.set_experts_implementation("amx_sft_moe")``. Layers are taken by their shapes and flags and by what
    their gate computes: ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]`` or both transposed, gate before
    up or alternating, with biases or without, SiLU, GELU or gpt-oss's clamped gate, in bfloat16 or float32.
    What is not understood runs through transformers' default implementation, with one warning that says why.
    Calling again replaces the options.

    Base weights, biases and LoRA factors train where they require a gradient. The experts stay in CPU memory
    (:func:`amx_sft_moe.keep_experts_on_cpu`); where the rest of a model is elsewhere, activations move.
    Transposed weights (gpt-oss) are laid out by rows in memory at their first call: shape, values and identity
    of the parameters stay, their strides change. Where they train, run the model once (under
    ``torch.no_grad()``, if you like) before DistributedDataParallel is put around it and before an optimizer
    has its state. With ``torch.compile`` a layer is one operator of the graph.

    Args:
        name: under which transformers finds it; different names may have different options.
        kernel: as for :class:`amx_sft_moe.SftMoe`; an unknown one is refused here.
        num_threads: as for :class:`amx_sft_moe.SftMoe`.
        peft: read LoRA factors from PEFT's modules, so that ``W + BA`` is never built. This imports peft,
            where it is installed, and replaces a private method of the versions it was tested with; other
            versions still work, at the price of what PEFT itself evaluates. ``False`` leaves PEFT alone.

    Raises:
        KernelError: the kernel is unknown or not available. ImportError: no transformers, or one without this
            hook. ArgumentError: ``num_threads`` out of range. TypeError: ``kernel`` is no str, ``num_threads``
            no int.
    """
    from amx_sft_moe.integrations import experts_hook

    # Refuses options that no layer could be made with.
    SftMoe(1, 1, 1, 1, kernel=kernel, num_threads=num_threads)
    experts_hook.register(name, kernel, num_threads)
    if peft and importlib.util.find_spec("peft") is not None:
        from amx_sft_moe.integrations import peft_lora

        peft_lora.install(experts_hook.is_ours)


def hook_in_use() -> Any:
    """The module of the hook where :func:`register` was called; ``None``: no experts run through it yet. Who
    only asks about experts needs no transformers then."""
    return sys.modules.get(f"{__name__}.experts_hook")


# Imported when they are first asked for: they need transformers.
_LAZY = {
    "PhaseTimesCallback": "phase_times",
    "log_phase_times": "phase_times",
    "name_layers": "layer_names",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
