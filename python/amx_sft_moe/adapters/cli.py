"""``python -m amx_sft_moe adapter convert | merge | inspect | check``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from amx_sft_moe.errors import ArgumentError, StateError

_DTYPES = ("float32", "bfloat16", "float16")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amx_sft_moe adapter", description="LoRA adapters of MoE models on disk."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    base_help = "directory of the base model, config.json is enough (default: what the adapter names)"

    convert = commands.add_parser("convert", help="write an adapter in another format")
    convert.add_argument("source", metavar="SRC", help="adapter directory of any format")
    convert.add_argument("target", metavar="DST", help="directory for the new one")
    convert.add_argument("--to", required=True, choices=("peft-fused", "per-expert", "ktransformers"))
    convert.add_argument("--base", metavar="DIR", help=base_help)
    convert.add_argument("--peft-version", metavar="X.Y", help="for whom to write (default: the installed one)")
    convert.add_argument("--dtype", choices=_DTYPES, help="element type (default: the source's)")
    convert.add_argument(
        "--one-scaling", action="store_true", help="one scaling for all modules, for servers (per-expert)"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace an adapter in DST, in one step")

    merge = commands.add_parser("merge", help="write a checkpoint with W + scaling * B A")
    merge.add_argument("adapter", metavar="ADAPTER", help="adapter directory of any format")
    merge.add_argument("base", metavar="BASE_CHECKPOINT", help="directory with safetensors shards")
    merge.add_argument("out", metavar="OUT", help="directory for the merged checkpoint")
    merge.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint or an adapter in OUT, in one step"
    )
    merge.add_argument("--no-progress", action="store_true", help="no progress bar")

    inspect = commands.add_parser("inspect", help="what an adapter holds")
    inspect.add_argument("directory", metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="as JSON instead of text")

    check = commands.add_parser("check", help="whether an adapter is whole and who can load it")
    check.add_argument("directory", metavar="DIR")
    check.add_argument("--base", metavar="DIR", help=base_help)
    check.add_argument("--json", action="store_true", help="as JSON instead of text")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs one command. Returns 0, 1 where ``check`` found something, 2 for an error (told on stderr)."""
    options = _parser().parse_args(list(arguments))
    # transformers' advice about optional packages is not about adapters.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    commands = {"convert": _convert, "merge": _merge, "inspect": _inspect, "check": _check}
    try:
        return commands[options.command](options)
    except (ArgumentError, StateError, OSError) as reason:
        sys.stderr.write(f"error: {reason}\n")
        return 2


def _say(text: str) -> None:
    with suppress(BrokenPipeError):  # the status says it too, and somebody may go by that alone
        sys.stdout.write(text + "\n")


def _convert(options: Any) -> int:
    import torch

    from amx_sft_moe.adapters.conversion import convert_adapter

    done = convert_adapter(
        options.source,
        options.target,
        options.to,
        base=options.base,
        peft_version=options.peft_version,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        one_scaling=options.one_scaling,
        overwrite=options.overwrite,
    )
    _say(f"{options.source} ({done.source}) -> {done.directory} ({done.target}): {done.tensors} tensors")
    _say(f"verified: {done.verified} products scaling * B A read back and compared")
    _say("lossless: yes" if done.lossless else "lossless: no")
    for line in done.lost:
        _say(f"  lost: {line}")
    for line in done.notes:
        _say(f"  note: {line}")
    return 0


def _merge(options: Any) -> int:
    from amx_sft_moe.adapters.merging import merge_adapter

    done = merge_adapter(
        options.adapter,
        options.base,
        options.out,
        overwrite=options.overwrite,
        progress=not options.no_progress,
    )
    _say(f"{done.directory}: {done.changed} of {done.tensors} tensors changed, {done.bytes:,} bytes of shards")
    for line in done.notes:
        _say(f"  note: {line}")
    return 0


def _inspect(options: Any) -> int:
    from amx_sft_moe.adapters.inspection import as_text, inspect_adapter

    found = inspect_adapter(options.directory)
    _say(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0


def _check(options: Any) -> int:
    from amx_sft_moe.adapters.checks import as_text, check_adapter

    found = check_adapter(options.directory, options.base)
    _say(json.dumps(asdict(found), indent=2) if options.json else as_text(options.directory, found))
    return 1 if found.findings else 0
