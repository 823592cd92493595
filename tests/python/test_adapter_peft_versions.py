"""Adapters to and from other versions of stock PEFT, each in a process of its own.

``AMX_SFT_MOE_PEFT_PATHS`` lists directories (separated as on PATH) that hold one version of PEFT each, as
``pip install --no-deps --target DIR peft==0.18.1`` makes them; a directory may hold another transformers too.
Without it nothing runs here; the installed version is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from adapter_cases import OPTIONS, checkpoint, largest_difference, model_of, stock_adapter
from amx_sft_moe.adapters import check_adapter, convert_adapter, merge_adapter

PATHS = [path for path in os.environ.get("AMX_SFT_MOE_PEFT_PATHS", "").split(os.pathsep) if path]
WORKER = Path(__file__).with_name("peft_of_version.py")
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mixtral": {"use_rslora": True, "lora_alpha": 7},
    "gpt_oss": {},
    "qwen2": {"rank_pattern": {".*gate_up_proj": 6}, "alpha_pattern": {".*down_proj": 4}},
}


def run(path: str, jobs: list[dict[str, Any]], directory: Path) -> None:
    (directory / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(WORKER), str(directory / "jobs.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def version_of(merged: Path) -> str:
    with safe_open(merged, "pt") as handle:
        return handle.metadata()["peft"]


@pytest.mark.skipif(not PATHS, reason="AMX_SFT_MOE_PEFT_PATHS names no other versions of PEFT")
@pytest.mark.parametrize("path", PATHS)
def test_both_ways(path: str, tmp_path: Path) -> None:
    made = [
        {
            "base": str(checkpoint(family)),
            "adapter": str(tmp_path / family),
            "merged": str(tmp_path / f"{family}.safetensors"),
            "options": OPTIONS | options,
        }
        for family, options in CASES.items()
    ]
    run(path, made, tmp_path)
    loads, expected = [], {}
    version = version_of(tmp_path / "qwen3.safetensors")
    old = version.startswith("0.18.")
    for family in CASES:
        merged = load_file(tmp_path / f"{family}.safetensors")
        # Theirs, read by us.
        out = tmp_path / f"{family}-merged"
        merge_adapter(tmp_path / family, checkpoint(family), out, progress=False)
        assert largest_difference(model_of(out).state_dict(), merged) <= 1e-6
        # Ours, read by them: theirs written again, and one that the installed version saved.
        kinds = {"fused": ("peft-fused", version)}
        if family != "gpt_oss" and not old:
            kinds["single"] = ("per-expert", None)
        for name, (to, wanted) in kinds.items():
            for origin, source in (("own", tmp_path / family), ("other", stock_adapter(family)[0])):
                adapter = tmp_path / f"{family}-{name}-{origin}"
                convert_adapter(source, adapter, to, peft_version=wanted, base=checkpoint(family))
                job = {"base": str(checkpoint(family)), "adapter": str(adapter)}
                loads.append({**job, "merged": f"{adapter}.safetensors"})
                expected[loads[-1]["merged"]] = merged if origin == "own" else stock_adapter(family)[1]
                tools = {one.tool: one.loads for one in check_adapter(adapter).loads}
                assert tools["PEFT 0.18" if old else "PEFT from 0.20"], "as check says"
    run(path, loads, tmp_path)
    errors = [error.read_text() for error in tmp_path.glob("*.safetensors.error")]
    if any(re.search("unexpected keyword argument 'distributed_operation'", error) for error in errors):
        pytest.skip(f"PEFT {version} loads no MoE adapter with this transformers, not even its own")
    assert errors == []
    for merged, state in expected.items():
        assert largest_difference(load_file(merged), state) <= 1e-6, merged
