"""Tiny configurations of every MoE family, and checkpoints that transformers itself writes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

E, H, I, K = 5, 32, 24, 2  # noqa: E741  # experts, hidden, intermediate, routes per token
COMMON = {
    "vocab_size": 300,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": K,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DENSE_FIRST = {
    "intermediate_size": 40,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"intermediate_size": 40, "moe_intermediate_size": I, "head_dim": 8, "num_experts": E},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "intermediate_size": 40,
            "moe_intermediate_size": I,
            "shared_expert_intermediate_size": 40,
            "num_experts": E,
        },
    ),
    "olmoe": ("OlmoeConfig", {"intermediate_size": I, "num_experts": E}),
    "mixtral": ("MixtralConfig", {"intermediate_size": I, "num_local_experts": E, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3Config", {**DENSE_FIRST, **LATENT}),
    "glm4_moe": ("Glm4MoeConfig", {**DENSE_FIRST, "head_dim": 8}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "intermediate_size": I,
            "num_local_experts": E,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
        },
    ),
}


def make(family: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """A model of random weights, experts large enough to matter."""
    name, options = FAMILIES[family]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**(COMMON | options | changes)))
    random = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ".experts." in path:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.15)
    return model.to(dtype)


def write(folder: Path, family: str, dtype: torch.dtype, *, fused: bool = False, **changes: Any) -> Path:
    """A sharded checkpoint; ``fused`` keeps the stacked parameters on disk."""
    model = make(family, dtype, **changes)
    model.save_pretrained(folder, max_shard_size="30KB", save_original_format=not fused)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes entries of ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
