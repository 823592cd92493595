"""Tiny checkpoints of several model families, adapters for them made by stock PEFT, and the weights that stock
PEFT merges."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from reference import largest

SIZES = {
    "vocab_size": 64,
    "hidden_size": 28,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
MANY = {"moe_intermediate_size": 12, "head_dim": 8}
GROUPED = {"n_routed_experts": 5, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3MoeConfig", MANY | {"num_experts": 5}),
    "qwen2": ("Qwen2MoeConfig", MANY | {"num_experts": 5, "shared_expert_intermediate_size": 12}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5}),
    "olmoe": ("OlmoeConfig", {"num_experts": 5, "eos_token_id": 1}),
    "deepseek": ("DeepseekV3Config", MANY | GROUPED | LATENT | {"num_key_value_heads": 4}),
    "glm": ("Glm4MoeConfig", MANY | GROUPED),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 5, "head_dim": 8}),
}
PER_EXPERT_ON_DISK = [name for name in FAMILIES if name != "gpt_oss"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OPTIONS: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["o_proj"],
    "target_parameters": EXPERTS,
}

_directories = []  # removed when the tests end


def fresh_directory() -> Path:
    _directories.append(tempfile.TemporaryDirectory(prefix="adapters-"))
    return Path(_directories[-1].name)


@functools.cache
def checkpoint(family: str, dtype: torch.dtype = torch.float32) -> Path:
    """A sharded checkpoint as transformers writes it."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SIZES | sizes)))
    model.to(dtype).save_pretrained(fresh_directory() / family, max_shard_size="40KB")
    return _directories[-1].name / Path(family)


def model_of(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, experts_implementation="eager")


@functools.cache
def stock_adapter(family: str, options: str = "{}") -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter that PEFT saved, and the weights that PEFT merged. ``options``: JSON for LoraConfig."""
    base = checkpoint(family)
    model = get_peft_model(model_of(base), LoraConfig(**(OPTIONS | json.loads(options))))
    draw_factors(model, seed=3)
    directory = fresh_directory()
    model.save_pretrained(directory)
    return directory, merged_state(model)


def draw_factors(model: torch.nn.Module, seed: int) -> None:
    """Random numbers for all that trains."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)


def merged_state(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.merge_and_unload().state_dict().items()}


def stock_merge(family: str, adapter: Path) -> dict[str, torch.Tensor]:
    """What PEFT makes of an adapter directory."""
    return merged_state(PeftModel.from_pretrained(model_of(checkpoint(family)), adapter))


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert set(found) == set(expected)
    return largest(float((found[name] - expected[name]).abs().max()) for name in expected)


def config_of(adapter: Path) -> dict[str, Any]:
    return json.loads((adapter / "adapter_config.json").read_text())


def write_config(adapter: Path, **changes: Any) -> None:
    content = {**config_of(adapter), **changes}
    (adapter / "adapter_config.json").write_text(json.dumps(content))
