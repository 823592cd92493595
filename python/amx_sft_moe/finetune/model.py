"""The model: a small Qwen3-MoE made here or the user's checkpoint, and LoRA on its experts and attention."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)

from .errors import FinetuneError
from .options import TORCH_GROUPED, ModelShape

logger = logging.getLogger(__name__)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")  # the fused parameters, [E, 2I, H] and [E, H, I]


@dataclass(frozen=True)
class Trained:
    """How many numbers an adapted model trains, and where."""

    experts: int  # in adapters of routed experts
    attention: int  # in adapters of attention
    frozen: int  # of the base
    layers: int  # whose experts are adapted


def make_model(
    shape: ModelShape, tokenizer: PreTrainedTokenizerBase, longest: int, seed: int
) -> PreTrainedModel:
    """A Qwen3-MoE with fresh fp32 weights, all of them to be trained; its experts run in torch's grouped_mm.

    The router's balancing loss is on, or a model this young sends everything to a few experts.
    """
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=longest,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(TORCH_GROUPED)
    return model


def save_base(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, folder: Path
) -> None:
    """Writes the trained base in `dtype` with its tokenizer, a checkpoint like any other."""
    model.config.output_router_logits = False  # balancing is for the base: LoRA leaves the router alone
    model.config.use_cache = True  # the Trainer has switched it off
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local checkpoint. FinetuneError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FinetuneError(f"no tokenizer in {folder}: {_first_line(error)}") from error


def load_model(folder: Path, dtype: torch.dtype, experts: str) -> PreTrainedModel:
    """A local checkpoint in `dtype`, its experts run by `experts` (the name of an experts_implementation).

    FinetuneError where the folder holds no model that transformers can read.
    """
    _check_memory(folder, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation=experts, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise FinetuneError(f"cannot load a model from {folder}: {_first_line(error)}") from error
    model.config.output_router_logits = False
    return model


def check_checkpoint(folder: Path) -> None:
    """Refuses, before anything is loaded, a folder that holds no Qwen3-MoE. Raises FinetuneError."""
    if not folder.is_dir():
        raise FinetuneError(f"--model {folder}: no such folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FinetuneError(f"--model {folder}: {_first_line(error)}") from error
    if config.model_type != "qwen3_moe":
        raise FinetuneError(f"--model {folder} is a {config.model_type!r} model; a 'qwen3_moe' one is needed")
    if not any(folder.glob("*.safetensors")):
        raise FinetuneError(f"--model {folder} holds no *.safetensors file")


def add_adapter(model: PreTrainedModel, rank: int, alpha: float, seed: int) -> PeftModel:
    """LoRA on the routed experts and on attention, everything else frozen. The factors are fp32.

    B starts at zero, so the adapted model starts as the base. Raises FinetuneError if no routed expert is
    found, for then the run would train something else than was asked for.
    """
    experts = [name for name, module in model.named_modules() if _has_fused_experts(module)]
    if not experts:
        raise FinetuneError(
            f"no routed experts with {' and '.join(EXPERTS)} in this {model.config.model_type} model"
        )
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        target_modules=[name for name in ATTENTION if name in leaves],
        target_parameters=sorted(
            {f"{'.'.join(name.split('.')[-2:])}.{leaf}" for name in experts for leaf in EXPERTS}
        ),
    )
    set_seed(seed)
    return get_peft_model(model, config)


def _has_fused_experts(module: torch.nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return all(name in own and own[name].dim() == 3 for name in EXPERTS)


def bare_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapted one, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def expert_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The experts of each layer in order, PEFT's wrappers included: a call is the whole expert part."""
    return [layer.mlp.experts for layer in bare_model(model).model.layers if hasattr(layer.mlp, "experts")]


def trained_parameters(model: PeftModel) -> Trained:
    """Counts what is trained. FinetuneError if experts are not among it."""
    counts = {True: 0, False: 0}
    layers = set()
    frozen = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen += parameter.numel()
            continue
        of_experts = ".experts." in name
        counts[of_experts] += parameter.numel()
        if of_experts:
            layers.add(name.partition(".mlp.")[0])
    if not counts[True]:
        raise FinetuneError("no adapter reached the routed experts")
    return Trained(counts[True], counts[False], frozen, len(layers))


def adapter_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every trainable tensor, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def restore_adapter(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copies a state of `adapter_state` back into the model, in place."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(value)


def room_for_a_copy(model: torch.nn.Module) -> bool:
    """Whether memory is left for a second copy of the weights, and some more."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return 1.2 * needed < psutil.virtual_memory().available


def _check_memory(folder: Path, dtype: torch.dtype) -> None:
    """Warns when the weights will hardly fit; on disk they are taken to be bf16."""
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors")) * dtype.itemsize / 2
    available = psutil.virtual_memory().available
    if needed > 0.9 * available:
        logger.warning(
            "the weights need about %.1f GB, %.1f GB of memory are available", needed / 1e9, available / 1e9
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
