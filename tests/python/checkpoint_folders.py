"""Checkpoints of tiny models of every family, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from families import family_model

E, H, I, K = 5, 32, 24, 2  # noqa: E741  # experts, hidden, intermediate, routes per token, as in families


def make(family: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """The model that :func:`write` writes."""
    return family_model(family, "eager", dtype, **changes)


def write(folder: Path, family: str, dtype: torch.dtype, *, fused: bool = False, **changes: Any) -> Path:
    """A sharded checkpoint; ``fused`` keeps the stacked parameters on disk."""
    model = make(family, dtype, **changes)
    model.save_pretrained(folder, max_shard_size="15KB", save_original_format=not fused)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes entries of ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
