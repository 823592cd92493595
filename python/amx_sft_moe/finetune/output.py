"""The folder of a run: tried before anything is trained; adapter and base come to lie in it together."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from amx_sft_moe.adapters.files import ADAPTER_FILES, replaced_directory, sync
from amx_sft_moe.errors import ArgumentError

from .errors import FinetuneError

ADAPTER, BASE = "adapter", "base-model"
REPORT, PICTURE, METRICS, TIMES = "report.md", "finetune.png", "metrics.json", "backward-times.txt"
REPORTS = (REPORT, PICTURE, METRICS, TIMES)
_RESERVE = 64 << 20  # bytes of the disk for tokenizer, reports and names of tensors

# Go even where this run writes none: another tokenizer's template would be taken for this one's.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
_MODEL = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class Output:
    """Until `keep`, `adapter` and `base` are folders aside, to write into; what else lies in the two stays."""

    folder: Path
    adapter: Path
    base: Path | None  # None: none is made
    _begun: ExitStack

    def require_space(self, what: str, needed: int) -> None:
        """FinetuneError where the disk has no room for `needed` bytes of `what` and for the small files beside
        it: after hours of training that would be late."""
        usage = shutil.disk_usage(self.adapter)
        free, needed = usage.free, needed + _RESERVE
        if usage.total and needed > free:  # some file systems do not tell: they have 0 bytes in all
            raise FinetuneError(
                f"--output {self.folder}: expected {needed:,} bytes of free space for {what}, got {free:,}"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a full disk and its like into a FinetuneError; safetensors has an error of its own for them."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise FinetuneError(f"--output {self.folder}: {error}") from error

    def keep(self, report: Callable[[], None] = lambda: None) -> None:
        """Puts adapter and base in their places. Reports of a run before go: they tell of another adapter.
        Those of this one are written by `report`, before a signal that has waited ends the run."""
        with self.writing(), _undisturbed():
            for folder in filter(None, (self.adapter, self.base)):
                for file in filter(Path.is_file, folder.iterdir()):
                    sync(file)
            self._begun.close()
            for name in REPORTS:
                (self.folder / name).unlink(missing_ok=True)
            report()


@contextmanager
def opened(folder: Path, with_base: bool) -> Iterator[Output]:
    """The folder of a run, made if need be; what is in it stays as it was until `Output.keep`, and no other run
    opens it before this one ends.

    Raises FinetuneError where it cannot be written, or another run works in it: after hours of training that
    would be late.
    """
    with ExitStack() as run, ExitStack() as begun:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run.enter_context(_locked(folder))
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
                pass
            for name in REPORTS:
                if (folder / name).is_dir():
                    raise ArgumentError(f"{name}: expected a file, got a directory")
            adapter = begun.enter_context(replaced_directory(folder / ADAPTER, (*ADAPTER_FILES, *_TOKENIZER)))
            base = None
            if with_base:
                base = begun.enter_context(replaced_directory(folder / BASE, (*_MODEL, *_TOKENIZER)))
        except (ArgumentError, OSError) as error:
            raise FinetuneError(f"--output {folder}: expected a folder to write into, got {error}") from error
        yield Output(folder, adapter, base, begun)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out: one of two would report on an adapter that the other has replaced.

    The folder itself is locked, not a file in it. The lock ends with the process, a killed one too.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # not every file system locks, and fewer lock folders: then as without
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FinetuneError(
                    f"--output {folder}: expected a folder in which no other run works, got one that another "
                    "finetune has open"
                ) from None
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end: half of two folders would be a base beside another's adapter, and
    an adapter without a report does not tell how it came about."""
    if threading.current_thread() is not threading.main_thread():  # only that one is interrupted
        yield
        return
    came: list[int] = []
    waiting = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, frame: came.append(number)) for each in waiting]
    try:
        yield
    finally:
        for each, handler in zip(waiting, before, strict=True):
            signal.signal(each, handler or signal.SIG_DFL)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
