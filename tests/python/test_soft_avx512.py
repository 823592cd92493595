"""tests/soft_avx512 stands in for every AVX512 intrinsic in use: CPUs with AVX512 compile none of it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOFT = ROOT / "tests/soft_avx512/amx_sft_moe/arch/intrinsics.hpp"
INTRINSIC = re.compile(r"\b_mm512_\w+|\b_mm256_maskz?_\w+")


def test_each_intrinsic_has_a_stand_in() -> None:
    headers = (ROOT / "include").rglob("*.hpp")
    used = {name for path in headers for name in INTRINSIC.findall(path.read_text(encoding="utf-8"))}
    assert len(used) > 50
    defined = set(re.findall(r"#define (\w+)", SOFT.read_text(encoding="utf-8")))
    assert used - defined == set()
