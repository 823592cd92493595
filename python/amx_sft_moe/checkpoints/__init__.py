"""Real checkpoints: models whose routed experts stay in the mapped safetensors files."""

from __future__ import annotations

from amx_sft_moe.checkpoints.dense import torch_multiplies_bf16
from amx_sft_moe.checkpoints.files import CheckpointFiles
from amx_sft_moe.checkpoints.loading import load_model, meta_model, read_config
from amx_sft_moe.checkpoints.plan import routed_experts

__all__ = [
    "CheckpointFiles",
    "load_model",
    "meta_model",
    "read_config",
    "routed_experts",
    "torch_multiplies_bf16",
]
