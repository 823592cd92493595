"""LoRA adapters of MoE models on disk: converted, merged, inspected, checked.

Three formats: PEFT's own with all experts in one matrix (``peft-fused``), one pair of matrices per expert
(``per-expert``, which servers take and stock PEFT from 0.19 loads), and KTransformers'
(``ktransformers``). On the command line: ``python -m amx_sft_moe adapter --help``.
"""

from __future__ import annotations

from amx_sft_moe.adapters.adapter import Adapter, Factors, Linear
from amx_sft_moe.adapters.base import BaseModel, ExpertsLayout, load_base
from amx_sft_moe.adapters.conversion import Conversion, convert_adapter
from amx_sft_moe.adapters.formats import read_adapter
from amx_sft_moe.adapters.live import save_per_expert

__all__ = [
    "Adapter",
    "BaseModel",
    "Conversion",
    "ExpertsLayout",
    "Factors",
    "Linear",
    "convert_adapter",
    "load_base",
    "read_adapter",
    "save_per_expert",
]
