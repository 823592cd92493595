"""`python -m amx_sft_moe finetune`: the environment, the exit status, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .errors import FinetuneError
from .options import parse


class _Terminated(KeyboardInterrupt):
    """SIGTERM: whatever makes way for Ctrl-C makes way for it."""


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: the second would break off the tidying up
    raise _Terminated


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM, which batch systems and `kill` send, raises _Terminated within: nothing half done stays behind.

    Where it is ignored it stays so, as Python has it with Ctrl-C; afterwards its handler is the one of before.
    """
    before = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()  # only there handlers can be set
    if not in_main or before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


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
    """Exit status: 0 done; 1 the user can mend it, or the adapter is written but a stage after it or a report
    failed (standard error says what); 2 wrong options; 3 all is written, but stock PEFT finds another loss with
    the adapter; 130 Ctrl-C; 143 SIGTERM. Raises the OSError of a standard output that has not taken all, once
    everything else is done."""
    _prepare_environment()
    try:
        with _sigterm_interrupts():
            options = parse(list(sys.argv[1:] if argv is None else argv))  # imports torch for right options
            from . import job  # imports torch and transformers

            _quiet_libraries()
            say = job.terminal(options)
            found = job.run(options, say)
    except (FinetuneError, OSError) as error:  # OSError: a disk that fills up, a file that disappears
        sys.stderr.write(f"\nerror: {error}\n")
        return 1
    except KeyboardInterrupt as stop:
        word, status = ("terminated", 143) if isinstance(stop, _Terminated) else ("interrupted", 130)
        sys.stderr.write(f"\n{word}; what was not finished is not on disk\n")
        return status
    differs = found.adapter.stock_differs
    for told in [*found.errors, *([differs] if differs else [])]:
        sys.stderr.write(f"\nerror: {told}\n")
    if found.errors:
        return 1
    if differs:
        return 3
    say.end()
    return 0
