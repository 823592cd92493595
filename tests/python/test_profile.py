"""`python -m amx_sft_moe profile`: options, how many experts fit, the check, what is measured and printed."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

import reference
from amx_sft_moe import ArgumentError, _core
from amx_sft_moe.__main__ import main
from amx_sft_moe.profile import cli, report
from amx_sft_moe.profile.experiment import Results, Timing, check, measure, passed
from amx_sft_moe.profile.layer import FACTORS, Layer
from amx_sft_moe.profile.memory import (
    bytes_of_experts,
    bytes_of_reference,
    bytes_of_step,
    experts_that_fit,
    planned_bytes,
    with_experts,
)
from amx_sft_moe.profile.options import Options, parse
from amx_sft_moe.profile.reference import float64_step, relative_errors
from amx_sft_moe.profile.shapes import SHAPES, LayerShape

TINY = Options(
    name="tiny",
    shape=LayerShape(5, 2, 48, 32),
    rank=4,
    alpha=8.0,
    check_tokens=3,
    tokens=6,
    warmup=1,
    iterations=3,
    threads=2,
    machine=False,
)


def test_defaults_are_the_published_experiment() -> None:
    options = parse(["--threads", "3"])
    assert options == Options(threads=3)
    assert options.shape == LayerShape(experts=256, top_k=8, hidden=7168, intermediate=2048)
    assert (options.rank, options.alpha, options.check_tokens, options.tokens) == (16, 32.0, 4, 128)
    assert (options.warmup, options.iterations) == (5, 20)


def test_threads_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    assert parse([]).threads == 7
    assert parse(["--threads", "3"]).threads == 3


def test_a_layer_with_sizes_of_its_own_has_no_model_s_name() -> None:
    assert parse(["--shape", "small", "--experts", "8"]).name == "small"
    for size in ("--hidden", "--intermediate", "--top-k"):
        assert parse(["--shape", "small", size, "3"]).name == "custom"


def test_options() -> None:
    options = parse(
        ["--shape=mixtral", "--experts=6", "--tokens=7", "--memory=2.5", "--no-machine", "--rank=0"]
    )
    assert options.shape == LayerShape(6, 2, 4096, 14336)
    assert (options.name, options.tokens, options.memory, options.rank) == ("mixtral", 7, 2_500_000_000, 0)
    assert options.machine is False
    assert options.threads >= 1


@pytest.mark.parametrize(
    "arguments",
    [
        "--shape large",
        "--tokens 0",
        "--iterations 0",
        "--alpha -1",
        "--top-k 9 --experts 8",
        "--memory nan",
        "--memory 1e300",
        f"--seed {2**63}",
        "--threads 4097",
    ],
)
def test_options_that_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(arguments.split())
    assert stop.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err


def test_experts_are_cut_to_the_memory() -> None:
    options = Options()
    each = bytes_of_experts(with_experts(options, 1))
    assert each == 2 * (3 * 7168 * 2048 + 2 * 3 * 16 * (7168 + 2048))
    assert experts_that_fit(options, 1 << 50) == 256
    fit = experts_that_fit(options, 10**10)
    assert fit % 8 == 0
    assert 0 < fit * each < planned_bytes(with_experts(options, fit)) <= 10**10
    assert planned_bytes(with_experts(options, fit + 8)) > 10**10
    assert experts_that_fit(options, 10**8) == 0
    small = Options(shape=SHAPES["small"], tokens=4, dtype="float32", lora_dtype="float32")
    assert experts_that_fit(small, 10**9) == 16


@pytest.mark.parametrize(("room", "fits"), [(11, 11), (12, 12), (15, 12), (16, 16), (23, 16), (24, 24)])
def test_experts_by_eights_but_for_a_token_s_own(room: int, fits: int) -> None:
    options = Options(shape=dataclasses.replace(SHAPES["qwen3-30b-a3b"], top_k=12))
    assert experts_that_fit(options, planned_bytes(with_experts(options, room))) == fits


def test_experts_give_way_to_the_check() -> None:
    """Its tokens, and one expert in float64, are a part of the plan."""
    fits = [experts_that_fit(Options(check_tokens=tokens), 10**10) for tokens in (1, 1000, 2000, 10**9)]
    assert fits[0] > fits[1] > fits[2] > fits[3] == 0
    assert planned_bytes(Options()) > bytes_of_experts(Options()) + 8 * 3 * 7168 * 2048


def peak_of_torch(call: Callable[[], object]) -> int:
    """Most bytes that torch had allocated at a time; the same on every machine."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        call()
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(
    ("shape", "rank", "tokens"),
    [
        (LayerShape(16, 4, 256, 192), 4, 4),  # weights are most of it
        (LayerShape(2, 2, 256, 16), 0, 500),  # rows of H
        (LayerShape(2, 2, 16, 256), 0, 500),  # rows of I
        (LayerShape(32, 4, 64, 64), 64, 50),  # factors, of used experts
        (LayerShape(64, 1, 64, 64), 64, 4),  # factors, of idle experts
    ],
)
def test_the_plan_covers_the_check(shape: LayerShape, rank: int, tokens: int) -> None:
    """It held all experts in float64 at a time, 32 of the published experiment, which no plan counted."""
    options = dataclasses.replace(TINY, shape=shape, rank=rank, check_tokens=tokens)
    layer = Layer(options)
    batch = layer.batch(tokens)
    op = layer.operator()
    y = op.forward_sft(batch.x, batch.expert_ids, batch.routing_weights)
    found = {"y": y, **op.backward(batch.grad_y).as_dict()}
    peak = peak_of_torch(lambda: relative_errors(found, float64_step(layer, batch), batch))
    planned = bytes_of_reference(options)
    assert 0.3 * planned < peak <= planned


# Of few tokens what each thread packs counts, of many it hides nothing.
@pytest.mark.parametrize(("tokens", "used"), [(256, 0.15), (4096, 0.5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_plan_covers_a_step(dtype: str, top_k: int, tokens: int, used: float) -> None:
    shape = dataclasses.replace(SHAPES["small"], top_k=top_k)
    layer = Layer(dataclasses.replace(TINY, shape=shape, dtype=dtype, lora_dtype=dtype))
    batch = layer.batch(tokens)
    op = layer.operator()
    y = op.forward_sft(batch.x, batch.expert_ids, batch.routing_weights)
    saved = op.memory()["saved_bytes"]
    grad_x = op.backward(batch.grad_y).grad_x
    tensors = [batch.x, batch.expert_ids, batch.routing_weights, batch.grad_y, y, grad_x]
    held = op.memory()["workspace_bytes"] + saved + sum(tensor.nbytes for tensor in tensors)
    planned = bytes_of_step(layer.options, tokens)
    assert used * planned < held <= planned


def test_a_layer_that_does_not_fit() -> None:
    said = (
        "--memory: expected room for at least 8 experts, got 0.1 GB, room for 0: "
        "with --tokens 128 and --check-tokens 4 they take 1.5 GB"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(said)}$"):
        cli._fitted(Options(), 10**8)
    fitted = cli._fitted(Options(), 10**10)
    assert fitted.shape == dataclasses.replace(SHAPES["deepseek-v3"], experts=fitted.shape.experts)
    assert "of 256 experts" in report.heading(fitted, Options().shape, 10**10, "avx512")
    assert "of 256 experts" not in report.heading(Options(), Options().shape, 10**10, "avx512")


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_is_that_of_the_tests(rank: int) -> None:
    layer = Layer(dataclasses.replace(TINY, rank=rank))
    batch = layer.batch(6)
    factors = {name: layer.factors.get(name) for name in FACTORS}
    known = reference.gradients(
        reference.Layer(
            layer.gate_proj,
            layer.up_proj,
            layer.down_proj,
            factors,
            batch.x,
            batch.expert_ids,
            batch.routing_weights,
            batch.grad_y,
        ).to(torch.float64),
        scaling=(layer.scaling,) * 3,
    )
    expected = float64_step(layer, batch)
    assert set(expected) == {"y", "grad_x", "grad_routing_weights", *(FACTORS if rank else ())}
    errors = relative_errors({name: known[name] for name in expected}, expected, batch)
    assert all(error < 1e-12 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("dtype", "lora_dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]
)
def test_the_check_sees_mistakes(dtype: str, lora_dtype: str) -> None:
    options = dataclasses.replace(TINY, dtype=dtype, lora_dtype=lora_dtype)
    layer = Layer(options)
    op = layer.operator()
    batch = layer.batch(4)
    errors = check(op, layer, batch)
    assert passed(errors, options), errors
    layer.factors["down_lora_a"] *= 1.2
    wrong = check(op, layer, batch)
    assert passed(wrong, options), "factors are read anew: still right"
    exact = float64_step(layer, batch)
    found = {name: value.clone() for name, value in exact.items()}
    whole = {name: torch.zeros(5, *found[name].shape[1:], dtype=torch.float64) for name in FACTORS}
    for name in FACTORS:
        whole[name][batch.expert_ids.unique()] = found[name]
    found |= whole
    assert not any(relative_errors(found, exact, batch).values())
    for name in exact:
        broken = found | {name: found[name] * 1.1}
        assert not passed(relative_errors(broken, exact, batch), options)
    idle = set(range(5)) - set(batch.expert_ids.unique().tolist())
    if idle:
        found["up_lora_b"][idle.pop()] = 1.0
        assert not passed(relative_errors(found, exact, batch), options), "an idle expert's gradient is zero"
    assert not passed({"y": float("nan")}, options)


def test_what_is_measured() -> None:
    layer = Layer(TINY)
    op = layer.operator()
    forward, backward, both = measure(op, layer, layer.batch(TINY.tokens))
    for timing, passes in ((forward, (3, 0)), (backward, (0, 3)), (both, (3, 3))):
        assert (len(timing.warmup), len(timing.calls)) == (1, 3)
        assert (len(timing.forwards), len(timing.backwards)) == passes
        assert all(times["tokens"] == TINY.tokens for times in timing.forwards + timing.backwards)
        assert 0 < timing.inside <= timing.mean, "the operator's clock runs inside of the call"
    assert op.saved_depth == 0
    # Every pass counts once: warm-up, forwards of backward_only, and both.
    assert [times["index"] for times in forward.forwards] == [1, 2, 3]
    assert [times["index"] for times in both.backwards] == [5, 6, 7]


def times(total_ms: float, busy: tuple[float, ...], **phases: float) -> dict[str, Any]:
    """A record by hand: 2e9 FLOP and 1e9 bytes in each phase that took time."""
    groups = _core.phase_groups()
    names = [name for name, group in groups.items() if group.startswith("forward")]
    of_group = dict.fromkeys((groups[name] for name in names), 0.0)
    for name, ms in phases.items():
        of_group[groups[name]] += ms
    return {
        "total_ms": total_ms,
        "sync_points": 4,
        "groups": of_group,
        "phases": {name: phases.get(name, 0.0) for name in names},
        "kinds": {name: "fused" if "+" in name else "measured" for name in names},
        "flop": {name: 2_000_000_000 if name in phases else 0 for name in names},
        "bytes": {name: 1_000_000_000 if name in phases else 0 for name in names},
        "threads": [{"thread": t, "busy_ms": ms, "waiting_ms": 10 - ms} for t, ms in enumerate(busy)],
    }


def test_figures_of_the_report() -> None:
    passes = [times(100, (8, 4), **{"gemm(down)": 60}), times(100, (8, 4), **{"gemm(down)": 20})]
    machine = {"instructions": {"FMA": 100.0}, "kernels": {"avx512": 100.0}, "bandwidth": 50.0}
    table = report.phases("forward", passes, "avx512", machine)
    # 40 ms of 100; 2 GFLOP in 40 ms are half of 100 GFLOP/s, 1 GB half of 50 GB/s.
    assert re.search(r"^    gemm\(down\) +40\.00 +40\.0 % +50 +50\.0 % +25\.0 +50\.0 %$", table, re.MULTILINE)
    assert re.search(r"^  forward_down +40\.00 +40\.0 % ", table, re.MULTILINE)
    assert re.search(r"^  outside of phases +60\.00 +60\.0 %$", table, re.MULTILINE)
    assert "of peak" in table
    unknown = report.phases("forward", passes, "avx512", None)
    assert re.search(r"^    gemm\(down\) +40\.00 +40\.0 % +50 +25\.0$", unknown, re.MULTILINE)

    timing = Timing([30.0, 20.0], [100.0, 200.0], forwards=[times(90, (8, 4)), times(190, (8, 4))])
    assert (timing.mean, timing.inside) == (150, 140)
    assert timing.deviation == pytest.approx(70.7107, abs=1e-3)
    results = Results("avx512", {}, timing, timing, Timing([], [100.0], passes[:1], passes[:1]), machine)
    lines = report.latencies(results, tokens=300).splitlines()
    shown = "forward_only 150.0 70.71 100.0 200.0 2,000 140.0 10.00 (6.7 %) 30.00 25.00"
    assert " ".join(lines[2].split()) == shown
    assert lines[4].split()[-2:] == ["-", "-"], "there was no warm-up"
    threads = report.threads(results)
    assert re.search(r"forward, thread 0 +8\.00 +2\.00$", threads, re.MULTILINE)
    assert re.search(r"forward, mean +6\.00 +4\.00 +33\.3 % +4$", threads, re.MULTILINE)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens=16", "--rank=4", "--alpha=8", "--warmup=1", "--iterations=2", "--threads=2"]
    assert main(["profile", "--shape=small", *arguments, "--memory=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("small: E=16 k=4 H=512 I=256, LoRA r=4 alpha=8, bfloat16, kernel ")
    for part in (
        "GFLOP/s; reads ",
        "float64: ok",
        "full_train_loop",
        "D3_gemm",
        "outside of phases",
        "sync points",
    ):
        assert part in out
    assert max(map(len, out.splitlines())) <= 120


def test_the_command_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--shape", "small", "--tokens", "4", "--no-machine"]
    assert cli.main([*small, "--memory", "0.001"]) == 1
    assert capsys.readouterr().err.startswith("error: --memory: expected room for at least 4 experts")
    with monkeypatch.context() as patch:
        patch.setattr(cli, "available_memory", lambda: 10**6)
        assert cli.main(small) == 1
        assert "expected room for at least 4 experts, got 0.0 GB" in capsys.readouterr().err
    assert cli.main([*small, "--check-tokens", "1000000000"]) == 1
    assert "with --tokens 4 and --check-tokens 1000000000 they take" in capsys.readouterr().err
    assert cli.main([*small, "--kernel", "none"]) == 1
    assert "none" in capsys.readouterr().err
    from amx_sft_moe.profile import experiment

    monkeypatch.setattr(experiment, "check", lambda *ignored: {"y": 0.5})
    assert cli.main(small) == 1
    assert "WRONG; largest relative error 5.0e-01 (y)" in capsys.readouterr().out


@pytest.mark.parametrize("names", [("y", "grad_x"), ("grad_x", "y")])
def test_nan_is_the_largest_error(names: tuple[str, str]) -> None:
    """Whatever stands before or after it."""
    errors = {name: math.nan if name == "y" else 0.5 for name in names}
    options = parse(["--shape", "small"])
    assert not passed(errors, options)
    assert "WRONG; largest relative error nan (y)" in report.check(errors, options, ok=False)


def test_an_interrupt_before_the_command_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports take long; there is no command yet that could answer to Ctrl-C."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("amx_sft_moe.profile.main", interrupted)
    monkeypatch.setattr("amx_sft_moe.__main__.info", interrupted)
    for command in ("profile", "info"):
        assert main([command]) == 130
        assert capsys.readouterr().err == "\ninterrupted\n"


def test_options_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from amx_sft_moe.__main__ import main\n"
        "sys.exit(main(['profile', '--shape', 'small']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "error: profile needs torch: install the package with its extra [train] "
        "(pip install '.[train]' in a clone)\n"
    )
