"""Command line: ``python -m amx_sft_moe info | finetune | adapter | profile | timeline``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from amx_sft_moe._version import __version__
from amx_sft_moe.info import as_text, info
from amx_sft_moe.standard_output import printing


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 1 where it needs a package that is not installed or cannot
    print, 130 after Ctrl-C."""
    try:
        return printing(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "amx_sft_moe"):
            raise
        sys.stderr.write(
            f"error: this command needs {missing}, which is not installed: install the package with its extra "
            "[train] (pip install '.[train]' in a clone)\n"
        )
        return 1
    except KeyboardInterrupt:  # while a command is imported, which may take seconds
        sys.stderr.write("\ninterrupted\n")
        return 130


def _run(arguments: list[str]) -> int:
    # finetune parses its own arguments, and only it needs torch and transformers.
    if arguments[:1] == ["finetune"]:
        from amx_sft_moe.finetune.cli import main as finetune

        return finetune(arguments[1:])
    if arguments[:1] == ["adapter"]:
        from amx_sft_moe.adapters.cli import main as adapter

        return adapter(arguments[1:])
    if arguments[:1] == ["profile"]:
        from amx_sft_moe.profile import main as profile

        return profile(arguments[1:])
    if arguments[:1] == ["timeline"]:
        from amx_sft_moe.timeline.cli import main as timeline

        return timeline(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m amx_sft_moe", description=__doc__)
    parser.add_argument("--version", action="version", version=f"amx_sft_moe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("info", help="what this build and this machine offer")
    show.add_argument("--json", action="store_true", help="as JSON instead of text")
    show.add_argument(
        "--with-torch",
        action="store_true",
        help="import torch first: then OpenMP libraries are those of training",
    )
    commands.add_parser("finetune", help="fine-tune a Mixture-of-Experts model with LoRA", add_help=False)
    commands.add_parser("adapter", help="convert, merge, inspect, check LoRA adapters", add_help=False)
    commands.add_parser("profile", help="time one layer's step, phase by phase", add_help=False)
    commands.add_parser("timeline", help="where the time of recorded steps went", add_help=False)
    options = parser.parse_args(arguments)
    if options.with_torch:
        importlib.import_module("torch")
    found = info()
    sys.stdout.write((json.dumps(found, indent=2) if options.json else as_text(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
