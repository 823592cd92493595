"""Limits that control groups (containers, batch systems) set, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from amx_sft_moe.system.files import ROOT, read, read_int

# Version 1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 1 << 60


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of the process's group and those above it, for ``controller`` of version 1 or for version 2.

    Inside a container the path in /proc/self/cgroup may be the host's, and only the mount's top is there.
    """
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        elif number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        else:
            continue
        group = top / path.lstrip("/")
        while group != top and top in group.parents:
            yield group
            group = group.parent
        yield top


def _cpu_quota(group: Path) -> float | None:
    both = (read(group / "cpu.max") or "").split()
    if len(both) == 2 and both[0] != "max":
        return int(both[0]) / int(both[1])
    quota, period = read_int(group / "cpu.cfs_quota_us"), read_int(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs' time the process may use; ``None`` without a limit."""
    quotas = (_cpu_quota(group) for group in _groups(root, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = read_int(group / name)
        if limit is not None and limit < _NO_LIMIT:
            return limit
    return None


def memory_limit(root: Path = ROOT) -> int | None:
    """How many bytes the process's group may use; ``None`` without a limit."""
    limits = (_memory_limit(group) for group in _groups(root, "memory"))
    return min((limit for limit in limits if limit is not None), default=None)


def _memory_left(group: Path) -> int | None:
    limit = _memory_limit(group)
    if limit is None:
        return None
    used = read_int(group / "memory.current") or read_int(group / "memory.usage_in_bytes") or 0
    lines = (line.partition(" ") for line in (read(group / "memory.stat") or "").splitlines())
    stat = {name: int(value) for name, _, value in lines if value.isdecimal()}
    # Page cache that the system would drop; of version 1, "total_" counts the groups below too, as usage does.
    cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return max(limit - max(used - cache, 0), 0)


def memory_left(root: Path = ROOT) -> int | None:
    """How many more bytes the process's group would get, page cache that can go counted as free; ``None``
    without a limit."""
    found = (_memory_left(group) for group in _groups(root, "memory"))
    return min((left for left in found if left is not None), default=None)
