"""LoRA adapters of MoE models on disk: converted, merged, inspected, checked.

Three formats: PEFT's own with all experts in one matrix (``peft-fused``), one pair of matrices per expert
(``per-expert``, which servers take and stock PEFT from 0.20 loads, 0.19.1 with transformers 5.5), and
KTransformers' (``ktransformers``). On the command line: ``python -m amx_sft_moe adapter --help``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amx_sft_moe.adapters.adapter import Adapter, Factors, Linear
    from amx_sft_moe.adapters.base import BaseModel, ExpertsLayout, load_base
    from amx_sft_moe.adapters.checks import Check, Loads, check_adapter
    from amx_sft_moe.adapters.conversion import Conversion, convert_adapter
    from amx_sft_moe.adapters.formats import read_adapter
    from amx_sft_moe.adapters.inspection import inspect_adapter
    from amx_sft_moe.adapters.live import save_per_expert
    from amx_sft_moe.adapters.merging import Merged, merge_adapter

__all__ = [
    "Adapter",
    "BaseModel",
    "Check",
    "Conversion",
    "ExpertsLayout",
    "Factors",
    "Linear",
    "Loads",
    "Merged",
    "check_adapter",
    "convert_adapter",
    "inspect_adapter",
    "load_base",
    "merge_adapter",
    "read_adapter",
    "save_per_expert",
]

_MODULES = {
    "adapter": ("Adapter", "Factors", "Linear"),
    "base": ("BaseModel", "ExpertsLayout", "load_base"),
    "checks": ("Check", "Loads", "check_adapter"),
    "conversion": ("Conversion", "convert_adapter"),
    "formats": ("read_adapter",),
    "inspection": ("inspect_adapter",),
    "live": ("save_per_expert",),
    "merging": ("Merged", "merge_adapter"),
}


def __getattr__(name: str) -> Any:
    # peft and transformers take seconds to import; --help and a mistyped option need not wait for them.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
