"""Every misuse raises, names the argument and both values, and leaves the object usable."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import amx_sft_moe
from amx_sft_moe import ArgumentError, KernelError, StateError
from cases import Sizes
from reference import make_layer, run

SIZES = Sizes(experts=4, top_k=2, hidden=32, intermediate=24, ranks=(4, 4, 4), tokens=10)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_experts": 0}, ArgumentError, ["num_experts", "1", "0"]),
        ({"num_experts": 2.5}, TypeError, ["num_experts", "int", "2.5"]),
        ({"top_k": 0}, ArgumentError, ["top_k", "1", "0"]),
        ({"hidden_size": -3}, ArgumentError, ["hidden_size", "1", "-3"]),
        ({"intermediate_size": "8"}, TypeError, ["intermediate_size", "int", "str"]),
        ({"lora_rank": -1}, ArgumentError, ["lora_rank", "0", "-1"]),
        ({"lora_alpha": "much"}, TypeError, ["lora_alpha", "number", "much"]),
        ({"max_tokens": -1}, ArgumentError, ["max_tokens", "0", "-1"]),
        ({"cache_depth": 0}, ArgumentError, ["cache_depth", "1", "0"]),
        ({"num_threads": 0}, ArgumentError, ["num_threads", "1", "0"]),
        ({"num_threads": 4097}, ArgumentError, ["num_threads", "at most 4096", "4097"]),
        *[
            ({name: 2**63}, ArgumentError, [f"{name}: ", f"at most {2**63 - 1}", f"{2**63}"])
            for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "lora_rank")
        ],
        ({"max_tokens": 2**63}, ArgumentError, ["max_tokens", f"at most {2**63 - 1}", f"{2**63}"]),
        ({"cache_depth": 2**70}, ArgumentError, ["cache_depth", f"at most {2**63 - 1}", f"{2**70}"]),
        ({"lora_alpha": float("nan")}, ArgumentError, ["lora_alpha", "finite", "nan"]),
        ({"lora_alpha": -1e39}, ArgumentError, ["lora_alpha", "finite", "float32", "-1e+39"]),
        ({"lora_alpha": 10**400}, ArgumentError, ["lora_alpha", "finite", "inf"]),
        (
            {"activation": "relu"},
            ArgumentError,
            ["activation", '"silu", "gelu", "gelu_tanh", "gelu_pytorch_tanh", "gpt_oss"', "relu"],
        ),
        ({"activation": {"name": "gelu", "limit": 7.0}}, ArgumentError, ["activation", "gpt_oss", "gelu"]),
        ({"activation": 3}, TypeError, ["activation", "mapping", "int"]),
        ({"activation": {"limit": -1.5}}, ArgumentError, ["activation.limit", "positive", "-1.5"]),
        ({"activation": {"limit": float("nan")}}, ArgumentError, ["activation.limit", "positive", "nan"]),
        ({"activation": {"alpha": float("nan")}}, ArgumentError, ["activation.alpha", "finite", "nan"]),
        ({"activation": {"alpha": "x"}}, TypeError, ["activation.alpha", "number", "x"]),
        ({"activation": {"beta": 1.0}}, ArgumentError, ["activation", "limit", "beta"]),
        ({"kernel": "amx_fp4"}, KernelError, ["kernel", "portable", "amx_fp4"]),
        ({"kernel": None}, TypeError, ["kernel", "str", "NoneType"]),
        ({"workspace": 3}, TypeError, ["workspace", "Workspace", "int"]),
        ({"name": 3}, TypeError, ["name", "str", "int"]),
        ({"name": "\ud800"}, ArgumentError, ["name", "UTF-8", "\\ud800"]),
    ],
)
def test_construction(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 24}
    with pytest.raises(error) as caught:
        amx_sft_moe.SftMoe(**(sizes | options))
    assert all(word in str(caught.value) for word in words), caught.value


def test_kernel_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "portable")
    op = SIZES.operator()
    run(op, make_layer(SIZES))
    assert op.kernel == "portable"
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "abacus")
    with pytest.raises(KernelError, match=r"AMX_SFT_MOE_KERNEL.*portable.*abacus"):
        SIZES.operator()
    assert SIZES.operator(kernel="portable").kernel == "portable"


def test_kernel_that_this_cpu_lacks() -> None:
    lacking = [kernel for kernel in amx_sft_moe.info()["kernels"] if not kernel["available"]]
    for kernel in lacking:
        with pytest.raises(KernelError) as caught:
            SIZES.operator(kernel=kernel["name"])
        assert kernel["name"] in str(caught.value)
        assert kernel["why_not"] in str(caught.value)


def test_error_classes() -> None:
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(StateError, RuntimeError)
    assert issubclass(KernelError, RuntimeError)
    error = pickle.loads(pickle.dumps(ArgumentError("x: expected 1, got 2")))
    assert isinstance(error, amx_sft_moe.ArgumentError)
    assert ArgumentError.__module__ == "amx_sft_moe"


def test_call_before_base_weights() -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    with pytest.raises(StateError, match="set_base"):
        op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    with pytest.raises(StateError, match="set_base"):
        op.backward(layer.grad_y)
    assert op.last_forward_times() == {}
    assert op.memory() == {"workspace_bytes": 0, "saved_bytes": 0}


BASE = {"gate_proj": (4, 24, 32), "up_proj": (4, 24, 32), "down_proj": (4, 32, 24)}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"gate_proj": None}, TypeError, ["gate_proj", "None"]),
        ({"down_proj": None}, TypeError, ["down_proj", "None"]),
        ({"gate_up_proj": bf16(4, 48, 32)}, TypeError, ["gate_up_proj", "both"]),
        ({"gate_proj": bf16(4, 24, 31)}, ArgumentError, ["gate_proj", "[4, 24, 32]", "[4, 24, 31]"]),
        ({"up_proj": bf16(24, 32)}, ArgumentError, ["up_proj", "[4, 24, 32]", "[24, 32]"]),
        ({"down_proj": bf16(4, 24, 32)}, ArgumentError, ["down_proj", "[4, 32, 24]", "[4, 24, 32]"]),
        ({"down_proj": bf16(4, 24, 32).transpose(1, 2)}, ArgumentError, ["down_proj", "stride 1", "32"]),
        ({"down_proj": bf16(4, 32, 24).float()}, TypeError, ["down_proj", "bfloat16", "float32"]),
        ({"gate_proj": bf16(4, 24, 32).half()}, TypeError, ["gate_proj", "bfloat16", "float16"]),
        ({"gate_proj": bf16(4, 24, 32).to("meta")}, ArgumentError, ["gate_proj", "cpu", "meta"]),
        ({"gate_proj": "weights"}, TypeError, ["gate_proj", "tensor", "str"]),
        ({"gate_proj": [bf16(24, 32)] * 3}, ArgumentError, ["gate_proj", "4", "3"]),
        ({"gate_proj": [bf16(24, 32)] * 3 + [bf16(24, 33)]}, ArgumentError, ["gate_proj[3]", "[24, 33]"]),
        ({"gate_proj": [bf16(24, 32)] * 3 + [None]}, TypeError, ["gate_proj[3]", "None"]),
        (
            {"gate_proj": [bf16(24, 32)] * 3 + [bf16(24, 40)[:, :32]]},
            ArgumentError,
            ["gate_proj[3]", "row stride", "32", "40"],
        ),
        ({"gate_proj": bf16(1, 2, 4, 24, 32)}, ArgumentError, ["gate_proj", "5"]),
    ],
)
def test_set_base(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    good = {name: bf16(*shape) for name, shape in BASE.items()}
    with pytest.raises(error) as caught:
        op.set_base(**(good | changes))
    assert all(word in str(caught.value) for word in words), caught.value
    y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False)
    assert torch.equal(y, expected["y"]), "the refused call left something behind"


@pytest.mark.parametrize(
    ("factors", "error", "words"),
    [
        ({"gate_lora_a": bf16(4, 3, 32)}, TypeError, ["gate_lora_b", "None"]),
        ({"down_lora_b": bf16(4, 32, 3)}, TypeError, ["down_lora_a", "None"]),
        (
            {"up_lora_a": bf16(4, 3, 32), "up_lora_b": bf16(4, 24, 4)},
            ArgumentError,
            ["up_lora_b", "[4, 24, 3]", "[4, 24, 4]"],
        ),
        (
            {"down_lora_a": bf16(4, 3, 32), "down_lora_b": bf16(4, 32, 3)},
            ArgumentError,
            ["down_lora_a", "[4, *, 24]", "[4, 3, 32]"],
        ),
        (
            {"gate_lora_a": bf16(4, 3, 32).int(), "gate_lora_b": bf16(4, 24, 3)},
            TypeError,
            ["gate_lora_a", "bfloat16 or float32", "int32"],
        ),
        (
            {"gate_up_lora_a": bf16(4, 3, 32), "gate_up_lora_b": bf16(4, 24, 3)},
            ArgumentError,
            ["gate_up_lora_b", "[4, 48, 3]", "[4, 24, 3]"],
        ),
        ({"gate_up_lora_a": bf16(4, 3, 32)}, TypeError, ["gate_up_lora_b", "None"]),
        ({"gate_up_lora_a": bf16(4, 3, 32), "up_lora_a": bf16(4, 3, 32)}, TypeError, ["both"]),
        ({"gate_scaling": "high"}, TypeError, ["gate_scaling", "high"]),
        *[
            ({f"{name}_scaling": 0.5}, ArgumentError, [f"{name}_scaling", f"without factors of {name}", "0.5"])
            for name in ("gate", "up", "down")
        ],
        (
            {"gate_up_lora_a": bf16(4, 3, 32), "gate_up_lora_b": bf16(4, 48, 3), "down_scaling": 2},
            ArgumentError,
            ["down_scaling", "without factors of down", "2.0"],
        ),
        *[
            ({f"{name}_scaling": value}, ArgumentError, [f"{name}_scaling", "finite", words])
            for name in ("gate", "up", "down")
            for value, words in ((float("inf"), "inf"), (1e300, "float32, got 1e+300"))
        ],
    ],
)
def test_set_lora(factors: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    with pytest.raises(error) as caught:
        op.set_lora(**factors)
    assert all(word in str(caught.value) for word in words), caught.value
    y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False)
    assert torch.equal(y, expected["y"]), "the refused call left something behind"


@pytest.mark.parametrize("name", ["gate", "up", "down", "gate_up"])
def test_lora_rank(name: str) -> None:
    """Where it was given, it is that of the factors, of those of a later call too."""
    layer = make_layer(SIZES)
    op = SIZES.operator(lora_rank=4)
    expected = run(op, layer)
    n_in, n_out = {"down": (24, 32), "gate_up": (32, 48)}.get(name, (32, 24))
    with pytest.raises(ArgumentError, match=rf"{name}_lora_a: expected a rank of lora_rank = 4, got 3"):
        op.set_lora(**{f"{name}_lora_a": bf16(4, 3, n_in), f"{name}_lora_b": bf16(4, n_out, 3)})
    y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False)
    assert torch.equal(y, expected["y"]), "the refused call left something behind"
    op.set_lora()
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights, False)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


Change = Callable[[torch.Tensor], Any]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("x", lambda x: x[:, :31], ArgumentError, ["x", "[*, 32]", "[10, 31]"]),
        ("x", lambda x: x[0], ArgumentError, ["x", "[*, 32]", "[32]"]),
        ("x", lambda x: x.double(), TypeError, ["x", "bfloat16 or float32", "float64"]),
        ("x", lambda x: x.to(torch.complex64), TypeError, ["x", "bfloat16 or float32", "complex64"]),
        ("x", lambda x: x.tolist(), TypeError, ["x", "tensor", "list"]),
        ("x", lambda x: None, TypeError, ["x", "tensor", "None"]),
        ("x", lambda x: x.t().contiguous().t(), ArgumentError, ["x", "stride 1", "(1, 10)"]),
        ("x", lambda x: x.to("meta"), ArgumentError, ["x", "cpu", "meta"]),
        ("x", lambda x: x.float().to_sparse(), ArgumentError, ["x", "strided", "sparse"]),
        ("x", lambda x: torch.nested.nested_tensor([x]), ArgumentError, ["x", "one tensor", "nested"]),
        ("x", lambda x: torch._neg_view(x), ArgumentError, ["x", "negative bit", "resolve_neg"]),
        ("x", lambda x: x.float().numpy()[:, ::-1], ArgumentError, ["x", "stride 1", "-1"]),
        ("expert_ids", lambda ids: ids[:9], ArgumentError, ["expert_ids", "[10, 2]", "[9, 2]"]),
        ("expert_ids", lambda ids: ids[:, :1], ArgumentError, ["expert_ids", "[10, 2]", "[10, 1]"]),
        ("expert_ids", lambda ids: ids.float(), TypeError, ["expert_ids", "int64 or int32", "float32"]),
        ("expert_ids", lambda ids: ids.short(), TypeError, ["expert_ids", "int64 or int32", "int16"]),
        ("routing_weights", lambda w: w.t(), ArgumentError, ["routing_weights", "[10, 2]", "[2, 10]"]),
        ("routing_weights", lambda w: w.half(), TypeError, ["routing_weights", "float16"]),
        ("out", lambda y: y[:9], ArgumentError, ["out", "[10, 32]", "[9, 32]"]),
        ("out", lambda y: y.int(), TypeError, ["out", "bfloat16 or float32", "int32"]),
        ("out", lambda y: y[:1].expand(10, 32), ArgumentError, ["out", "overlap", "(0, 1)"]),
        ("out", lambda y: y.t().contiguous().t(), ArgumentError, ["out", "stride 1", "(1, 10)"]),
        ("out", lambda y: read_only(y.float().numpy()), ArgumentError, ["out", "writable", "read-only"]),
    ],
)
def test_forward(name: str, change: Change, error: type[Exception], words: list[str]) -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    good = {
        "x": layer.x,
        "expert_ids": layer.expert_ids,
        "routing_weights": layer.routing_weights,
        "out": torch.zeros_like(layer.x),
    }
    with pytest.raises(error) as caught:
        op.forward_sft(**(good | {name: change(good[name])}))
    assert all(word in str(caught.value) for word in words), caught.value
    assert op.saved_depth == 0
    assert torch.equal(op.forward_sft(**good), expected["y"])
    assert torch.equal(op.backward(layer.grad_y).grad_x, expected["grad_x"])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"grad_y": bf16(9, 32)}, ArgumentError, ["grad_y", "[10, 32]", "[9, 32]"]),
        ({"grad_y": bf16(10, 32).half()}, TypeError, ["grad_y", "float16"]),
        ({"grad_y": None}, TypeError, ["grad_y", "None"]),
        ({"scale": "x"}, TypeError, ["scale", "number", "x"]),
        ({"scale": float("nan")}, ArgumentError, ["scale", "finite", "nan"]),
        ({"scale": 1e300}, ArgumentError, ["scale", "finite", "float32", "1e+300"]),
        ({"out": 3}, TypeError, ["out", "mapping", "int"]),
        ({"out": {"grad_z": bf16(1)}}, ArgumentError, ["out", "grad_z"]),
        ({"out": {"gate_up_lora_a": bf16(4, 4, 32)}}, ArgumentError, ["out", "gate_up_lora_a"]),
        ({"out": {"grad_x": bf16(10, 31)}}, ArgumentError, ["out.grad_x", "[10, 32]", "[10, 31]"]),
        (
            {"out": {"gate_lora_a": bf16(4, 4, 31)}},
            ArgumentError,
            ["out.gate_lora_a", "[4, 4, 32]", "[4, 4, 31]"],
        ),
        ({"out": {"up_lora_b": bf16(1, 24, 4).expand(4, 24, 4)}}, ArgumentError, ["out.up_lora_b", "overlap"]),
        (
            {"out": {"gate_lora_b": bf16(4 * 24 * 4).as_strided((4, 24, 4), (95, 4, 1))}},
            ArgumentError,
            ["out.gate_lora_b", "overlap", "(95, 4, 1)", "[4, 24, 4]"],
        ),
        ({"out": {"down_lora_b": bf16(4, 32, 4).half()}}, TypeError, ["out.down_lora_b", "float16"]),
        ({"accumulate": True}, ArgumentError, ["accumulate", "gate_lora_a", "none"]),
        (
            {"out": {"grad_routing_weights": bf16(10, 1).expand(10, 2)}},
            ArgumentError,
            ["out.grad_routing_weights", "overlap", "(1, 0)"],
        ),
        ({"skip": ["grad_z"]}, ArgumentError, ["skip", "grad_x", "grad_z"]),
        ({"skip": 3}, TypeError, ["skip", "names", "int", "3"]),
        ({"skip": None}, TypeError, ["skip", "names", "NoneType"]),
        ({"skip": "grad_x"}, TypeError, ["skip", "names", "str", "'grad_x'"]),
        ({"skip": [["grad_x"], 3]}, ArgumentError, ["skip", "grad_routing_weights", "[['grad_x'], 3]"]),
        ({"skip": ["grad_x"], "out": {"grad_x": bf16(10, 32)}}, ArgumentError, ["skip", "out", "grad_x"]),
    ],
)
def test_backward(arguments: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    layer = make_layer(SIZES)
    op = SIZES.operator()
    expected = run(op, layer)
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    with pytest.raises(error) as caught:
        op.backward(**({"grad_y": layer.grad_y} | arguments))
    assert all(word in str(caught.value) for word in words), caught.value
    assert op.saved_depth == 1, "a refused backward keeps its entry"
    found = op.backward(layer.grad_y).as_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_unknown_gradient_name() -> None:
    with pytest.raises(ArgumentError, match="grad_z"):
        amx_sft_moe.Gradients(grad_z=1)
