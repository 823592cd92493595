"""CPUs, caches and pages of this machine, as Linux tells of them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch


def cpus_for(threads: int, allowed: set[int], root: Path = Path("/sys/devices/system/cpu")) -> set[int]:
    """As many of the allowed CPUs, of different cores as far as there are such and the system says so."""
    taken: set[str] = set()
    firsts, others = [], []
    for cpu in sorted(allowed):
        siblings = str(cpu)
        with suppress(OSError):
            siblings = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        (others if siblings in taken else firsts).append(cpu)
        taken.add(siblings)
    return set((firsts + others)[:threads])


def huge_pages_share(tensor: torch.Tensor) -> float:
    """Of the mapping that holds the tensor, how much is in huge pages; 0 where the system does not say."""
    size, inside = 0, False
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8") as mappings:
        for line in mappings:
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                begin, end = (int(bound, 16) for bound in bounds.groups())
                inside, size = begin <= tensor.data_ptr() < end, end - begin
            elif inside and line.startswith("AnonHugePages:"):
                return int(line.split()[1]) * 1024 / size
    return 0.0


def last_level_cache(cpus: set[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the last-level caches of these CPUs together, 0 where the system does not say."""
    caches: dict[str, int] = {}
    for cpu in cpus:
        index = root / f"cpu{cpu}/cache/index3"
        with suppress(OSError, ValueError):
            shared, size = ((index / name).read_text().strip() for name in ("shared_cpu_list", "size"))
            caches[shared] = int(size.removesuffix("K")) << 10
    return sum(caches.values())
