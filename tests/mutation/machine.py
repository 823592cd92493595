"""The kernels that the tests run on, and what this machine lacks for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Label (tests/support/moe.hpp) to the source of tests/support/ that instantiates the operator for it.
SOURCES = {
    "portable_bf16": "moe_portable_bf16",
    "portable_fp32": "moe_portable_fp32",
    "avx2_bf16": "moe_avx2_bf16",
    "avx2_fp32": "moe_avx2_fp32",
    "avx512_bf16": "moe_avx512_widened_bf16",
    "avx512_fp32": "moe_avx512_fp32",
    "avx512_bf16_bf16": "moe_avx512_bf16",
    "amx_bf16_bf16": "moe_amx_bf16",
    "onednn_bf16_bf16": "moe_onednn_bf16",
    "onednn_zmm_fp32": "moe_onednn_fp32",
    "onednn_ymm_bf16": "moe_onednn_widened_bf16",
    "onednn_ymm_fp32": "moe_onednn_avx2_fp32",
    "onednn_plain_fp32": "moe_onednn_plain_fp32",
}


@dataclass(frozen=True)
class Machine:
    """What decides which kernels the tests can run."""

    flags: frozenset[str]  # of the CPU
    simde: bool
    onednn: bool

    @staticmethod
    def this() -> Machine:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return Machine(
            frozenset(flags[1].split()) if flags else frozenset(),
            Path("/usr/include/simde/x86/avx512.h").exists(),
            Path("/usr/include/dnnl.hpp").exists(),
        )

    @property
    def has_avx512(self) -> bool:
        return {"avx512f", "avx512_bf16"} <= self.flags

    @property
    def soft_avx512(self) -> bool:
        """Whether the tests shall run AVX512's kernels, and by the emulator AMX's, in software."""
        return not self.has_avx512 and self.simde

    def lacks(self, label: str) -> str:
        """What is missing for the tests of a kernel; empty: nothing."""
        kernel, _, rest = label.partition("_")
        if kernel == "onednn" and not self.onednn:
            return "oneDNN (Debian: libdnnl-dev)"
        if label in ("onednn_bf16_bf16", "onednn_zmm_fp32"):
            return "" if self.has_avx512 else "AVX512-BF16 in the CPU itself"
        if kernel in ("avx512", "amx") and not (self.has_avx512 or self.simde):
            return "AVX512-BF16, or SIMDe in its place (Debian: libsimde-dev)"
        wants_avx2 = kernel not in ("portable", "onednn") or rest.startswith("ymm")
        return "AVX2" if wants_avx2 and "avx2" not in self.flags else ""
