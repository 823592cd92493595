"""What needs torch alone, where transformers is not there: modules of one's own, and what is asked of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LAYER = """
import sys
{block}
import torch
import amx_sft_moe
from amx_sft_moe.integrations import name_layers

shapes = {{"gate_proj": (4, 16, 32), "up_proj": (4, 16, 32), "down_proj": (4, 32, 16)}}
weights = {{name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}}
layer = torch.nn.Sequential(torch.nn.Identity(), amx_sft_moe.nn.SftMoeExperts(top_k=2, lora_rank=4, **weights))
assert name_layers(layer) == {{"1": "1"}}
found = amx_sft_moe.prepare(layer, batch_size=1, sequence_length=8)
assert found.trained_parameters == 4 * 4 * (32 + 16) * 3, found
amx_sft_moe.keep_experts_on_cpu(layer)
amx_sft_moe.prepare(torch.nn.ModuleList([layer[1]]), quiet=True)
assert "transformers" not in {{name for name, module in sys.modules.items() if module is not None}}
"""
BLOCKS = {
    "not installed": "sys.modules['transformers'] = None",
    "installed, not needed": "",
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_modules_of_one_s_own(block: str) -> None:
    command = [sys.executable, "-c", LAYER.format(block=block)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "LoRA r=4" in done.stdout
