"""The main job from end to end, as a user runs it: tiny sizes, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "amx_sft_moe", "finetune", "--quick"]
ENVIRONMENT = {**os.environ, "HF_ENDPOINT": "http://localhost:9"}  # nobody answers there


def finetune(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, timeout=300
    )


class Run:
    """A finished run and what it left behind."""

    def __init__(self, folder: Path, *arguments: object):
        self.done = finetune(*arguments, cwd=folder)
        assert self.done.returncode == 0, self.done.stderr
        self.output = folder / "finetune-output"
        self.metrics = json.loads((self.output / "metrics.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Run:
    """A run without --model and --data."""
    return Run(tmp_path_factory.mktemp("made"))


def own_arguments(made: Run) -> list[object]:
    model = ["--model", made.output / "base-model", "--data", "data.jsonl"]
    return [*model, "--rank", 2, "--learning-rate", 1e-2, "--compare-steps", 0]


@pytest.fixture(scope="module")
def own(made, tmp_path_factory) -> Run:
    """A run on a checkpoint and a file of the user's own; the checkpoint is the first run's."""
    folder = tmp_path_factory.mktemp("own")
    lines = [{"prompt": f"Count to {n}:", "completion": " ".join(map(str, range(n)))} for n in range(2, 40)]
    lines += [{"text": f"Number {n} is {'even' if n % 2 == 0 else 'odd'}."} for n in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(folder, *own_arguments(made))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_leaves_exactly_what_it_says(made):
    assert files(made.output) == {
        "adapter",
        "base-model",
        "report.md",
        "finetune.png",
        "metrics.json",
        "backward-times.txt",
    }
    for name in files(made.output):
        assert name in made.done.stdout
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files(
        made.output / "adapter"
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files(made.output / "base-model")
    assert (made.output / "finetune.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((made.output / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(made.output / "base-model")  # not where it was made


def test_nothing_but_progress_is_on_standard_error(made):
    lines = re.split(r"[\r\n]+", made.done.stderr)
    noise = [line for line in lines if line.strip() and not re.match(r"\s*(base|LoRA|compare): ", line)]
    assert noise == []


def test_it_learns(made):
    base, lora = made.metrics["base_training"], made.metrics["lora_training"]
    assert abs(base["held_out"][0][1] - math.log(512)) < 0.3  # a fresh model knows nothing
    assert base["held_out"][-1][1] < base["held_out"][0][1] - 0.3
    assert lora["held_out_after"] < lora["held_out_before"]
    assert lora["held_out_before"] == lora["held_out"][0][1]
    for curve, steps in ((base, "base_steps"), (lora, "steps")):
        assert len(curve["losses"]) == len(curve["step_seconds"]) == made.metrics["options"][steps]
        assert curve["tokens_per_second"] > 0


def test_metrics_say_what_was_done(made):
    metrics = made.metrics
    assert metrics["model"]["experts"] == 4
    assert metrics["model"]["trained_experts"] > metrics["model"]["trained_attention"] > 0
    assert metrics["data"]["train_examples"] > metrics["data"]["held_out_examples"] > 0
    assert metrics["options"]["dtype"] == "bfloat16"
    assert set(metrics["environment"]) == {"kernel", "packages"}
    assert metrics["seconds"]["total"] == pytest.approx(
        sum(seconds for name, seconds in metrics["seconds"].items() if name != "total")
    )


def test_both_implementations_see_the_same_losses(made):
    ours, other = made.metrics["comparison"]
    assert (ours["name"], other["name"]) == ("amx_sft_moe", "grouped_mm")
    assert len(ours["losses"]) == len(other["losses"]) == made.metrics["options"]["compare_steps"]
    assert ours["losses"] == pytest.approx(other["losses"], abs=0.02)
    for lane in (ours, other):
        assert 0 < lane["median"]["forward"] + lane["median"]["backward"] < lane["median"]["step"]
        assert 0 < lane["experts_share"] < 1


def test_the_adapter_is_per_expert_and_stock_peft_finds_its_loss(made):
    from safetensors import safe_open

    adapter = made.metrics["adapter"]
    assert adapter["loss"] == made.metrics["lora_training"]["held_out_after"]
    assert adapter["stock_loss"] == pytest.approx(adapter["loss"], abs=5e-3)
    # It is the adapter that was found, not the base.
    assert adapter["stock_loss"] < made.metrics["lora_training"]["held_out_before"] - 2 * 5e-3
    with safe_open(made.output / "adapter" / "adapter_model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    prefix = "base_model.model.model.layers"
    for layer in range(2):
        assert f"{prefix}.{layer}.self_attn.q_proj.lora_A.weight" in names
        for expert in range(4):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                for factor in ("lora_A", "lora_B"):
                    assert f"{prefix}.{layer}.mlp.experts.{expert}.{projection}.{factor}.weight" in names


def test_the_backward_is_told_phase_by_phase(made):
    text = (made.output / "backward-times.txt").read_text()
    for name in ("[DOWN] D3_gemm: ", "[BWD TIMER] backward_down: ", "[BWD TIMER] backward_gate_up: "):
        assert text.count(name) == 1
    assert text.rstrip() in (made.output / "report.md").read_text()
    times = made.metrics["backward_times"]
    assert times["text"] == text.rstrip("\n")
    assert times["groups"]["backward_down"] > 0
    assert times["phases"]["D2_quantize"] == 0


@pytest.mark.parametrize("run", ["made", "own"])
def test_the_report_loads_the_adapter_from_any_directory(run, request, tmp_path):
    report = (request.getfixturevalue(run).output / "report.md").read_text()
    lines = re.search(r"```python\n(.*?)```", report, re.DOTALL)[1]
    subprocess.run([sys.executable, "-c", lines], check=True, cwd=tmp_path, env=ENVIRONMENT, timeout=120)


def test_a_checkpoint_and_a_file_of_ones_own(own):
    assert files(own.output) == {
        "adapter",
        "report.md",
        "finetune.png",
        "metrics.json",
        "backward-times.txt",
    }
    assert own.metrics["base_training"] is None
    assert own.metrics["comparison"] is None
    assert own.metrics["data"]["train_examples"] + own.metrics["data"]["held_out_examples"] == 78
    assert own.metrics["lora_training"]["held_out_after"] < own.metrics["lora_training"]["held_out_before"]
    assert own.metrics["adapter"]["stock_loss"] == pytest.approx(own.metrics["adapter"]["loss"], abs=5e-3)
    config = json.loads((own.output / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2
    assert Path(config["base_model_name_or_path"]).is_absolute()


def test_the_same_seed_gives_the_same_run(own, made, tmp_path):
    (tmp_path / "data.jsonl").write_bytes((own.output.parent / "data.jsonl").read_bytes())
    again = Run(tmp_path, *own_arguments(made))
    assert again.metrics["lora_training"]["losses"] == own.metrics["lora_training"]["losses"]
    tensors = "adapter/adapter_model.safetensors"
    assert (again.output / tensors).read_bytes() == (own.output / tensors).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "none.jsonl"], "cannot read the data file none.jsonl: No such file"),
        (["--model", "none"], "--model none: expected the folder of a checkpoint, got no such folder"),
        (["--model", "empty"], "--model empty/config.json: expected a configuration"),
        (["--kernel", "abacus"], "--kernel abacus .*portable"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    done = finetune(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(f"error: {message}", done.stderr)
    assert "Traceback" not in done.stderr


def test_models_of_another_kind_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    done = finetune("--model", "other", cwd=tmp_path)
    assert done.returncode == 1
    assert "--model other: expected routed experts" in done.stderr
    assert "got none in this 'llama' model" in done.stderr


def test_an_interrupt_leaves_no_half_adapter(made, tmp_path):
    arguments = ["--model", made.output / "base-model", "--steps", 100000]
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
        # Shells start background jobs with interrupts ignored, and what is ignored is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if line.strip().startswith("frozen"):  # the last line before LoRA training
            break
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    output = tmp_path / "finetune-output"
    assert not output.exists() or files(output) == set()
