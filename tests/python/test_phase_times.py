"""Phase times where training looks at them: torch's profiler, the Trainer's logs, names of layers."""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from amx_sft_moe.integrations import PhaseTimesCallback, log_phase_times, name_layers
from amx_sft_moe.layer import _of_this_thread, collect_times, take_times
from amx_sft_moe.nn import SftMoeExperts
from cases import Sizes
from models import add_lora, base_model, batch
from reference import make_layer

SIZES = Sizes(tokens=12)


def module(**options: Any) -> tuple[SftMoeExperts, Any]:
    layer = make_layer(SIZES)
    experts = SftMoeExperts(
        2, gate_proj=layer.gate_proj, up_proj=layer.up_proj, down_proj=layer.down_proj, lora_rank=4, **options
    )
    return experts, layer


def ranges_of(profile: torch.profiler.profile) -> list[tuple[str, tuple[str, ...]]]:
    """Each of our ranges, without its prefix, with those around it, from the outermost."""
    ours = sorted(
        (event for event in profile.events() if event.name.startswith("amx_sft_moe::")),
        key=lambda event: (event.time_range.start, -event.time_range.end),
    )
    found = []
    for event in ours:
        around = [
            other
            for other in ours
            if other is not event
            and other.time_range.start <= event.time_range.start
            and event.time_range.end <= other.time_range.end
        ]
        found.append(
            (
                event.name.removeprefix("amx_sft_moe::"),
                tuple(e.name.removeprefix("amx_sft_moe::") for e in around),
            )
        )
    return found


def test_the_profiler_sees_groups_and_phases() -> None:
    experts, layer = module(num_threads=1)
    layer.x.requires_grad_()
    experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
    with torch.profiler.profile() as profile:
        experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
    ranges = ranges_of(profile)
    outermost = [name for name, around in ranges if not around]
    assert outermost == ["forward", "backward"]
    within = dict(ranges)
    for name, around in {
        "forward_gather": ("forward",),
        "forward_gate_up": ("forward",),
        "gemm(gate)+gemm(up)+activation": ("forward", "forward_gate_up"),
        "gemm(down)": ("forward", "forward_down"),
        "backward_down": ("backward",),
        "D3_gemm": ("backward", "backward_down"),
        "D4_lora_grad": ("backward", "backward_down"),
        "silu_backward": ("backward", "backward_activation"),
        "base_pass(gate)+base_pass(up)": ("backward", "backward_gate_up"),
        "GU4_sum_tokens": ("backward", "backward_gate_up"),
    }.items():
        assert within[name] == around, name


def test_no_ranges_without_a_profiler() -> None:
    experts, layer = module()
    with torch.profiler.profile():
        experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
    assert experts.experts().operator().ranges is None
    experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
    assert experts.experts().operator().ranges is None


def test_the_profilers_table_has_both_passes() -> None:
    experts, layer = module()
    with torch.profiler.profile() as profile:
        experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"amx_sft_moe::forward", "amx_sft_moe::backward"} <= names


@contextmanager
def unraisable_messages() -> Iterator[list[str]]:
    """What was raised where nobody could catch it."""
    seen: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: seen.append(str(unraisable.exc_value))
    try:
        yield seen
    finally:
        sys.unraisablehook = before


def test_a_watcher_that_raises_does_not_fail_the_pass() -> None:
    class Broken:
        def enter(self, name: str) -> None:
            raise RuntimeError(name)

        def leave(self) -> None:
            raise RuntimeError("leave")

    experts, layer = module(num_threads=2)
    expected = experts(layer.x, layer.expert_ids, layer.routing_weights)
    operator = experts.experts().operator()
    operator.ranges = Broken()
    try:
        with unraisable_messages() as seen:
            found = experts(layer.x, layer.expert_ids, layer.routing_weights)
    finally:
        operator.ranges = None
    assert torch.equal(found, expected)
    assert "forward_gather" in seen
    with pytest.raises(AttributeError):
        operator.ranges = object()


def test_ctrl_c_comes_once_the_pass_is_over() -> None:
    class Interrupted:
        calls = 0

        def enter(self, name: str) -> None:
            self.calls += 1
            signal.raise_signal(signal.SIGINT)

        def leave(self) -> None:
            self.calls += 1

    layer = make_layer(SIZES)
    op = SIZES.operator()
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
    y = torch.full_like(layer.x, float("nan"))
    watcher = op._core.ranges = Interrupted()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with unraisable_messages() as seen, pytest.raises(KeyboardInterrupt):
            op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, out=y)
    finally:
        signal.signal(signal.SIGINT, before)
        op._core.ranges = None
    assert not seen
    assert watcher.calls == 1
    assert y.isfinite().all(), "the pass was not cut short"


def test_totals_of_a_threads_operators() -> None:
    experts, layer = module()
    collect_times(True)
    try:
        take_times()
        for _ in range(3):
            experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
        another = threading.Thread(
            target=lambda: experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
        )
        another.start()
        another.join()
        found = [totals for totals in take_times() if totals[0]["passes"]]
        assert [(forward["passes"], backward["passes"]) for forward, backward in found] == [(3, 3)]
        forward, backward = found[0]
        assert forward["tokens"] == 36
        assert backward["routed_rows"] == 72
        assert sum(backward["groups"].values()) <= backward["total_ms"]
        last = experts.experts().operator().last_times(True)
        assert backward["flop"] == {name: 3 * flop for name, flop in last["flop"].items()}
        assert not [totals for totals in take_times() if totals[0]["passes"]], "taken"
    finally:
        collect_times(False)
    experts(layer.x, layer.expert_ids, layer.routing_weights)
    assert not [totals for totals in take_times() if totals[0]["passes"]]


def test_totals_of_operators_that_are_gone() -> None:
    """As where each forward meets new memory: FSDP's gathered weights."""
    collect_times(True)
    try:
        take_times()
        for _ in range(3):
            experts, layer = module()
            experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
            del experts
        gc.collect()
        found = [[of_passes["passes"] for of_passes in totals] for totals in take_times()]
        assert [counts for counts in found if any(counts)] == [[3, 3]]
        assert not [totals for totals in take_times() if totals[0]["passes"]], "taken"
    finally:
        collect_times(False)


def test_totals_hold_nothing_of_a_thread_that_has_ended() -> None:
    experts, layer = module()
    made = []

    def train() -> None:
        collect_times(True)
        experts(layer.x, layer.expert_ids, layer.routing_weights)
        made.append(weakref.ref(_of_this_thread.operators[experts.experts()]))
        collect_times(False)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    gc.collect()
    assert made[0]() is None


class Reporter(TrainerCallback):
    """Stands for TensorBoard's callback: keeps what it is told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def trainer(tmp_path: Path, reporter: Reporter, **options: Any) -> Trainer:
    model = add_lora(base_model("amx_sft_moe"))
    rows = [{name: tensor[n] for name, tensor in batch(8).items()} for n in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **({"logging_steps": 2} | options),
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=[reporter])


def test_the_trainers_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    job = trainer(tmp_path, reporter, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1)
    log_phase_times(job)
    job.train()
    printed = capsys.readouterr().out
    assert "'loss'" in printed
    assert "amx_sft_moe" not in printed
    logs = [entry for entry in reporter.logs if "loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        inside = entry["amx_sft_moe/forward_ms"] + entry["amx_sft_moe/backward_ms"]
        assert 0 < entry["amx_sft_moe/share_of_step"] < 1
        assert 0 <= entry["amx_sft_moe/waiting"] < 1
        assert entry["amx_sft_moe/gflops"] > 0
        groups = sum(
            ms for name, ms in entry.items() if name.split("/")[-1].startswith(("forward_", "backward_"))
        )
        # forward_ms, backward_ms and the groups that they consist of, but for what is outside of groups.
        assert inside < groups <= 2 * inside
        assert entry["amx_sft_moe/D3_gemm_ms"] > 0
        assert entry["amx_sft_moe/D2_quantize_ms"] == 0
    of_evaluations = [entry for entry in reporter.logs if "eval_loss" in entry]
    assert len(of_evaluations) == 4
    assert not any(name.startswith("amx_sft_moe") for entry in of_evaluations for name in entry)
    assert (
        next(entry for entry in job.state.log_history if "loss" in entry).items()
        >= {name: value for name, value in logs[0].items() if name.startswith("amx_sft_moe/")}.items()
    )


def test_a_reporter_behind_the_printer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = Reporter(), Reporter()
    job = trainer(tmp_path, before)
    job.add_callback(after)
    log_phase_times(job)
    job.train()
    assert "amx_sft_moe" not in capsys.readouterr().out
    told = [[entry for entry in reporter.logs if "loss" in entry] for reporter in (before, after)]
    assert told[0] == told[1]
    assert all("amx_sft_moe/forward_ms" in entry for entry in told[1])


def test_only_groups_where_phases_are_not_wanted(tmp_path: Path) -> None:
    reporter = Reporter()
    job = trainer(tmp_path, reporter)
    callback = log_phase_times(job, phases=False)
    assert isinstance(callback, PhaseTimesCallback)
    job.train()
    entry = next(entry for entry in reporter.logs if "loss" in entry)
    assert "amx_sft_moe/backward_down_ms" in entry
    assert "amx_sft_moe/D3_gemm_ms" not in entry


def test_asked_for_again(tmp_path: Path) -> None:
    """As where a cell of a notebook runs twice: the last one counts, and has the times."""
    reporter = Reporter()
    job = trainer(tmp_path, reporter)
    job.callback_handler.add_callback(PhaseTimesCallback())
    log_phase_times(job)
    log_phase_times(job, phases=False)
    job.train()
    entry = next(entry for entry in reporter.logs if "loss" in entry)
    assert entry["amx_sft_moe/forward_ms"] > 0
    assert "amx_sft_moe/D3_gemm_ms" not in entry


def test_means_are_of_one_step(tmp_path: Path) -> None:
    callback = PhaseTimesCallback()
    experts, layer = module()
    arguments: tuple[Any, ...] = (None, type("State", (), {"log_history": []})(), None)
    callback.on_train_begin(*arguments)
    experts(layer.x, layer.expert_ids, layer.routing_weights)  # between steps: an evaluation
    flop = 0.0
    for micro_batches in (1, 3):
        callback.on_step_begin(*arguments)
        for _ in range(micro_batches):
            experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
        callback.on_step_end(*arguments)
    core = experts.experts().operator()
    for times in (core.last_times(False), core.last_times(True)):
        flop += 4 * sum(value for name, value in times["flop"].items() if times["kinds"][name] != "total")
    logs: dict[str, float] = {"loss": 1.0}
    callback.on_log(*arguments, logs=logs)
    inside = 2 * (logs["amx_sft_moe/forward_ms"] + logs["amx_sft_moe/backward_ms"])
    assert logs["amx_sft_moe/gflops"] == pytest.approx(flop / inside * 1e-6)
    again: dict[str, float] = {}
    callback.on_log(*arguments, logs=again)
    assert again == {}, "nothing new since the last log"
    callback.on_train_end(*arguments)


def test_names_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "json")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", str(tmp_path / "dumps"))
    model = add_lora(base_model("amx_sft_moe"))
    model(**batch())
    names = name_layers(model)
    assert list(names.values()) == ["layers.0", "layers.1", "layers.2"]
    assert all(".mlp.experts" in path for path in names)
    model(**batch())
    found = [json.loads(line)["name"] for line in (tmp_path / "dumps").read_text().splitlines()]
    assert found[-3:] == ["layers.0", "layers.1", "layers.2"]
    assert [name.partition(".")[0] for name in found[:3]] == ["experts"] * 3

    ours = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([module()[0], module(name="mine")[0]])})
    assert list(name_layers(ours).values()) == ["blocks.0", "blocks.1"]
    assert ours["blocks"][1].layer_name == "blocks.1"
    assert ours["blocks"][1].experts().operator().name == "blocks.1"
    twice = torch.nn.ModuleDict(
        {"a": ours, "b": torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([module()[0]])})}
    )
    assert list(name_layers(twice).values()) == ["a.blocks.0", "blocks.1", "b.blocks.0"]
