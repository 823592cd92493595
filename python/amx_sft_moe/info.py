"""What this build and this machine offer: instruction sets, the AMX permission, kernels and the one
chosen."""

from __future__ import annotations

import os
import platform
from typing import Any

from amx_sft_moe import _core
from amx_sft_moe.kernels import ONEDNN, load_onednn

_ENVIRONMENT = (
    "AMX_SFT_MOE_KERNEL",
    "AMX_SFT_MOE_TIMER",
    "AMX_SFT_MOE_TIMER_FILE",
    "AMX_SFT_MOE_TRACE",
    "AMX_SFT_MOE_TRACE_LIMIT",
    "OMP_NUM_THREADS",
)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def info() -> dict[str, Any]:
    """A dict for people and for bug reports; every value is plain JSON.

    Keys: ``version``, ``cpu``, ``instruction_sets`` (with ``amx``: ``"amx"``, ``"amx (emulated)"`` or why
    not), ``kernels`` (best first: ``name``, ``weights``, ``available``, ``why_not``), ``auto_kernel`` (per
    weight dtype), ``num_threads``, ``nvtx``, ``compiler``, ``python`` and ``environment``.
    """
    result: dict[str, Any] = {"cpu": _cpu_name(), "python": platform.python_version()}
    provider, why_not = load_onednn()
    result.update(_core.info(provider))
    if provider is None:
        result["kernels"] += [
            {"name": ONEDNN, "weights": weights, "available": False, "why_not": why_not}
            for weights in ("bfloat16", "float32")
        ]
    result["environment"] = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return result


def as_text(found: dict[str, Any]) -> str:
    """The dict of :func:`info` as lines for a terminal."""
    sets = found["instruction_sets"]
    lines = [
        f"amx_sft_moe {found['version']} (Python {found['python']}, {found['compiler']})",
        f"CPU: {found['cpu']}, {found['num_threads']} threads",
        "instruction sets: " + ", ".join(name for name, have in sets.items() if have is True),
        f"AMX: {sets['amx']}",
        f"NVTX ranges: {'compiled in' if found['nvtx'] else 'not compiled in'}",
        "kernels, best first:",
    ]
    for kernel in found["kernels"]:
        state = "available" if kernel["available"] else f"not available: {kernel['why_not']}"
        lines.append(f"  {kernel['name']:<14} {kernel['weights']:<9} {state}")
    for dtype, kernel in found["auto_kernel"].items():
        lines.append(f"kernel for {dtype} weights: {kernel}")
    lines += [f"environment: {name}={value}" for name, value in found["environment"].items()]
    return "\n".join(lines)
