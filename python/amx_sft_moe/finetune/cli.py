"""`python -m amx_sft_moe finetune`: the environment, the exit status, and nothing else."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from .errors import FinetuneError
from .options import parse


def _prepare_environment() -> None:
    """Settings that libraries read when they are imported, so before any of them is.

    Offline whatever the caller's environment says: this command never asks a hub.
    """
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _quiet_libraries() -> None:
    """Switches off what is known and says nothing about this run; every other warning stays."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # "Writing model shards" for one shard
    # PEFT asks transformers for a property that transformers has renamed.
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done; 1 the user can mend it, or all is written but stock PEFT could not read the adapter
    (standard error says what); 2 wrong options; 130 Ctrl-C."""
    _prepare_environment()
    try:
        options = parse(list(sys.argv[1:] if argv is None else argv))  # imports torch where options are right
        from . import job  # imports torch and transformers

        _quiet_libraries()
        found = job.run(options)
    except (FinetuneError, OSError) as error:  # OSError: a disk that fills up, a file that disappears
        sys.stderr.write(f"\nerror: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; what was not finished is not on disk\n")
        return 130
    if found.adapter.stock_error:
        sys.stderr.write(f"\nerror: {found.adapter.stock_error}\n")
        return 1
    return 0
