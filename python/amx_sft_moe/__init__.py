"""Expert part of Mixture-of-Experts layers with LoRA, forward and backward, on the CPU.

    op = amx_sft_moe.SftMoe(num_experts=, top_k=, hidden_size=, intermediate_size=)    # your own training loop
    amx_sft_moe.nn.SftMoeExperts(...)                                                  # a torch module
    amx_sft_moe.register()                                                             # transformers and PEFT:
    AutoModelForCausalLM.from_pretrained(..., experts_implementation="amx_sft_moe")
    amx_sft_moe.prepare(model)                                                         # what trains, and memory
    amx_sft_moe.keep_experts_on_cpu(model)                                             # the rest: to a GPU

torch is optional: importing this package does not import it. ``nn``, ``adapters``, ``register``,
``load_model``, ``prepare`` and ``keep_experts_on_cpu`` need it.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from amx_sft_moe._version import __version__
from amx_sft_moe.errors import ArgumentError, KernelError, StateError
from amx_sft_moe.info import info
from amx_sft_moe.kept_memory import empty_cache, kept_memory
from amx_sft_moe.sft_moe import Gradients, SftMoe, Workspace

if TYPE_CHECKING:
    from amx_sft_moe import adapters, nn
    from amx_sft_moe import integrations as integrations
    from amx_sft_moe import timeline as timeline
    from amx_sft_moe.checkpoints import load_model
    from amx_sft_moe.integrations import register
    from amx_sft_moe.integrations.placement import keep_experts_on_cpu
    from amx_sft_moe.integrations.preparation import prepare

__all__ = [
    "ArgumentError",
    "Gradients",
    "KernelError",
    "SftMoe",
    "StateError",
    "Workspace",
    "__version__",
    "adapters",
    "empty_cache",
    "get_cmake_dir",
    "get_include",
    "info",
    "keep_experts_on_cpu",
    "kept_memory",
    "load_model",
    "nn",
    "prepare",
    "register",
]


def get_include() -> str:
    """Directory of the C++ headers that this package was built from, for a compiler's ``-I``."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def get_cmake_dir() -> str:
    """Directory of the CMake package files, for ``-Damx_sft_moe_DIR=``."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "share", "cmake", "amx_sft_moe")


# Imported when they are first asked for: they need torch, transformers or pandas. Submodule, name in it.
_LAZY = {
    "adapters": ("adapters", None),
    "integrations": ("integrations", None),
    "keep_experts_on_cpu": ("integrations.placement", "keep_experts_on_cpu"),
    "load_model": ("checkpoints", "load_model"),
    "nn": ("nn", None),
    "prepare": ("integrations.preparation", "prepare"),
    "register": ("integrations", "register"),
    "timeline": ("timeline", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    submodule, member = _LAZY[name]
    module = importlib.import_module(f"{__name__}.{submodule}")
    return module if member is None else getattr(module, member)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
