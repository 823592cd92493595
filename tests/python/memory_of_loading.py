"""Prints by how much anonymous memory grows when a checkpoint is loaded; test_checkpoints runs it."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from amx_sft_moe.checkpoints import load_model


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith("Anonymous:")]
    return kib * 1024


def run(model: torch.nn.Module) -> None:
    """A forward and a backward to the embeddings."""
    ids = (torch.arange(64) % 61).reshape(2, 32)
    model(input_ids=ids, labels=ids).loss.backward()


torch.set_num_threads(2)
small, large = sys.argv[1:]
# Imports and first calls take memory of their own.
run(load_model(small))
grown = {}
before = anonymous_bytes()
model = load_model(large)
grown["mapped"] = anonymous_bytes() - before
for name, parameter in model.named_parameters():
    parameter.requires_grad_("embed_tokens" in name)
run(model)
grown["mapped_and_run"] = anonymous_bytes() - before
del model
gc.collect()
before = anonymous_bytes()
model = AutoModelForCausalLM.from_pretrained(large)
grown["from_pretrained"] = anonymous_bytes() - before
print(json.dumps(grown))
