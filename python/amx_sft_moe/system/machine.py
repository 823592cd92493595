"""The machine: CPU, caches, memory, NUMA nodes, huge pages, and whether it is a virtual one."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from amx_sft_moe.system.cgroups import memory_left, memory_limit
from amx_sft_moe.system.files import ROOT, count_of_list, read

_CPUS = "sys/devices/system/cpu"
_HUGE_PAGES = "sys/kernel/mm"


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    """The blocks of /proc/cpuinfo, one for each CPU."""
    blocks = []
    for block in (read(root / "proc/cpuinfo") or "").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        blocks.append({name.strip(): value.strip() for name, _, value in pairs})
    return [block for block in blocks if "processor" in block]


def cpu_name(root: Path = ROOT) -> str:
    """As the CPU names itself."""
    for block in _cpuinfo(root):
        if "model name" in block:
            return block["model name"]
    return platform.processor() or platform.machine()


def cpu_topology(root: Path = ROOT) -> dict[str, Any]:
    """``cpus`` (hardware threads), ``cores``, ``sockets``, and ``model`` as family-model-stepping."""
    blocks = _cpuinfo(root)
    if not blocks:
        return {}
    sockets = {block.get("physical id", "0") for block in blocks}
    cores = {(block.get("physical id", "0"), block.get("core id", block["processor"])) for block in blocks}
    model = "-".join(blocks[0].get(name, "?") for name in ("cpu family", "model", "stepping"))
    return {"cpus": len(blocks), "cores": len(cores), "sockets": len(sockets), "model": model}


def caches(root: Path = ROOT) -> list[dict[str, Any]]:
    """Caches of the first CPU: ``name`` (``"L1d"``, ``"L2"``, ...), ``bytes``, ``shared_by`` CPUs."""
    found = []
    for index in sorted((root / _CPUS / "cpu0/cache").glob("index*")):
        kind, size = read(index / "type"), re.fullmatch(r"(\d+)([KM]?)", read(index / "size") or "")
        if kind == "Instruction" or not size:
            continue
        level = read(index / "level") or "?"
        found.append(
            {
                "name": f"L{level}{'d' if kind == 'Data' else ''}",
                "bytes": int(size[1]) * {"": 1, "K": 2**10, "M": 2**20}[size[2]],
                "shared_by": count_of_list(read(index / "shared_cpu_list") or "0"),
            }
        )
    return found


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.partition(":") for line in (read(root / "proc/meminfo") or "").splitlines())
    return {name: int(value.split()[0]) for name, _, value in lines if value.split()}


def memory(root: Path = ROOT) -> dict[str, int]:
    """Bytes: ``total``, ``available``, and ``cgroup_limit`` where a control group sets one below the total."""
    found = _meminfo(root)
    names = (("total", "MemTotal"), ("available", "MemAvailable"))
    result = {name: found[key] * 1024 for name, key in names if key in found}
    limit = memory_limit(root)
    if limit is not None and limit < result.get("total", limit + 1):
        result["cgroup_limit"] = limit
    return result


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process would get without swapping: of the system, and of each group above it."""
    free = memory(root).get("available", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    left = memory_left(root)
    return free if left is None else min(free, left)


def numa_nodes(root: Path = ROOT) -> int:
    """How many NUMA nodes have memory; 1 where the system does not say."""
    return count_of_list(read(root / "sys/devices/system/node/has_memory") or "") or 1


def huge_pages(root: Path = ROOT) -> dict[str, Any]:
    """``transparent``: ``"always"``, ``"madvise"``, ``"never"`` or ``"not supported"``; ``reserved``: how many
    of the default size."""
    setting = read(root / _HUGE_PAGES / "transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", setting)
    reserved = _meminfo(root).get("HugePages_Total", 0)
    return {"transparent": chosen[1] if chosen else "not supported", "reserved": reserved}


def virtualised(root: Path = ROOT) -> dict[str, Any]:
    """``hypervisor``: its maker, ``"unknown"``, or ``None`` on bare metal; ``container``: true in one."""
    blocks = _cpuinfo(root)
    hypervisor = None
    if blocks and "hypervisor" in blocks[0].get("flags", "").split():
        names = (read(root / name) for name in ("sys/hypervisor/type", "sys/class/dmi/id/sys_vendor"))
        hypervisor = next(filter(None, names), "unknown")
    marks = (root / ".dockerenv", root / "run/.containerenv")
    kubernetes = root / "var/run/secrets/kubernetes.io"
    return {"hypervisor": hypervisor, "container": any(mark.exists() for mark in (*marks, kubernetes))}
