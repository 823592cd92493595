"""Gates are known by what they compute: whoever spells them, and whatever comes close."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from amx_sft_moe.integrations import gates
from amx_sft_moe.integrations.adapters_in_use import NotUnderstoodError
from amx_sft_moe.integrations.gates import Gate, gate_of


class NothingKnown:
    """Has no place for weak references."""

    __slots__ = ()

    def __call__(self, gate: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate)


class Experts(nn.Module):
    """What the recogniser looks at."""

    def __init__(self, gate: Callable[[Any, Tensor], Tensor], **constants: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 4, 3))
        self.num_experts, self.intermediate_dim = 2, 2
        for name, value in constants.items():
            setattr(self, name, value)
        self._apply_gate = MethodType(gate, self)


def halves(pairs: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = pairs.chunk(2, dim=-1)
    return gate, up


def by_act_fn(self: Any, pairs: Tensor) -> Tensor:
    gate, up = halves(pairs)
    return self.act_fn(gate) * up


def gpt_oss(self: Any, pairs: Tensor) -> Tensor:
    gate, up = pairs[..., ::2], pairs[..., 1::2]
    gate, up = gate.clamp(max=self.cap), up.clamp(-self.cap, self.cap)
    return (up + 1) * gate * torch.sigmoid(self.steepness * gate)


def with_its_own_numbers(self: Any, pairs: Tensor) -> Tensor:
    gate, up = halves(pairs)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def in_float32(self: Any, pairs: Tensor) -> Tensor:
    gate, up = halves(pairs)
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


KNOWN = {
    "act_fn": (Experts(by_act_fn, act_fn=nn.SiLU()), Gate("silu", False)),
    "written out": (
        Experts(lambda self, p: halves(p)[1] * halves(p)[0].sigmoid() * halves(p)[0]),
        Gate("silu", False),
    ),
    "alternating": (Experts(lambda self, p: F.silu(p[..., ::2]) * p[..., 1::2]), Gate("silu", True)),
    "float32": (Experts(in_float32), Gate("silu", False)),
    "gelu in float32": (
        Experts(lambda self, p: (F.gelu(halves(p)[0].float()) * halves(p)[1].float()).double()),
        Gate("gelu", False),
    ),
    "gpt-oss": (Experts(gpt_oss, cap=7.0, steepness=1.702), Gate({"limit": 7.0, "alpha": 1.702}, True)),
    "other constants": (Experts(gpt_oss, cap=3, steepness=1.1), Gate({"limit": 3.0, "alpha": 1.1}, True)),
    "constants in code": (Experts(with_its_own_numbers), Gate({"limit": 7.0, "alpha": 1.702}, False)),
    "a clamp that never acts": (
        Experts(lambda self, p: F.silu(halves(p)[0]) * halves(p)[1].clamp(-float("inf"), float("inf"))),
        Gate("silu", False),
    ),
} | {
    name: (Experts(by_act_fn, act_fn=ACT2FN[name]), Gate(activation, False))
    for name, activation in {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }.items()
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_gates(name: str) -> None:
    experts, expected = KNOWN[name]
    assert gate_of(experts) == expected


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor) -> Tensor:
        return F.silu(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def learned(self: Any, pairs: Tensor) -> Tensor:
    gate, up = halves(pairs)
    return F.silu(gate) * up * self.gain


def clamped(limit: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, p: F.silu(halves(p)[0].clamp(max=limit)) * halves(p)[1].clamp(-limit, limit)


UNKNOWN = {
    "relu": Experts(by_act_fn, act_fn=nn.ReLU()),
    "quick_gelu": Experts(by_act_fn, act_fn=ACT2FN["quick_gelu"]),
    "gelu_10": Experts(by_act_fn, act_fn=ACT2FN["gelu_10"]),
    "mish": Experts(by_act_fn, act_fn=nn.Mish()),
    "up and gate exchanged": Experts(lambda self, p: F.silu(halves(p)[1]) * halves(p)[0]),
    "scaled": Experts(lambda self, p: 1.001 * F.silu(halves(p)[0]) * halves(p)[1]),
    "clamped": Experts(clamped(10.0)),
    "clamped far out": Experts(clamped(1e4)),
    "clamped at a constant of its own": Experts(lambda self, p: clamped(self.far)(self, p), far=2e5),
    "gpt-oss without the one": Experts(
        lambda self, p: (
            gpt_oss(self, p) - gpt_oss(self, torch.stack((p[..., ::2], 0 * p[..., ::2]), -1).flatten(1))
        ),
        cap=7.0,
        steepness=1.702,
    ),
    "normalised": Experts(lambda self, p: F.silu(halves(p)[0]) * halves(p)[1] / halves(p)[0].norm()),
    "other derivative": Experts(lambda self, p: StraightThrough.apply(halves(p)[0]) * halves(p)[1]),
    "wrong shape": Experts(lambda self, p: p),
    "no tensor": Experts(lambda self, p: None),
    "raises": Experts(lambda self, p: 1 / 0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_gates(name: str) -> None:
    with pytest.raises(NotUnderstoodError, match=r"expected a gate that computes .* computes something else"):
        gate_of(UNKNOWN[name])


@pytest.mark.parametrize(
    ("experts", "what"),
    [
        (Experts(learned, gain=nn.Parameter(torch.ones(()))), "tensors of the module"),
        (Experts(lambda self, p: F.silu(halves(p)[0]) * F.dropout(halves(p)[1], 1e-9)), "random numbers"),
    ],
)
def test_gates_that_depend_on_more(experts: nn.Module, what: str) -> None:
    """With these values they compute what SiLU does, with others they would not."""
    with pytest.raises(NotUnderstoodError, match=f"reads {what}"):
        gate_of(experts)


def test_what_was_found_holds_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(gpt_oss, cap=7.0, steepness=1.702)
    first = gate_of(experts)
    probes: list[nn.Module] = []
    original = gates._matching

    def counted(module: nn.Module) -> Gate:
        probes.append(module)
        return original(module)

    monkeypatch.setattr(gates, "_matching", counted)
    assert gate_of(experts) is first
    assert not probes
    experts.cap = 5.5
    assert gate_of(experts) == Gate({"limit": 5.5, "alpha": 1.702}, True)
    experts._apply_gate = MethodType(by_act_fn, experts)
    experts.act_fn = nn.GELU()
    assert gate_of(experts) == Gate("gelu", False)
    experts.act_fn.approximate = "tanh"
    assert gate_of(experts) == Gate("gelu_tanh", False)
    experts.act_fn = nn.ReLU()
    for _ in range(2):
        with pytest.raises(NotUnderstoodError):
            gate_of(experts)
    assert len(probes) == 4, "a refusal is remembered, too"


def test_modes_of_the_caller_do_not_matter() -> None:
    def fresh() -> Experts:
        return Experts(by_act_fn, act_fn=nn.SiLU())

    with torch.inference_mode():
        assert gate_of(fresh()).activation == "silu"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert gate_of(fresh()).activation == "silu"
    with torch.device("meta"):
        assert gate_of(fresh()).activation == "silu"
    x = torch.ones(3, requires_grad=True)
    experts = fresh()

    def block(x: Tensor) -> Tensor:
        assert gate_of(experts).activation == "silu"
        return x.exp()

    # Checkpointing counts what a block saves, and the second time nothing is probed.
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_a_gate_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[nn.Module] = []
    recognise = gates._recognise
    monkeypatch.setattr(gates, "_recognise", lambda module: looked.append(module) or recognise(module))

    class OfTheClass(Experts):
        def act_fn(self, gate: Tensor) -> Tensor:  # another bound method each time it is asked for
            return F.silu(gate)

    kinds = [Experts(by_act_fn, act_fn=act_fn) for act_fn in (nn.SiLU(), NothingKnown(), nn.ReLU())]
    for experts in (*kinds, OfTheClass(by_act_fn)):
        for _ in range(3):
            with contextlib.suppress(NotUnderstoodError):
                gate_of(experts)
    assert len(looked) == 4


@pytest.mark.parametrize("understood", [True, False])
def test_what_is_known_of_a_module_keeps_it_from_nothing(understood: bool) -> None:
    """Its gate leads back to it, and so do the frames of an exception."""
    experts = Experts(by_act_fn, act_fn=nn.SiLU() if understood else nn.ReLU())
    experts.act_fn.of = [experts]
    for _ in range(2):
        if understood:
            gate_of(experts)
        else:
            with pytest.raises(NotUnderstoodError):
                gate_of(experts)
    gone = weakref.ref(experts)
    del experts
    gc.collect()
    assert gone() is None


def test_another_act_fn_is_another_gate() -> None:
    experts = Experts(by_act_fn, act_fn=NothingKnown())
    assert gate_of(experts).activation == "silu"
    for act_fn, activation in ((nn.GELU(), "gelu"), (nn.SiLU(), "silu"), (torch.nn.functional.gelu, "gelu")):
        del experts.act_fn  # no longer a child module, nor anything else
        gc.collect()
        experts.act_fn = act_fn
        assert gate_of(experts).activation == activation
