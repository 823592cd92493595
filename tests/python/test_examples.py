"""The examples of ``examples/python``, as a user runs them: in processes of their own, a few steps each."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "python"
NUMBER = r"(-?[\d.]+(?:e-?\d+)?)"


class Running:
    """An example that has been started; several can run side by side."""

    def __init__(self, folder: Path, *command: object, threads: int = 1) -> None:
        environment = os.environ | {
            "HF_ENDPOINT": "http://localhost:9",  # nobody answers there
            "OMP_NUM_THREADS": str(threads),
        }
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def output(self) -> str:
        """Standard output of a run that ended well, with its experts in the operator."""
        try:
            output, errors = self.process.communicate(timeout=500)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, errors
        assert "default implementation" not in errors
        return output


def run(folder: Path, *command: object) -> str:
    return Running(folder, *command).output()


def numbers(pattern: str, text: str) -> list[float]:
    """Of the one place where the pattern, with NUMBER for ``#``, is found."""
    [found] = re.findall(pattern.replace("#", NUMBER), text)
    return [float(number) for number in (found if isinstance(found, tuple) else (found,))]


def require_adapter(folder: Path) -> None:
    """Both layers, each expert, each projection: with a B that has been trained."""
    state = load_file(folder / "adapter_model.safetensors")
    assert (folder / "adapter_config.json").is_file()
    for layer in range(2):
        assert state[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_B.weight"].any()
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"base_model.model.model.layers.{layer}.mlp.experts.%d.{projection}.lora_B.weight"
            assert any(state[name % expert].any() for expert in range(8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_hf_trainer_without_the_gpu_that_it_is_told(tmp_path):
    command = [sys.executable, EXAMPLES / "hf_trainer.py", "--device", "cuda"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--device cuda: expected a GPU that torch can use, got none" in done.stderr


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("plain_loop", "--steps"),
        ("plain_loop", "--accumulation"),
        ("resume", "--stop-after"),
        ("accelerate_ddp", "--batch-size"),
    ],
)
@pytest.mark.parametrize("number", [0, -1])
def test_numbers_that_make_no_training(tmp_path, name, option, number):
    command = [sys.executable, EXAMPLES / f"{name}.py", f"{option}={number}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{option}: expected at least 1, got {number}" in done.stderr


def test_hf_trainer(tmp_path):
    said = run(tmp_path, EXAMPLES / "hf_trainer.py", "--steps", 4, "--output", "adapter")
    before, after = numbers("held-out loss: # before, # after 4 steps", said)
    assert after < before
    for name in ("forward_ms", "backward_ms", "share_of_step"):
        assert numbers(f"{name}: # in the last steps", said) > [0]
    require_adapter(tmp_path / "adapter")


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("trl", "datasets")),
    reason="trl and datasets are not installed (pip install '.[examples]')",
)
def test_trl_sft(tmp_path):
    arguments = ["--steps", 3, "--output", "adapter", "--family", "olmoe"]
    said = run(tmp_path, EXAMPLES / "trl_sft.py", *arguments)
    before, after = numbers("held-out loss: # before, # after 3 steps", said)
    assert after < before
    require_adapter(tmp_path / "adapter")


def test_plain_loop(tmp_path):
    arguments = ["--steps", 3, "--output", "adapter", "--family", "deepseek_v3", "--gradient-checkpointing"]
    said = run(tmp_path, EXAMPLES / "plain_loop.py", *arguments)
    before, after = numbers("held-out loss: # before, # after 3 steps", said)
    assert after < before
    for name in ("forward_gate_up", "backward_down", "D3_gemm", "D4_lora_grad"):
        assert numbers(rf"\n  {name}: #\n", said) > [0]
    assert numbers("operator: # ms per step", said) < numbers("\nstep: # ms", said)
    require_adapter(tmp_path / "adapter")


def steps_of(said: str) -> list[tuple[float, ...]]:
    """(loss, gradient norm) of each step."""
    found = re.findall(rf"step \d+: loss {NUMBER}, gradient norm {NUMBER}", said)
    return [tuple(map(float, pair)) for pair in found]


def test_two_processes_do_what_one_does_with_twice_the_batch(tmp_path):
    arguments = [EXAMPLES / "accelerate_ddp.py", "--dtype", "float32", "--steps", 4]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    one = Running(tmp_path, *arguments, "--threads", 1, "--output", "one")
    two = Running(tmp_path, *torchrun, *arguments, "--threads", 1, "--output", "two")
    of_one, of_two = one.output(), two.output()
    assert "processes: 1, threads of each: 1" in of_one
    assert "processes: 2, threads of each: 1" in of_two

    assert len(steps_of(of_one)) == 4
    for expected, found in zip(steps_of(of_one), steps_of(of_two), strict=True):
        assert found == pytest.approx(expected, rel=2e-6)
    adapters = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two")]
    assert adapters[0].keys() == adapters[1].keys()
    for name, expected in adapters[0].items():
        # AdamW divides by the gradient's size: where that is next to nothing, noise grows.
        difference = (adapters[1][name] - expected).norm() / expected.norm().clamp_min(1e-6)
        assert difference < 1e-3, name
    # Both processes use the file's own pages.
    for process in range(2):
        mapped, copied = numbers(f"weights in process {process}: # MB mapped, # MB of them copied", of_two)
        assert mapped > 0.5
        assert copied == 0


def test_epochs_have_no_end(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("accelerate_ddp")
    loader = DataLoader(range(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    rows = [row for batch in itertools.islice(example.epochs(loader), 12) for row in batch.tolist()]
    epochs = [rows[:8], rows[8:16], rows[16:]]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_more_rows_a_step_than_there_are_is_refused(tmp_path):
    command = [sys.executable, str(EXAMPLES / "accelerate_ddp.py"), "--batch-size", "1000000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode != 0
    assert re.search(r"--batch-size: expected at most \d+, the rows there are, got 1000000", done.stderr)


def test_resumed_training_has_the_bits_of_uninterrupted_training(tmp_path):
    arguments = [EXAMPLES / "resume.py", "--steps", 8, "--output"]
    whole = Running(tmp_path, *arguments, "whole")
    half = Running(tmp_path, *arguments, "halves", "--stop-after", 3)
    stopped = half.output()
    resumed = run(tmp_path, *arguments, "halves")

    def told(said: str) -> list[str]:
        return [line for line in said.splitlines() if line.startswith(("trainer ", "plain "))]

    assert len(told(stopped)) == 2 * (3 + 1)
    assert told(resumed) == told(whole.output())
    assert len(told(resumed)) == 2 * (8 + 1)
    # It went on, it did not begin again: the Trainer prints only the steps that it takes.
    assert len(re.findall(r"^\{'loss'", resumed, re.MULTILINE)) == 8 - 3


def test_the_script_for_llama_factory(tmp_path, monkeypatch):
    """With a plain Trainer where LLaMA-Factory would be."""
    page = (ROOT / "docs" / "llama-factory.md").read_text(encoding="utf-8")
    [script] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [settings] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "settings.yaml").write_text(settings)
    trainers = []

    def run_exp(options, callbacks):
        from peft import LoraConfig, get_peft_model
        from transformers import Trainer, TrainingArguments

        from models import base_model, batch

        targets = options["lora_target"].split(",")
        model = get_peft_model(
            base_model("grouped_mm"),
            LoraConfig(task_type="CAUSAL_LM", r=options["lora_rank"], target_modules=targets),
        )
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no"
        )
        rows = [{"input_ids": row, "labels": row} for row in batch(rows=4)["input_ids"]]
        trainers.append(Trainer(model, arguments, train_dataset=rows, callbacks=callbacks))
        trainers[-1].train()

    stub = types.ModuleType("llamafactory.train.tuner")
    stub.run_exp = run_exp
    for name in ("llamafactory", "llamafactory.train"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "settings.yaml")])
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})

    [trainer] = trainers
    assert any(entry.get("amx_sft_moe/backward_ms", 0) > 0 for entry in trainer.state.log_history)
    state = load_file(tmp_path / "per-expert" / "adapter_model.safetensors")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert state[f"base_model.model.model.layers.1.mlp.experts.5.{projection}.lora_B.weight"].any()
