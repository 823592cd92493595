"""Tiny checkpoints of models for text and images: a configuration with another for text inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import amx_sft_moe

amx_sft_moe.register()

_COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": 5,
    "moe_intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR_ATTENTION = {
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # AutoModelForCausalLM makes of these a model for text alone, of the configuration for text...
    "qwen3_5_moe": ("Qwen3_5Moe", _LINEAR_ATTENTION),
    "qwen4_exp": (
        "Qwen4Exp",
        {**_LINEAR_ATTENTION, **_INDEXED, "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 4},
    ),
    # ...and of this the whole.
    "gemma4": (
        "Gemma4",
        {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "intermediate_size": 40,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 61,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
# transformers 5.20 knows fewer of them.
TEXT_ALONE = [
    name for name in ("qwen3_5_moe", "qwen4_exp") if hasattr(transformers, f"{_FAMILIES[name][0]}Config")
]
WHOLE = ["gemma4"]
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def make(family: str, **changes: Any) -> PreTrainedModel:
    """The whole model in fp32, of fixed random weights; experts are large enough to matter. ``changes``: of the
    configuration for text."""
    name, sizes = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        text_config=_COMMON | sizes | changes, vision_config=_VISION
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ".experts." in path:
                parameter.normal_(std=0.3)
    return model


def write(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """The checkpoint of that model as transformers writes it."""
    make(family, **changes).to(dtype).save_pretrained(folder, max_shard_size="40KB")
    return folder
