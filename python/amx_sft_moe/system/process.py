"""This process: the CPUs it may run on, the OpenMP libraries in it, and the environment that steers threads."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amx_sft_moe import _core
from amx_sft_moe.system.cgroups import cpu_quota
from amx_sft_moe.system.files import ROOT, as_list, read, without_names

# libgomp.so.1, libgomp-a34b3233.so.1 (of a repaired wheel), libiomp5.so, libomp.so.5, libomp140.so
_OPENMP = re.compile(r"lib(?:gomp|iomp|omp)\d*(?:-[0-9a-f]+)?\.so[.\d]*$")
# Own variables, those of the OpenMP libraries, of oneDNN and of libraries with threads of their own, and what
# changes which library is loaded and in which pages memory lies.
_VARIABLES = re.compile(
    r"AMX_SFT_MOE_\w+|(?:OMP|KMP|GOMP|MKL|OPENBLAS|DNNL|ONEDNN)_\w+|LD_PRELOAD|LD_LIBRARY_PATH|MALLOC_\w+"
    r"|GLIBC_TUNABLES|THP_MEM_ALLOC_ENABLE"
)


def affinity() -> set[int]:
    """The CPUs that this thread may run on."""
    return os.sched_getaffinity(0)


def available_cpus() -> int:
    """How many CPUs this process may run on. OpenMP binds the thread that loads it to one of them where
    OMP_PROC_BIND or OMP_PLACES says so; it counts them before. Another OpenMP library that was loaded first may
    have bound it already."""
    return max(len(affinity()), _core.available_cpus())


DEFAULT_THREADS = "OMP_NUM_THREADS, else the CPUs of this process within its CPU quota"


def default_threads(root: Path = ROOT, variables: Mapping[str, str] | None = None) -> int:
    """How many threads to use where nobody said: :data:`DEFAULT_THREADS`.

    A list in OMP_NUM_THREADS is of nested regions, and the first counts; like OpenMP, what is no number is
    passed over.
    """
    variables = os.environ if variables is None else variables
    wanted = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if re.fullmatch(r"0*[1-9]\d*", wanted, re.ASCII):
        return int(wanted)
    quota = cpu_quota(root)
    cpus = available_cpus()
    return cpus if quota is None else max(min(cpus, math.ceil(quota)), 1)


def threads(openmp_threads: int, root: Path = ROOT) -> dict[str, Any]:
    """``openmp``: threads of a parallel region; ``affinity``: how many CPUs this process may run on,
    ``affinity_list``: on which of them this thread may, as Linux writes lists; ``cgroup_quota``: CPUs' worth of
    time, or ``None``."""
    return {
        "openmp": openmp_threads,
        "affinity": available_cpus(),
        "affinity_list": as_list(affinity()),
        "cgroup_quota": cpu_quota(root),
    }


def openmp_libraries(root: Path = ROOT) -> list[str]:
    """Paths of the OpenMP libraries mapped into this process, in order of address, by :func:`without_names`.

    More than one copy means pools of threads that wait for each other's CPUs.
    """
    paths: dict[str, None] = {}
    for line in (read(root / "proc/self/maps") or "").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and _OPENMP.search(path[0]):
            paths[path[0]] = None
    return [without_names(path) for path in paths]


def asks_for_huge_pages(variables: Mapping[str, str]) -> bool:
    """Whether these make torch's or the C library's allocator ask for transparent huge pages."""
    if variables.get("THP_MEM_ALLOC_ENABLE") == "1":  # torch: c10/core/impl/alloc_cpu.cpp
        return True
    return "glibc.malloc.hugetlb=1" in variables.get("GLIBC_TUNABLES", "").split(":")


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change what this package does, how many threads there are and what is loaded."""
    variables = os.environ if variables is None else variables
    return {name: without_names(variables[name]) for name in sorted(variables) if _VARIABLES.fullmatch(name)}
