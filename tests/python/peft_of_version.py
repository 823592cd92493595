"""Run by tests in a process of its own, with some version of PEFT first on PYTHONPATH and without this
library: makes adapters and merges them the stock way.

    python peft_of_version.py JOBS.json

Each job: ``base`` and ``adapter`` directories, ``merged`` (a safetensors file to write); with ``options`` the
adapter is made (random factors) and saved, without it is loaded. A job that fails leaves ``merged`` + .error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def merged(job: dict) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(
        job["base"], dtype=torch.float32, experts_implementation="eager"
    )
    if "options" in job:
        model = get_peft_model(model, LoraConfig(**job["options"]))
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
        model.save_pretrained(job["adapter"])
    else:
        model = PeftModel.from_pretrained(model, job["adapter"])
    return {name: tensor.clone() for name, tensor in model.merge_and_unload().state_dict().items()}


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        try:
            state = merged(one)
        except Exception as reason:
            Path(one["merged"] + ".error").write_text(f"{type(reason).__name__}: {reason}")
        else:
            save_file(state, one["merged"], metadata={"peft": peft.__version__})
