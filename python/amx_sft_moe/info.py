"""What this build, this machine and this process offer, and which kernel is chosen and why: what one pastes
into a bug report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from amx_sft_moe import _core
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.kernels import ENVIRONMENT, ONEDNN, load_onednn
from amx_sft_moe.sft_moe import SftMoe
from amx_sft_moe.system import machine, process, versions
from amx_sft_moe.system.files import without_names
from amx_sft_moe.system.process import asks_for_huge_pages
from amx_sft_moe.system.report import as_text

__all__ = ["as_text", "info"]

_FILES = ("AMX_SFT_MOE_TIMER_FILE", "AMX_SFT_MOE_TRACE")  # that an operator opens when it is made


def info() -> dict[str, Any]:
    """A dict for people and for bug reports; every value is plain JSON.

    Names of the user and of this host are taken out of paths, home directories are ``~``, and of paths outside
    of them, of the Python environment and of the system's own folders only the last part stands here. What
    else the variables in ``environment`` say stands as it is.

    Keys: ``version``, ``compiler``, ``nvtx``; ``cpu``, ``topology``, ``virtualised``, ``caches``, ``memory``,
    ``numa_nodes``, ``huge_pages``; ``instruction_sets`` (with ``amx``: ``"amx"``, ``"amx (emulated)"`` or why
    not), ``amx_permission`` (``"granted"``, or ``"denied: "`` or ``"not asked: "`` and why); ``kernels`` (best
    first: ``name``, ``weights``, ``available``, ``why_not``), ``auto_kernel`` and ``auto_reason`` (per weight
    dtype); ``num_threads``, ``threads``, ``openmp_libraries``, ``environment``; ``python``, ``system``,
    ``packages`` (``None``: not installed), ``onednn``; ``findings``:
    what is likely to hurt, in words.

    Sizes are in bytes. Asks for the AMX permission where the CPU has AMX. torch is not imported.
    """
    provider, why_not = load_onednn()
    result: dict[str, Any] = _core.info(provider)
    if provider is None:
        result["kernels"] += [
            {"name": ONEDNN, "weights": weights, "available": False, "why_not": why_not}
            for weights in ("bfloat16", "float32")
        ]
    for kernel in result["kernels"]:
        kernel["why_not"] = without_names(kernel["why_not"])
    result["auto_kernel"] = {dtype: without_names(name) for dtype, name in result["auto_kernel"].items()}
    result["auto_reason"] = {
        weights: why_chosen(result["kernels"], result["instruction_sets"], weights, kernel)
        for weights, kernel in result["auto_kernel"].items()
    }
    result.update(
        cpu=machine.cpu_name(),
        topology=machine.cpu_topology(),
        virtualised=machine.virtualised(),
        caches=machine.caches(),
        memory=machine.memory(),
        numa_nodes=machine.numa_nodes(),
        huge_pages=machine.huge_pages(),
        threads=process.threads(result["num_threads"]),
        openmp_libraries=process.openmp_libraries(),
        environment=process.environment(),
        python=platform.python_version(),
        system=versions.system_versions(),
        packages=versions.package_versions(),
        onednn=None if provider is None else sys.modules["amx_sft_moe._onednn"].onednn_version,
    )
    result["findings"] = findings(result) + refusals()
    return result


def why_chosen(
    kernels: Sequence[Mapping[str, Any]],
    instruction_sets: Mapping[str, Any],
    weights: str,
    kernel: str,
    variables: Mapping[str, str] | None = None,
) -> str:
    """In words, why ``kernel="auto"`` means ``kernel`` for these weights: the environment, or what each kernel
    before it in the list lacks, and on which measurement it comes before the next. Empty where ``kernel`` is
    ``"none: "`` and a reason."""
    if _is_none(kernel):
        return ""
    wanted = (os.environ if variables is None else variables).get(ENVIRONMENT)
    if wanted:
        return f"{ENVIRONMENT}={wanted}"
    candidates = [k for k in kernels if k["weights"] == weights]
    place = next((i for i, k in enumerate(candidates) if k["name"] == kernel), len(candidates))
    reasons = []
    if weights == "bfloat16" and kernel in ("avx512", "avx512_bf16") and instruction_sets.get("avx512_bf16"):
        slow = instruction_sets.get("slow_dpbf16")
        reasons.append(
            "fp32 FMA has twice the peak of VDPBF16PS on this CPU (Intel)"
            if slow
            else "VDPBF16PS has twice the peak of fp32 FMA on this CPU"
        )
    else:
        reasons.append("the best that this CPU has for these weights")
    reasons += [f"not {k['name']}: {k['why_not']}" for k in candidates[:place] if not k["available"]]
    return "; ".join(reasons)


def findings(found: Mapping[str, Any]) -> list[str]:
    """What in the dict of :func:`info` is likely to make training slow or fail; one sentence each."""
    result = []
    threads = found["threads"]
    libraries = found["openmp_libraries"]
    if len(libraries) > 1:
        result.append(
            f"{len(libraries)} OpenMP libraries are loaded, and their threads wait for each other's CPUs: keep "
            "one. LD_PRELOAD of another one, or a package that brings its own, is the usual cause"
        )
    if threads["openmp"] > threads["affinity"]:
        result.append(
            f"{threads['openmp']} OpenMP threads on the {threads['affinity']} CPUs that the process may use: "
            "set OMP_NUM_THREADS"
        )
    quota = threads["cgroup_quota"]
    if quota is not None and threads["openmp"] > quota:
        result.append(
            f"{threads['openmp']} OpenMP threads on a quota of {quota:g} CPUs: they are stopped when it is "
            "used up; set OMP_NUM_THREADS"
        )
    if found["amx_permission"].startswith("denied"):
        result.append("this CPU has AMX, and the operating system refused it: the AMX kernel is not used")
    if found["packages"]["torch"] and not found["instruction_sets"]["avx512"]:
        result.append(
            "torch multiplies bfloat16 slowly on a CPU without AVX512: keep all but the experts in float32, "
            'load_model(..., dense_dtype="auto")'
        )
    pages = found["huge_pages"]["transparent"]
    if found["packages"]["torch"] and pages == "madvise" and not asks_for_huge_pages(found["environment"]):
        result.append(
            "weights that torch allocates lie in pages of 4 KiB: with THP_MEM_ALLOC_ENABLE=1 in front of the "
            "command they lie in huge ones, and steps of 8 to 512 tokens take 2 to 8 % less time (on Zen 4)"
        )
    kernels = found["auto_kernel"].items()
    return result + [f"{ENVIRONMENT} names no kernel for {weights}" for weights, k in kernels if _is_none(k)]


def refusals() -> list[str]:
    """Why an operator cannot be made in this environment, whatever its sizes: a variable for dumps that says
    nothing, or a file of theirs that cannot be written. The first reason only, as whoever makes one is told."""
    import numpy as np  # which importing the package does not need

    try:
        # kernel: of the environment's, findings() tells. The variables are read once there are weights.
        op = SftMoe(num_experts=1, top_k=1, hidden_size=1, intermediate_size=1, kernel="portable")
        with _no_new_files():
            op.set_base(gate_up_proj=np.zeros((1, 2, 1), np.float32), down_proj=np.zeros((1, 1, 1), np.float32))
    except ArgumentError as reason:
        return [f"no operator can be made: {without_names(str(reason))}"]
    return []


@contextmanager
def _no_new_files() -> Iterator[None]:
    """Takes away the empty files that an operator leaves where it tries whether it can write."""
    paths = [path for name in _FILES if (path := os.environ.get(name)) and not os.path.lexists(path)]
    try:
        yield
    finally:
        for path in paths:
            with suppress(OSError):  # none was made
                if os.path.getsize(path) == 0:
                    os.unlink(path)


def _is_none(kernel: str) -> bool:
    # What _core.info says where the environment asks in vain, and why.
    return kernel.startswith("none: ")
