"""Tiny Qwen3-MoE models, with and without PEFT's LoRA on experts and attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import amx_sft_moe

amx_sft_moe.register()

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}


def base_model(
    implementation: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A model with weights that ``seed`` fixes; experts are large enough to matter for the loss."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SIZES | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(6)
    model = model.to(dtype)
    model.set_experts_implementation(implementation)
    return model


def add_lora(model: PreTrainedModel, seed: int = 1, name: str = "default", **changes: Any) -> PeftModel:
    """LoRA on attention and experts, both factors random."""
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": EXPERTS,
    }
    config = LoraConfig(**(options | changes))
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, adapter_name=name)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key and f".{name}." in key:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    return model


def batch(rows: int = 2, length: int = 12, seed: int = 2) -> dict[str, torch.Tensor]:
    """Token ids that are their own labels."""
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def loss_and_gradients(model: torch.nn.Module, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One training pass; gradients by parameter name."""
    model.zero_grad()
    loss = model(**(inputs or batch())).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), copy.copy(grads)
