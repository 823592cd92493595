"""Runs a test that asks for a kernel once per kernel of this machine."""

from __future__ import annotations

import pytest

from cases import kernels


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``bf16_kernel`` and ``fp32_kernel`` run a test once per kernel of that kind."""
    for fixture, weights in (("bf16_kernel", "bfloat16"), ("fp32_kernel", "float32")):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, kernels(weights))
