"""The adapter on disk: written as a whole or not at all, and read back by stock PEFT."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from amx_sft_moe.errors import ArgumentError

from . import held_out
from .errors import FinetuneError
from .packing import TokenBlocks


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into: becomes `folder` when the context ends well, disappears when it does not.

    An interrupt or an error leaves what was at `folder` before, if anything. The folders have one parent, so
    the last step is a rename.
    """
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    partial = parent / f".{folder.name}.{os.getpid()}.partial"
    replaced = parent / f".{folder.name}.{os.getpid()}.replaced"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            folder.rename(replaced)
        try:
            partial.rename(folder)
        except BaseException:
            if replaced.exists():
                replaced.rename(folder)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def save_adapter(model: PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Writes the adapter in PEFT's format, a pair of factors per expert and projection, and the tokenizer.

    Where that form cannot hold the adapter it is written fused, as PEFT itself does it, and the reason is
    returned.
    """
    from amx_sft_moe.adapters import save_per_expert

    reason = ""
    with whole_folder(folder) as partial:
        try:
            save_per_expert(model, partial)
        except ArgumentError as error:
            reason = str(error)
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return reason


def stock_loss(
    base: Path,
    adapter: Path,
    blocks: TokenBlocks,
    dtype: torch.dtype,
    batch_size: int,
    threads: int,
    scratch: Path,
) -> float:
    """Held-out loss of the adapter on a fresh base, nats per token, as transformers and PEFT alone find it.

    Runs in a process of its own, into which this package is not imported. `scratch` is a folder for the token
    blocks. Raises FinetuneError with the end of the process's own words if it fails.
    """
    tokens = scratch / "held-out.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in blocks.tensors().items()}, tokens)
    command = [sys.executable, held_out.__file__, base, adapter, tokens]
    command += [
        "--dtype",
        str(dtype).removeprefix("torch."),
        "--batch-size",
        batch_size,
        "--threads",
        threads,
    ]
    # PYTHONSAFEPATH: this folder's modules must not be found in place of packages of the same name.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise FinetuneError(f"stock PEFT could not load {adapter}:\n{done.stderr.strip()[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["loss"])
