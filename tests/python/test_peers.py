"""What benchmarks/peers.py says of the pages that weights lie in."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from amx_sft_moe.system import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import peers

BYTES = 16 << 20


def tensor_in_pages(advice: int) -> torch.Tensor:
    memory = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
    except OSError:
        pytest.skip("this kernel has no transparent huge pages")
    return torch.frombuffer(memory, dtype=torch.bfloat16).fill_(1.0)


def test_small_pages() -> None:
    assert peers.huge_pages_share(tensor_in_pages(mmap.MADV_NOHUGEPAGE)) == 0


@pytest.mark.skipif(machine.huge_pages()["transparent"] not in ("madvise", "always"), reason="turned off here")
def test_huge_pages() -> None:
    tensor = tensor_in_pages(mmap.MADV_HUGEPAGE)
    if "AnonHugePages:         0 kB" in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"):
        pytest.skip("the system has none left")
    assert 0 < peers.huge_pages_share(tensor) <= 1  # a mapping's ends rarely are whole ones
