"""What the examples of this folder train: a tiny MoE model with fresh weights, and real text that comes with
Python. Nothing is downloaded.

In your own script its place is taken by two lines and your data:

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, experts_implementation="amx_sft_moe")
"""

from __future__ import annotations

import argparse
import builtins
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
    set_seed,
)

from amx_sft_moe.finetune.corpus import Document
from amx_sft_moe.finetune.packing import TokenBlocks, chunk
from amx_sft_moe.finetune.tokenizer import train_tokenizer

VOCABULARY = 512
LENGTH = 64  # tokens of a row
SEED = 0

# All families: 2 layers of 8 experts. A family names some sizes its own way.
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,  # at the usual 0.02 so small a model hardly hears its experts
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 48},
    "olmoe": {"num_experts": 8, "intermediate_size": 48},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}


def at_least_1(text: str) -> int:
    """An option's number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def arguments(description: str | None, steps: int, output: str | None = None) -> argparse.ArgumentParser:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=sorted(_FAMILIES), default="qwen3_moe", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the base weights"
    )
    parser.add_argument("--steps", type=at_least_1, default=steps, help="default: %(default)s")
    if output is not None:
        parser.add_argument("--output", type=Path, default=Path(output), help="folder; default: %(default)s")
    return parser


def make_model(family: str, tokenizer: PreTrainedTokenizerBase, dtype: str) -> PreTrainedModel:
    """A model of this family whose experts run in the operator. The same weights every time."""
    logging.set_verbosity_error()  # this model is too small for some of transformers' expectations
    config = AutoConfig.for_model(
        family,
        **(_COMMON | _FAMILIES[family]),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(SEED)
    return AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), experts_implementation="amx_sft_moe"
    )


def make_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer, trained on the text below."""
    return train_tokenizer([document.text for document in _prose()], VOCABULARY, LENGTH)


def make_rows(tokenizer: PreTrainedTokenizerBase, held_out: int = 16) -> tuple[TokenBlocks, TokenBlocks]:
    """Python's language reference as token rows [N, LENGTH] to train on, and rows that are held out.

    Item i is a dict of ``input_ids``, ``labels`` and ``position_ids``, each [LENGTH].
    """
    rows = chunk(tokenizer, _prose(), LENGTH)
    fields = [*rows.tensors().values(), rows.lengths]
    return TokenBlocks(*(f[:-held_out] for f in fields)), TokenBlocks(*(f[-held_out:] for f in fields))


def make_questions() -> list[dict[str, str]]:
    """Questions about Python's built-in names, answered by the first paragraph of their documentation."""
    return [
        {"prompt": f"What is {name}?\n", "completion": " ".join(text.split("\n\n")[0].split())}
        for name, text in _documented(builtins)
    ]


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _prose() -> list[Document]:
    from pydoc_data.topics import topics

    return [Document(title, text.strip()) for title, text in sorted(topics.items())]


def _documented(parent: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, member in sorted(vars(parent).items()):
        if name.startswith("_"):
            continue
        if text := inspect.getdoc(member):
            yield prefix + name, text
        if inspect.isclass(member) and not prefix:
            yield from _documented(member, f"{name}.")
