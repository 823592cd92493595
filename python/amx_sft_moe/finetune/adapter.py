"""The adapter on disk: written in PEFT's format, and read back by stock PEFT."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from amx_sft_moe.adapters.files import CONFIG, read_json, save_json
from amx_sft_moe.errors import ArgumentError, cause_of

from . import held_out
from .errors import FinetuneError
from .packing import TokenBlocks


def save_adapter(model: PeftModel, folder: Path, base: Path) -> str:
    """Writes the adapter in PEFT's format, a pair of factors per expert and projection, into an empty folder.
    `base` is where its model will lie, which may not be where it was loaded from; the adapter
    names its absolute path, whatever directory it is loaded from.

    Where that form cannot hold the adapter it is written fused, as PEFT itself does it, and the reason is
    returned.
    """
    from amx_sft_moe.adapters import save_per_expert

    reason = ""
    try:
        save_per_expert(model, folder)
    except (OSError, SafetensorError):
        raise
    except Exception as error:  # of a family that nobody tried, too: what was trained has to be kept
        reason = str(error) if isinstance(error, ArgumentError) else cause_of(error)
        for file in filter(Path.is_file, folder.iterdir()):
            file.unlink()
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # an empty form, which would replace the user's own
    config = read_json(folder / CONFIG)
    save_json({**config, "base_model_name_or_path": str(base.resolve())}, folder / CONFIG)
    return reason


def saved_bytes(model: PeftModel) -> int:
    """How much `save_adapter` writes, names apart: what trains, and the A that gate and up share twice, as it
    stands per expert."""
    shared = (
        factor.weight
        for module in model.modules()
        if isinstance(module, ParamWrapper) and module.parameter_name == "gate_up_proj"
        for factor in module.lora_A.values()
    )
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return sum(tensor.nbytes for tensor in chain(trained, shared))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Writes the tokenizer beside an adapter, all of it or nothing; returns why nothing. The adapter is kept
    all the same: its base has the tokenizer too."""
    there = set(folder.iterdir())
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # a full disk, or whatever a tokenizer's own code raises
        for left in set(folder.iterdir()) - there:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return cause_of(error)
    return ""


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
    blocks. Raises FinetuneError with how the process ended and the last of its own words if it fails, and where
    the loss is not finite.
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
        words = f"{_ending(done.returncode)}\n{done.stderr.strip()[-2000:]}".rstrip()
        raise FinetuneError(f"stock PEFT could not read {adapter}: {words}")
    loss = float(json.loads(done.stdout.strip().splitlines()[-1])["loss"])
    if not math.isfinite(loss):
        raise FinetuneError(f"stock PEFT finds no finite loss with {adapter}: {loss}")
    return loss


def _ending(returncode: int) -> str:
    """How a process ended that did not end well."""
    if returncode >= 0:
        return f"exit status {returncode}"
    if returncode == -signal.SIGKILL:
        return "killed by SIGKILL, as a system does where memory runs out"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # of the real-time signals only two have a name
        return f"killed by signal {-returncode}"
