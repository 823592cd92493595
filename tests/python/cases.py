"""What tests run on: the kernels of this machine, and sizes of layers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import amx_sft_moe

# Names, separated by commas: restricts the tests that run on every kernel (the emulated run does so).
ONLY = [name for name in os.environ.get("AMX_SFT_MOE_TEST_KERNELS", "").split(",") if name]


def kernels(weights: str) -> list[str]:
    """Names of the kernels of this machine for ``"bfloat16"`` or ``"float32"`` base weights."""
    return [
        kernel["name"]
        for kernel in amx_sft_moe.info()["kernels"]
        if kernel["available"] and kernel["weights"] == weights and (not ONLY or kernel["name"] in ONLY)
    ]


@dataclass
class Sizes:
    """E experts, k routes a token, H hidden, I intermediate, rank r of gate, up and down, T tokens."""

    experts: int = 4
    top_k: int = 2
    hidden: int = 32
    intermediate: int = 24
    ranks: tuple[int, int, int] = field(default=(4, 4, 4))
    tokens: int = 10

    def operator(self, **options: object) -> amx_sft_moe.SftMoe:
        """An operator of these sizes."""
        return amx_sft_moe.SftMoe(self.experts, self.top_k, self.hidden, self.intermediate, **options)

    def __str__(self) -> str:
        ranks = ".".join(str(rank) for rank in self.ranks)
        return f"E{self.experts}k{self.top_k}H{self.hidden}I{self.intermediate}r{ranks}T{self.tokens}"


# Odd primes, one of everything, k = E, and extents around the tiles of 16 and 32.
SHAPES = [
    Sizes(),
    Sizes(experts=5, top_k=2, hidden=67, intermediate=43, ranks=(7, 7, 7), tokens=19),
    Sizes(experts=3, top_k=3, hidden=16, intermediate=32, ranks=(1, 1, 1), tokens=33),
    Sizes(experts=1, top_k=1, hidden=1, intermediate=1, ranks=(2, 2, 2), tokens=3),
    Sizes(experts=6, top_k=2, hidden=31, intermediate=65, ranks=(16, 3, 0), tokens=40),
    Sizes(experts=2, top_k=1, hidden=96, intermediate=17, ranks=(0, 5, 17), tokens=1),
]
