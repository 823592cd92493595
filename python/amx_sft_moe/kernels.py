"""Kernels that live in modules of their own, loaded when they are asked for."""

from __future__ import annotations

import copyreg
import importlib
import os
from typing import Any

from amx_sft_moe import _core
from amx_sft_moe.errors import KernelError

ENVIRONMENT = "AMX_SFT_MOE_KERNEL"
ONEDNN = "onednn"
_MODULE = "amx_sft_moe._onednn"


def load_onednn() -> tuple[Any, str]:
    """The provider of kernel ``onednn`` and an empty string, or ``None`` and why there is none."""
    try:
        return importlib.import_module(_MODULE).provider, ""
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            return None, f"its module cannot be loaded: {error}"
        return None, (
            "this package was built without oneDNN: install its headers and library (Debian: libdnnl-dev) and "
            "build the package again from source"
        )
    except ImportError as error:
        return None, (
            f"its module cannot be loaded: {error}. A wheel does not bring oneDNN along: install the version "
            "that it was built with (Debian: libdnnl2), or build the package from source beside yours"
        )


def provider_of(kernel: str) -> Any:
    """What ``_core`` needs to make an operator on ``kernel``: ``None`` for its own kernels.

    Raises:
        KernelError: it is ``onednn``, by name or by the environment, and this build or machine has none.
    """
    source, wanted = "kernel", kernel
    if kernel == "auto":
        source, wanted = ENVIRONMENT, os.environ.get(ENVIRONMENT, "")
    if wanted != ONEDNN:
        return None
    provider, why_not = load_onednn()
    if provider is None:
        names = dict.fromkeys(k["name"] for k in _core.info(None)["kernels"] if k["available"])
        raise KernelError(f"{source}: expected one of {', '.join(names)} or auto, got {ONEDNN}: {why_not}")
    return provider


def choice_of(kernel: str) -> _core.KernelChoice:
    """What ``kernel`` comes to now, for each type of weights; the environment has no say in it afterwards.

    Raises:
        KernelError: it is unknown, or this build or machine has none. TypeError: it is no str.
    """
    if not isinstance(kernel, str):
        raise TypeError(f"kernel: expected a str, got {type(kernel).__name__}")
    return _core.KernelChoice(kernel, provider_of(kernel))


def _made_anew(choice: _core.KernelChoice) -> tuple[Any, ...]:
    return choice_of, (choice.requested,)


# Copies and pickles may end up in another process, on another machine.
copyreg.pickle(_core.KernelChoice, _made_anew)
