"""The stack of saved forwards, results and out=, accumulation, threads, times and memory."""

from __future__ import annotations

import gc
import json
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch

import amx_sft_moe
from amx_sft_moe import ArgumentError, StateError
from cases import Sizes, kernels
from reference import FACTORS, make_layer, relative_error, run

SIZES = Sizes(tokens=12)


@pytest.mark.emulated
def test_forwards_then_backwards(bf16_kernel: str) -> None:
    depth = 4
    layers = [make_layer(Sizes(tokens=tokens), seed=tokens) for tokens in (12, 1, 0, 7)]
    first = layers[0]
    for layer in layers[1:]:  # one layer's weights, four batches
        layer.gate_proj, layer.up_proj, layer.down_proj = first.gate_proj, first.up_proj, first.down_proj
        layer.factors = first.factors
    single = SIZES.operator(kernel=bf16_kernel)
    expected = [run(single, layer) for layer in layers]
    op = SIZES.operator(kernel=bf16_kernel, cache_depth=depth)
    op.set_base(first.gate_proj, first.up_proj, first.down_proj)
    op.set_lora(**first.factors)
    for layer in layers:
        x = layer.x.clone()
        op.forward_sft(x, layer.expert_ids, layer.routing_weights)
        x.zero_()  # what is saved is the operator's own
    assert op.saved_depth == depth
    with pytest.raises(StateError, match="cache_depth"):
        op.forward_sft(first.x, first.expert_ids, first.routing_weights)
    op.forward_sft(first.x, first.expert_ids, first.routing_weights, save_for_backward=False)
    for layer, wanted in zip(reversed(layers), reversed(expected), strict=True):
        found = op.backward(layer.grad_y).as_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in found)
    with pytest.raises(StateError, match="backward"):
        op.backward(first.grad_y)


def test_clear() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    op.clear()
    assert op.saved_depth == 0
    with pytest.raises(StateError):
        op.backward(layer.grad_y)
    assert torch.equal(run(op, layer)["y"], expected["y"])


def test_max_tokens() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(max_tokens=11)
    with pytest.raises(ArgumentError, match=r"11.*12"):
        run(op, layer)
    assert op.saved_depth == 0
    layer.x, layer.expert_ids = layer.x[:11], layer.expert_ids[:11]
    layer.routing_weights, layer.grad_y = layer.routing_weights[:11], layer.grad_y[:11]
    run(op, layer)


def test_results_own_their_memory() -> None:
    layer, other = make_layer(SIZES), make_layer(SIZES, seed=1)
    op = SIZES.operator()
    first = run(op, layer)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    run(op, other)
    assert all(torch.equal(first[name], kept[name]) for name in kept)


def test_out_is_written_in_place() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    wide = torch.full((12, 40), 9.0)
    y = wide[:, 4:36]
    assert op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, out=y) is y
    assert torch.equal(y.bfloat16(), expected["y"])
    assert wide[:, :4].eq(9).all()
    assert wide[:, 36:].eq(9).all()
    factors = {name: torch.full(layer.factors[name].shape[::-1], 9.0).permute(2, 1, 0) for name in FACTORS}
    out = amx_sft_moe.Gradients(grad_x=torch.full((12, 32), 9.0), **factors)
    found = op.backward(layer.grad_y, out=out)
    assert found.grad_x is out.grad_x
    assert found.gate_lora_a is factors["gate_lora_a"]
    for name, tensor in found.as_dict().items():
        assert torch.equal(tensor.bfloat16(), expected[name]), name


def test_autograd_notices_that_out_was_written() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    run(op, layer)
    out = torch.zeros(12, 32)
    leaf = torch.ones(12, 32, requires_grad=True)
    loss = (leaf * out).sum()  # saves out
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (leaf * out).sum()
    op.backward(layer.grad_y, out={"grad_x": out})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rank_changed_between_forward_and_backward() -> None:
    layer, other = make_layer(SIZES), make_layer(Sizes(tokens=12, ranks=(5, 5, 5)))
    op = SIZES.operator()
    expected = run(op, layer)
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    op.set_lora(**other.factors)
    with pytest.raises(StateError, match=r"saved forward \(4, 4, 4\), got \(5, 5, 5\)"):
        op.backward(layer.grad_y)
    op.set_lora(**layer.factors)
    assert torch.equal(op.backward(layer.grad_y).grad_x, expected["grad_x"])


def test_accumulate_and_scale() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    op = SIZES.operator()
    once = run(op, layer)
    out = {name: torch.ones_like(layer.factors[name]) for name in FACTORS}
    for scale in (0.5, -2.0):
        op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
        found = op.backward(layer.grad_y, accumulate=True, scale=scale, out=out)
        assert torch.equal(found.grad_x, once["grad_x"]), "only gradients of parameters are scaled"
        assert torch.equal(found.grad_routing_weights, once["grad_routing_weights"])
    for name in FACTORS:
        assert relative_error(out[name], 1 - 1.5 * once[name].double()) < 1e-6, name
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    found = op.backward(layer.grad_y, scale=3.0, out=out)
    for name in FACTORS:
        assert relative_error(out[name], 3 * once[name].double()) < 1e-6, name
        assert getattr(found, name) is out[name]


def test_accumulate_leaves_idle_experts_alone() -> None:
    sizes = Sizes(experts=6, top_k=1, tokens=3)
    layer = make_layer(sizes)
    op = sizes.operator()
    run(op, layer)
    idle = [e for e in range(6) if e not in layer.expert_ids]
    out = {name: torch.full_like(layer.factors[name], 5.0) for name in FACTORS}
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    op.backward(layer.grad_y, accumulate=True, out=out)
    assert all(out[name][idle].eq(5).all() for name in FACTORS)
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    op.backward(layer.grad_y, out=out)
    assert all(out[name][idle].eq(0).all() for name in FACTORS)


def test_skip() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    found = op.backward(layer.grad_y, skip=["grad_x", "gate_lora_a", "up_lora_b"])
    assert found.grad_x is None
    assert found.gate_lora_a is None
    assert found.up_lora_b is None
    assert set(found.as_dict()) == set(expected) - {"y", "grad_x", "gate_lora_a", "up_lora_b"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.as_dict().items())


def test_weights_are_kept_alive_and_not_copied() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)["y"]
    gate = layer.gate_proj
    alive = weakref.ref(gate)
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False)
    gate.mul_(2)  # in place: seen, since nothing was copied
    assert not torch.equal(op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False), expected)
    gate.div_(2)
    layer.gate_proj = None
    del gate
    gc.collect()
    assert alive() is not None
    assert torch.equal(op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False), expected)
    del op
    gc.collect()
    assert alive() is None


def test_other_weights_and_dtype() -> None:
    layer, other = make_layer(SIZES), make_layer(SIZES, seed=3)
    op = SIZES.operator()
    run(op, layer)
    assert torch.equal(run(op, other)["y"], run(SIZES.operator(), other)["y"])
    op.forward_sft(other.x, other.expert_ids, other.routing_weights)
    wide = other.to(torch.float32)
    with pytest.raises(StateError, match=r"set_base.*bf16.*fp32"):
        op.set_base(wide.gate_proj, wide.up_proj, wide.down_proj)
    op.clear()
    run(op, wide)
    assert op.weight_dtype == "float32"


def test_objects_do_not_disturb_each_other() -> None:
    cases = [(Sizes(tokens=30, hidden=h), seed) for seed, h in enumerate((32, 67, 96))]
    layers = [make_layer(sizes, seed) for sizes, seed in cases]
    expected = [run(sizes.operator(), layer) for (sizes, _), layer in zip(cases, layers, strict=True)]
    wrong: list[str] = []

    def train(i: int) -> None:
        op = cases[i][0].operator(num_threads=1)
        for _ in range(20):
            found = run(op, layers[i])
            wrong.extend(name for name in found if not torch.equal(found[name], expected[i][name]))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_shared_workspace() -> None:
    workspace = amx_sft_moe.Workspace()
    layers = [make_layer(SIZES, seed) for seed in range(3)]
    ops = [SIZES.operator(workspace=workspace) for _ in layers]
    expected = [run(SIZES.operator(), layer) for layer in layers]
    for op, layer in zip(ops, layers, strict=True):
        op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
        op.set_lora(**layer.factors)
        op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    for op, layer, wanted in reversed(list(zip(ops, layers, expected, strict=True))):
        found = op.backward(layer.grad_y).as_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in found)
    sizes = {op.memory()["workspace_bytes"] for op in ops}
    assert len(sizes) == 1
    assert sizes.pop() > 0


@pytest.mark.parametrize("kernel", [name for name in kernels("bfloat16") if name != "onednn"])
def test_a_threads_memory_has_a_bound(kernel: str) -> None:
    """What more threads cost hardly grows with an expert's tokens: its columns of h are made in chunks.
    (Kernel onednn packs all tokens of a task's columns.)
    """

    def of_threads(tokens: int) -> int:
        sizes = Sizes(experts=1, top_k=1, hidden=16, intermediate=256, ranks=(2, 2, 2), tokens=tokens)
        layer, found = make_layer(sizes), []
        for threads in (1, 5):
            op = sizes.operator(kernel=kernel, num_threads=threads)
            run(op, layer)
            found.append(op.memory()["workspace_bytes"])
        return (found[1] - found[0]) // 4

    few, many = 1024, 8192
    assert of_threads(many) - of_threads(few) <= (many - few) * 128


PUBLISHED = [
    "D0_prepare+memset",
    "D1_scatter",
    "D2_quantize",
    "D3_gemm",
    "D4_lora_grad",
    "D5_weight_grad",
    "silu_backward",
    "GU0_prepare+memset",
    "base_pass(gate)+base_pass(up)",
    "GU1_base_passes_total",
    "GU2_requantize_for_lora",
    "lora_pass(gate)",
    "lora_pass(up)",
    "GU3_lora_passes_total",
    "weight_grad(gate)",
    "weight_grad(up)",
    "GU4_sum_tokens",
    "backward_routing_weights",
]


def test_times() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(num_threads=2)
    run(op, layer)
    forward, backward = op.last_forward_times(), op.last_backward_times()
    assert set(backward["phases"]) == set(PUBLISHED) == set(backward["kinds"])
    assert set(backward["groups"]) == {
        "backward_down",
        "backward_activation",
        "backward_gate_up",
        "backward_routing_weights",
    }
    assert backward["kinds"]["D2_quantize"] == "not needed"
    assert backward["phases"]["D2_quantize"] == 0.0
    assert backward["kinds"]["base_pass(gate)+base_pass(up)"] == "fused"
    assert backward["kinds"]["D3_gemm"] == "measured"
    for times in (forward, backward):
        assert times["tokens"] == 12
        assert times["routed_rows"] == 24
        measured = sum(ms for name, ms in times["phases"].items() if times["kinds"][name] != "total")
        assert measured == pytest.approx(sum(times["groups"].values()))
        assert 0 < measured <= times["total_ms"]
        assert 1 <= len(times["threads"]) <= 2
        for thread in times["threads"]:
            assert thread["busy_ms"] == pytest.approx(sum(thread["phases"].values()))
            assert thread["waiting_ms"] >= 0
            assert set(thread["phases"]) == set(thread["tasks"]) <= set(times["phases"])
    assert forward["sync_points"] <= 4
    assert backward["sync_points"] <= 6


def test_memory_counts_the_stack() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(cache_depth=3)
    run(op, layer)
    one = op.memory()["saved_bytes"]
    assert one >= 2 * 24 * 24 * 2, "gate and up of 24 routed rows"
    for _ in range(3):
        op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    assert op.memory()["saved_bytes"] == 3 * one


def test_dump_of_times() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator(kernel="portable")
    assert op.dump_times() == ""
    run(op, layer)
    text = op.dump_times()
    times = op.last_backward_times()
    for name, ms in times["phases"].items():
        remark = {"fused": " (fused)", "not needed": " (not needed)"}.get(times["kinds"][name], "")
        if name not in times["groups"]:
            assert f"] {name}: {ms:.3f} ms{remark}\n" in text, name
    assert re.search(
        r"^\[BWD TIMER\] backward_down: \d+\.\d{3} ms \(total: \d+\.\d{3} ms\)$", text, re.MULTILINE
    )
    assert "[FWD TIMER] forward_down: " in text
    forward, backward = map(json.loads, op.dump_times("json").splitlines())
    assert (forward["step"], backward["step"], backward["kernel"]) == ("forward", "backward", "portable")
    assert set(backward["phases_ms"]) == set(PUBLISHED)
    with pytest.raises(ArgumentError, match="form"):
        op.dump_times("xml")


def test_dumps_asked_for_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = make_layer(SIZES)
    silent = SIZES.operator()
    run(silent, layer)
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "text")
    loud = SIZES.operator()
    run(loud, layer)
    run(silent, layer)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == loud.dump_times()
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "json")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", str(tmp_path / "times"))
    run(SIZES.operator(), layer)
    assert [json.loads(line)["step"] for line in (tmp_path / "times").read_text().splitlines()] == [
        "forward",
        "backward",
    ]
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "xml")
    with pytest.raises(ArgumentError, match="AMX_SFT_MOE_TIMER"):
        run(SIZES.operator(), layer)
