"""Tiny models of the families that people fine-tune, with and without LoRA on their experts."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

import amx_sft_moe

amx_sft_moe.register()

VOCABULARY = 61
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

# Name of the classes, and what its configuration needs beside _COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 5, "moe_intermediate_size": 24, "head_dim": 16}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "olmoe": ("Olmoe", {"num_experts": 5, "intermediate_size": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 24}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 5,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            **_GROUPS,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 5,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "head_dim": 16,
            **_GROUPS,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "intermediate_size": 24,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
        },
    ),
}


def family_model(
    family: str, implementation: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model of fixed random weights whose experts matter for the loss; base weights of experts are frozen."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(_COMMON | sizes | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ".experts." in path:
                # Values beyond gpt-oss's limit among them.
                parameter.normal_(std=1.0 if path.endswith("_bias") else 0.3)
                parameter.requires_grad_(False)
    model = model.to(dtype)
    model.set_experts_implementation(implementation)
    return model


def with_lora(model: PreTrainedModel, rank: int = 3, **changes: Any) -> PeftModel:
    """LoRA on attention and experts, both factors random and fixed."""
    options: dict[str, Any] = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    model = get_peft_model(model, LoraConfig(**(options | changes)))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    return model


def token_batch(rows: int = 2, length: int = 9, seed: int = 2) -> dict[str, torch.Tensor]:
    """Token ids that are their own labels."""
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def train(model: torch.nn.Module, steps: int, lr: float = 5e-3) -> list[float]:
    """Losses of AdamW steps on the parameters that require a gradient."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    losses = []
    for step in range(steps):
        loss = model(**token_batch(seed=step % 4)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
