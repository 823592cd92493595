"""What a call meets that comes while an operator is in a pass."""

from __future__ import annotations

from collections.abc import Callable

from amx_sft_moe import StateError


class Within:
    """Calls ``function`` within each range of an operator's pass, and keeps what it raises; "" where it goes
    through."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function, self.errors = function, set[str]()

    def enter(self, name: str) -> None:
        try:
            self.function()
        except StateError as error:
            self.errors.add(str(error))
        else:
            self.errors.add("")

    def leave(self) -> None:
        pass
