"""The published experiment in one command: `python -m amx_sft_moe profile`.

options      what is measured
shapes       layers of known models
memory       how much a run takes, and how many experts fit
layer        weights, LoRA factors, inputs and gradients of one layer
reference    the same layer in float64, and how far the operator is from it
experiment   check, warm-up, forward, backward and both, each in its NVTX range
report       what is printed
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the given arguments; returns its exit status (see `cli.main`)."""
    from .cli import main as run  # imports torch

    return run(argv)
