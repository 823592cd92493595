"""A pass of the operator in torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from amx_sft_moe import _core


class _Ranges:
    """A pass, its groups and phases as torch's profiler sees them: ``amx_sft_moe::forward`` and in it
    ``amx_sft_moe::forward_gather``, ``amx_sft_moe::gather`` and so on, each while it runs.

    Phases are those that the calling thread works on; what its helpers do is in the operator's own record.
    """

    def __init__(self, name: str, operator: _core.SftMoe) -> None:
        self._name = name
        self._operator = operator
        self._open: list[record_function] = []

    def enter(self, name: str) -> None:
        """The pass enters a group or a phase; called by the operator."""
        self._open.append(record_function(f"amx_sft_moe::{name}").__enter__())

    def leave(self) -> None:
        """The pass leaves what it entered last; called by the operator."""
        self._open.pop().__exit__(None, None, None)

    def __enter__(self) -> None:
        self.enter(self._name)
        self._operator.ranges = self

    def __exit__(self, *exception: object) -> None:
        self._operator.ranges = None
        while self._open:  # more than one where Ctrl-C came during the pass
            self.leave()


_NO_RANGES = nullcontext()


def profiler_ranges(name: str, operator: _core.SftMoe) -> AbstractContextManager[None]:
    """The ranges of the pass ``name``, for as long as it runs."""
    # With no profiler attached this question is all that it costs.
    return _Ranges(name, operator) if _profiler_enabled() else _NO_RANGES
