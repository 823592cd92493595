"""Runs a test that asks for a kernel once per kernel of this machine; fixtures that several files use."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# What the environment tells the tests. Anything else of this prefix speaks to the library, which would time,
# trace or choose kernels where a test counts on its defaults: it goes before anything reads it.
OF_THE_TESTS = {
    f"AMX_SFT_MOE_{name}"
    for name in (
        "EXPECTED_PEFT",
        "EXPECTED_TORCH",
        "HYPOTHESIS",
        "NSYS",
        "NSYS_EXPORTS",
        "PEFT_PATHS",
        "TEST_KERNELS",
        "TIMELINE_LARGE",
    )
}
for name in [name for name in os.environ if name.startswith("AMX_SFT_MOE_") and name not in OF_THE_TESTS]:
    del os.environ[name]

from cases import kernels  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``bf16_kernel`` and ``fp32_kernel`` run a test once per kernel of that kind."""
    for fixture, weights in (("bf16_kernel", "bfloat16"), ("fp32_kernel", "float32")):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, kernels(weights))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The x of every call that the transformers hook handed to the operator."""
    from amx_sft_moe.integrations import experts_hook

    seen: list[Any] = []
    original = experts_hook.sft_moe

    def counted(experts: Any, x: Any, *rest: Any) -> Any:
        seen.append(x)
        return original(experts, x, *rest)

    monkeypatch.setattr(experts_hook, "sft_moe", counted)
    return seen


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the library has warned of since, each reason once, whatever came before the test."""
    from amx_sft_moe.integrations import experts_hook

    for hook in experts_hook._hooks.values():
        hook._warned.clear()
    caplog.set_level(logging.WARNING, logger="amx_sft_moe")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "amx_sft_moe"]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which jobs in the background begin without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
