"""The model: a small Qwen3-MoE made here or the user's checkpoint, and LoRA on its experts and attention."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)

from amx_sft_moe.adapters.base import base_like
from amx_sft_moe.checkpoints import CheckpointFiles, meta_model, read_config, routed_experts
from amx_sft_moe.checkpoints import load_model as load_mapped
from amx_sft_moe.checkpoints.loading import require_all_weights
from amx_sft_moe.checkpoints.plan import make_plan
from amx_sft_moe.errors import ArgumentError, cause_of
from amx_sft_moe.integrations.experts_hook import why_not
from amx_sft_moe.integrations.mapped_experts import mapped_bytes
from amx_sft_moe.integrations.preparation import routes_per_token
from amx_sft_moe.system.machine import available_memory

from .errors import FinetuneError
from .options import TORCH_GROUPED, ModelShape

logger = logging.getLogger(__name__)

EXPERTS = ("gate_up_proj", "down_proj")  # the fused parameters, [E, 2I, H] and [E, H, I]


@dataclass(frozen=True)
class Trained:
    """How many numbers an adapted model trains, and where."""

    experts: int  # in adapters of routed experts
    attention: int  # in adapters of attention
    frozen: int  # of the base
    layers: int  # whose experts are adapted


@dataclass(frozen=True)
class ExpertSizes:
    """Of one layer's routed experts."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int


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
    """The tokenizer of a local checkpoint. FinetuneError where there is none, or one that cannot be read."""
    try:
        # Without the last argument transformers may ask at the terminal whether to run code from there.
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer.json of another content raises what it likes
        cause = cause_of(error)
        if "trust_remote_code" in str(error):
            cause = (
                "it is Python code of the checkpoint, which is not run; expected a tokenizer.json, and no "
                "auto_map in tokenizer_config.json"
            )
        raise FinetuneError(f"no tokenizer in {folder} that can be read: {cause}") from error
    # Without its files transformers makes an empty one for some models (Qwen, OLMoE), and says nothing.
    if not found(string.printable, add_special_tokens=False)["input_ids"]:
        raise FinetuneError(
            f"no tokenizer in {folder}: expected its files, got one that knows {len(found)} tokens"
        )
    return found


def vocabulary_size(folder: Path) -> int:
    """How many tokens the model of a checkpoint knows."""
    return int(read_config(folder).get_text_config().vocab_size)


def load_model(
    folder: Path, dtype: torch.dtype, dense_dtype: torch.dtype, experts: str, cache_dir: Path | None = None
) -> PreTrainedModel:
    """A local checkpoint in `dtype`, what is not experts in `dense_dtype`, the experts mapped and run by
    `experts` (an experts_implementation).

    FinetuneError where the folder holds no model that can be used.
    """
    _check_memory(folder)
    with _loading(folder):
        model = load_mapped(
            folder,
            dtype=dtype,
            dense_dtype=dense_dtype,
            experts_implementation=experts,
            cache_dir=cache_dir,
        )
    model.config.get_text_config().output_router_logits = False
    return model


def load_stacked(folder: Path, dtype: torch.dtype, experts: str) -> PreTrainedModel:
    """The same with all experts of a layer in one tensor in memory, as transformers loads them, all in `dtype`.

    FinetuneError where a weight is missing: transformers would draw it at random.
    """
    with _loading(folder):
        config = read_config(folder)
        if make_plan(meta_model(config, folder), CheckpointFiles(folder)).mxfp4:
            # read_config leaves it out, and without it transformers does not know what the blocks are.
            config.quantization_config = {"quant_method": "mxfp4", "dequantize": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            experts_implementation=experts,
            local_files_only=True,
            output_loading_info=True,
        )
        model, report = loaded
        require_all_weights(folder, model, report)
    for _, module in routed_experts(model):
        module.to(dtype)  # transformers 5.20 makes bfloat16 of mxfp4, whatever is asked for
    model.config.get_text_config().output_router_logits = False
    return model


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Turns what loading raises into a FinetuneError."""
    try:
        yield
    except (ArgumentError, OSError) as error:
        raise FinetuneError(f"cannot load a model from {folder}: {_first_line(error)}") from error
    except Exception as error:  # transformers and the model's own code raise what they like
        raise FinetuneError(f"cannot load a model from {folder}: {cause_of(error)}") from error


def check_checkpoint(folder: Path) -> None:
    """Refuses, before anything is loaded, a folder without a model whose experts the operator knows, or with
    incomplete files. Raises FinetuneError."""
    try:
        model = meta_model(read_config(folder), folder)
        CheckpointFiles(folder)
    except ArgumentError as error:
        raise FinetuneError(f"--model {_first_line(error)}") from error
    for path, module in routed_experts(model):
        if reason := why_not(module):
            raise FinetuneError(f"--model {folder}: {path}, {type(module).__name__}: {reason}")


def mapped_gigabytes(model: torch.nn.Module) -> float:
    """GB of experts that stay one by one in their files: what runs them has to take them so."""
    return mapped_bytes(model) / 1e9


def add_adapter(model: PreTrainedModel, rank: int, alpha: float, seed: int) -> PeftModel:
    """LoRA on the routed experts and on attention, everything else frozen. The factors are fp32.

    B starts at zero, so the adapted model starts as the base. Raises FinetuneError if no routed expert is
    found, for then the run would train something else than was asked for, and where PEFT refuses the model.
    """
    experts = [path for path, _ in routed_experts(model)]
    if not experts:
        raise FinetuneError(
            f"no routed experts with {' and '.join(EXPERTS)} in this {model.config.model_type} model"
        )
    parameters = {f"{'.'.join(name.split('.')[-2:])}.{leaf}" for name in experts for leaf in EXPERTS}
    try:
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=alpha,
            target_modules=attention_targets(model),
            target_parameters=sorted(parameters),
        )
        set_seed(seed)
        return get_peft_model(model, config)
    except ValueError as error:
        raise FinetuneError(f"PEFT refuses LoRA on this {model.config.model_type} model: {error}") from error


def attention_targets(model: PreTrainedModel) -> list[str]:
    """Names of the Linear modules of attention, as PEFT's `target_modules` takes them: an end of the path that
    no other module's has, such as q_proj or self_attn.q_proj, else all of it. Without those of
    `attention_left_out`."""
    taken = _names_taken_by_peft(model)
    attention = {path for path in _attention(model) if _ends(path)[0] not in taken}
    others = {end for path, _ in model.named_modules() if path not in attention for end in _ends(path)}
    return sorted({next(end for end in _ends(path) if end not in others) for path in attention})


def attention_left_out(model: PreTrainedModel) -> list[str]:
    """Names of the Linear modules of attention that PEFT would take for experts, as self_attn.gate_proj of
    AFMoE: they get no LoRA."""
    taken = _names_taken_by_peft(model)
    return sorted({_ends(path)[1] for path in _attention(model) if _ends(path)[0] in taken})


def _attention(model: PreTrainedModel) -> set[str]:
    """Paths of the Linear modules of attention: of what takes an attention mask within a decoder layer that
    stands in one list with those of routed experts. Linear attention, state-space layers and short convolutions
    too, but no router, no dense or shared MLP and no layer of a vision tower."""
    of_layers = {_layers_of(path) for path, _ in routed_experts(model)}
    attention: set[str] = set()
    for path, module in model.named_modules():
        masked = _layers_of(path) in of_layers and "attention_mask" in signature(module.forward).parameters
        if masked and not list(routed_experts(module)):
            found = (name for name, inner in module.named_modules() if isinstance(inner, torch.nn.Linear))
            attention.update(f"{path}.{name}" for name in found)
    return attention


def _names_taken_by_peft(model: PreTrainedModel) -> frozenset[str]:
    try:
        return base_like(model).names_taken_by_peft
    except Exception:  # a family whose files nobody can take apart; what PEFT refuses it says itself
        return frozenset()


def _layers_of(path: str) -> str:
    """ "model.layers" of "model.layers.3.self_attn"; empty for what is not within a numbered layer."""
    found = re.match(r"(.*?)\.\d+\.", path)
    return found[1] if found else ""


def _ends(path: str) -> tuple[str, str, str]:
    """ "q_proj", "self_attn.q_proj" and all of "model.layers.3.self_attn.q_proj"."""
    parts = path.split(".")
    return parts[-1], ".".join(parts[-2:]), path


def bare_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapted one, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def expert_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The experts of each layer in order, PEFT's wrappers included: a call is the whole expert part."""
    bare = bare_model(model)
    return [bare.get_submodule(path) for path in _expert_paths(bare)]


def _expert_paths(model: torch.nn.Module) -> list[str]:
    """Paths of the layers' experts, of the outermost wrapper where they are adapted."""
    return [path.replace(".base_layer", "") for path, _ in routed_experts(model)]


def expert_sizes(model: torch.nn.Module) -> ExpertSizes:
    """Sizes of the first layer's experts, and how many of them a token goes to."""
    bare = bare_model(model)
    _, module = next(iter(routed_experts(bare)))
    experts, rows, cols = module.get_parameter("down_proj").shape
    hidden, intermediate = (cols, rows) if getattr(module, "is_transposed", False) else (rows, cols)
    of_routers = (each.top_k for each in bare.modules() if isinstance(getattr(each, "top_k", None), int))
    return ExpertSizes(experts, hidden, intermediate, next(of_routers, routes_per_token(bare, module) or 0))


def trained_parameters(model: PeftModel) -> Trained:
    """Counts what is trained. FinetuneError if experts are not among it."""
    counts = {True: 0, False: 0}
    layers = set()
    frozen = 0
    paths = _expert_paths(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen += parameter.numel()
            continue
        of_layer = [path for path in paths if name.startswith(f"{path}.")]
        counts[bool(of_layer)] += parameter.numel()
        layers.update(of_layer)
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


def room_for_copies(model: torch.nn.Module, copies: int = 1) -> bool:
    """Whether memory is left for that many further copies of the weights, and some more."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return (copies + 0.2) * needed < available_memory()


def _check_memory(folder: Path) -> None:
    """Warns when the files will hardly stay in memory."""
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    available = available_memory()
    if needed > 0.9 * available:
        logger.warning(
            "the weights need about %.1f GB, %.1f GB of memory are available: the rest is read from disk in "
            "each step",
            needed / 1e9,
            available / 1e9,
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
