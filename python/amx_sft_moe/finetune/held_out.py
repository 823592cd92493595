"""The loss on held-out text. Also a program of its own, which knows nothing of this package:

    python held_out.py BASE_MODEL ADAPTER BLOCKS.safetensors

loads an adapter on a fresh base with the stock transformers and PEFT that are installed, and prints its
held-out loss as one line of JSON. That is the proof that an adapter written here needs nothing from here.
Hence no relative import.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100  # the label that the loss skips


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, blocks: Mapping[str, torch.Tensor], batch_size: int) -> float:
    """Mean cross entropy in nats over the predicted tokens, each with the same weight.

    `blocks` holds `input_ids`, `position_ids` and `labels`, int64 [N, L]; labels of IGNORED do not count. The
    model is left in the mode (training or evaluation) that it was in.
    """
    was_training = model.training
    model.eval()
    total = 0.0
    for at in range(0, len(blocks["labels"]), batch_size):
        batch = {name: tensor[at : at + batch_size] for name, tensor in blocks.items()}
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits  # [b, L, vocabulary]
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(),
            labels[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        total += losses.item()
    model.train(was_training)
    return total / int((blocks["labels"][:, 1:] != IGNORED).sum())


def read_config(folder: Path) -> Any:
    """The configuration of a checkpoint, by the name of its class where transformers does not know its model
    type (Kimi K2 is a DeepSeek-V3)."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError):
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = getattr(transformers, written["architectures"][0]).config_class
        return kind.from_dict({name: value for name, value in written.items() if name != "model_type"})


def main() -> None:
    """Prints {"loss": nats per token}."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("base")
    parser.add_argument("adapter")
    parser.add_argument("blocks")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    config = read_config(Path(arguments.base))
    base = AutoModelForCausalLM.from_pretrained(
        arguments.base,
        config=config,
        dtype=getattr(torch, arguments.dtype),
        experts_implementation="grouped_mm",
        local_files_only=True,
    )
    model = PeftModel.from_pretrained(base, arguments.adapter)
    loss = held_out_loss(model, load_file(arguments.blocks), arguments.batch_size)
    sys.stdout.write(json.dumps({"loss": loss}) + "\n")


if __name__ == "__main__":
    main()
