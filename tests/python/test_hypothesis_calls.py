"""An operator called in any order, rightly and wrongly, beside a model of its stack and its results in float64.
AMX_SFT_MOE_HYPOTHESIS=full tries 50 times more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from amx_sft_moe import ArgumentError, Gradients, StateError
from amx_sft_moe.sft_moe import GRADIENT_NAMES
from problems import (
    AVAILABLE,
    BF16,
    BIAS_NAMES,
    DTYPES,
    FP32,
    KERNELS,
    WEIGHT_NAMES,
    Base,
    Call,
    Extents,
    Lora,
    bases,
    calls,
    examples,
    expected,
    extents,
    formulas,
    layouts,
    loras,
    normals,
    parameters,
)

CALL_NAMES = ("grad_x", "grad_routing_weights")


@st.composite
def outputs(draw: Any, shape: tuple[int, ...], filled: Tensor | None = None, adjacent: bool = True) -> Tensor:
    """A tensor for a result, NaN where it holds no value to add to; ``adjacent``: as rows of x have to be."""
    values = torch.full(shape, torch.nan) if filled is None else filled
    return draw(layouts(len(shape), adjacent=adjacent, expand=False)).store(values.to(draw(DTYPES)))


def untouched_around(view: Tensor) -> bool:
    """Whether all memory that is none of the elements of ``view`` is NaN still."""
    memory = view._base if view._base is not None else view
    return int(memory.isnan().sum()) == memory.numel() - view.numel()


@dataclass
class Entry:
    """One saved forward of the model: its inputs, and the parameters at that time."""

    call: Call
    base: Base
    lora: Lora


WRONG_ROWS: list[Any] = [
    lambda t: torch.cat([t, t[:, :1]], 1),
    lambda t: torch.cat([t, torch.ones_like(t[:1]) if len(t) else t.new_ones(1, t.shape[1])]),
    lambda t: t[None],
    lambda t: t.flatten(),
    lambda t: t.double(),
    lambda t: t.half(),
    lambda t: t.to(torch.int16),
    lambda t: t.tolist(),
    lambda t: t.to("meta"),
    lambda t: None if t.shape[1] < 2 or len(t) < 2 else t.t().contiguous().t(),
]
WRONG_RESULTS: list[Any] = [
    *WRONG_ROWS[:7],
    lambda t: "y",
    lambda t: t[:1].expand_as(t) if len(t) > 1 else 3,
    lambda t: np.broadcast_to(np.zeros((), np.float32), t.shape),
]


class Calls(RuleBasedStateMachine):
    """An operator, called in any order, beside what it has to hold."""

    @initialize(data=st.data(), sizes=extents(12), kernel=KERNELS, alpha=st.sampled_from([None, 6.0]))
    def make(self, data: st.DataObject, sizes: Extents, kernel: tuple[str, torch.dtype], alpha: Any) -> None:
        self.sizes, self.kernel, self.alpha = sizes, kernel[0], alpha
        self.depth, self.max_tokens = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, 6]))
        activation, self.formula = data.draw(formulas(BF16))
        self.op = sizes.operator(
            lora_alpha=alpha,
            max_tokens=self.max_tokens,
            cache_depth=self.depth,
            activation=activation,
            kernel=self.kernel,
            num_threads=1,
        )
        self.base: Base | None = None
        self.lora = Lora()
        self.stack: list[Entry] = []
        ones = torch.ones(1, sizes.top_k)
        self.probe = Call(torch.ones(1, sizes.hidden), ones.int() * (sizes.experts - 1), ones)
        if data.draw(st.integers(0, 9)):
            self.set_base(data)
            self.set_lora(data)

    def state(self) -> tuple[Any, ...]:
        """What a caller can see of the operator."""
        op = self.op
        y = None if self.base is None else op.forward_sft(*self.probe.inputs(), False).tolist()
        return op.saved_depth, op.kernel, op.weight_dtype, op.memory()["saved_bytes"], y

    @contextmanager
    def refused(self, *results: Any, errors: Any = (ArgumentError, StateError, TypeError)) -> Iterator[None]:
        """The call within is refused and changes neither the operator nor ``results``."""
        results = [result for result in results if isinstance(result, Tensor) and not result.is_meta]
        before, copies = self.state(), [result.clone() for result in results]
        with pytest.raises(errors):
            yield
        assert self.state() == before
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(results, copies, strict=True))

    @rule(data=st.data())
    def set_base(self, data: st.DataObject) -> None:
        base = data.draw(
            bases(self.sizes, data.draw(st.sampled_from([d for k, d in AVAILABLE if k == self.kernel])))
        )
        if self.stack and base.dtype != self.stack[-1].base.dtype:
            with self.refused(errors=StateError):
                self.op.set_base(**base.arguments)
        else:
            self.op.set_base(**base.arguments)
            self.base = base

    @rule(data=st.data())
    def set_lora(self, data: st.DataObject) -> None:
        self.lora = data.draw(loras(self.sizes, self.alpha)) if data.draw(st.integers(0, 7)) else Lora()
        self.op.set_lora(**self.lora.arguments)

    @rule(data=st.data(), what=st.sampled_from(["base", "lora"]))
    def set_what_does_not_fit(self, data: st.DataObject, what: str) -> None:
        drawn = data.draw(bases(self.sizes, FP32) if what == "base" else loras(self.sizes, self.alpha))
        tensors = {name: value for name, value in drawn.arguments.items() if isinstance(value, (Tensor, list))}
        if not tensors:
            return
        name = data.draw(st.sampled_from(sorted(tensors)))
        wrong: list[Any] = [3, "x", [], tensors[name][:0], torch.zeros(self.sizes.experts, 3, 2, 1)]
        if isinstance(tensors[name], Tensor):
            wrong += [
                tensors[name].half(),
                tensors[name].to("meta"),
                torch.cat([tensors[name]] * 2),
            ]
        if not name.endswith("bias"):
            wrong += [None]
        changed = drawn.arguments | {name: data.draw(st.sampled_from(wrong))}
        with self.refused():
            (self.op.set_base if what == "base" else self.op.set_lora)(**changed)

    @rule(data=st.data(), save=st.sampled_from([True, True, False]), into=st.booleans())
    def forward(self, data: st.DataObject, save: bool, into: bool) -> None:
        call = data.draw(calls(self.sizes, 8))
        out = data.draw(outputs(call.x.shape)) if into else None
        too_many = self.max_tokens is not None and len(call.x) > self.max_tokens
        if self.base is None or too_many or (save and len(self.stack) == self.depth):
            with self.refused(out):
                self.op.forward_sft(*call.inputs(), save, out)
            return
        y = self.op.forward_sft(*call.inputs(), save, out)
        assert y is out if into else y.dtype == call.x.dtype
        assert not into or untouched_around(out)
        right = expected(self.base, self.lora, call, torch.zeros(call.x.shape), self.formula)
        right.check("y", y)
        if save:
            kept = Call(*[tensor.clone() for tensor in call.inputs()])
            self.stack.append(Entry(kept, self.base, self.lora))
            for tensor in call.inputs():  # what is saved is the operator's own
                tensor.untyped_storage().fill_(0)

    @rule(data=st.data(), wrong=st.sampled_from(["x", "expert_ids", "routing_weights", "out"]))
    def forward_of_what_does_not_fit(self, data: st.DataObject, wrong: str) -> None:
        call = data.draw(calls(self.sizes, 6))
        arguments = vars(call) | {"out": data.draw(outputs(call.x.shape))}
        changes = {"x": WRONG_ROWS, "out": WRONG_RESULTS}  # ids and weights may have any strides
        change = data.draw(st.sampled_from(changes.get(wrong, WRONG_ROWS[:-1])))
        arguments[wrong] = change(arguments[wrong])
        with self.refused(arguments["out"]):
            self.op.forward_sft(**arguments, save_for_backward=data.draw(st.booleans()))

    @rule(data=st.data())
    def backward(self, data: st.DataObject) -> None:
        entry = self.stack[-1] if self.stack else None
        call = entry.call if entry else self.probe
        grad_y = data.draw(layouts(2, adjacent=True)).store(
            data.draw(normals())(*call.x.shape, dtype=data.draw(DTYPES))
        )
        if entry is None or entry.lora.ranks != self.lora.ranks:
            with self.refused():
                self.op.backward(grad_y)
            return
        owners = {"grad_x": call.x, "grad_routing_weights": call.routing_weights}
        owners |= parameters(self.base, self.lora)
        skip = data.draw(st.sets(st.sampled_from(GRADIENT_NAMES), max_size=6))
        named = data.draw(st.sets(st.sampled_from(sorted(owners)))) - skip
        accumulate, bias_gradients, weight_gradients = [data.draw(st.booleans()) for _ in range(3)]
        scale = data.draw(st.sampled_from([1.0, 1.0, 0.5, -2.0, 0.0]))
        unasked = {*(() if bias_gradients else BIAS_NAMES), *(() if weight_gradients else WEIGHT_NAMES)}
        wanted = {n for n in owners if n in named or n not in skip | unasked}
        if accumulate and data.draw(st.integers(0, 4)):
            named |= wanted - set(CALL_NAMES)
        normal = data.draw(normals())
        out = {}
        for name in sorted(named):
            adds = accumulate and name not in CALL_NAMES
            values = normal(*owners[name].shape, dtype=BF16) if adds else None
            out[name] = data.draw(outputs(tuple(owners[name].shape), values, adjacent=name == "grad_x"))
        given = Gradients(**out) if data.draw(st.booleans()) else out
        options = {"skip": skip, "bias_gradients": bias_gradients, "weight_gradients": weight_gradients}
        if accumulate and not named >= wanted - set(CALL_NAMES):
            with self.refused(*out.values(), errors=ArgumentError):
                self.op.backward(grad_y, True, scale, given, **options)
            return
        before = {name: tensor.clone() for name, tensor in out.items()}
        found = self.op.backward(grad_y, accumulate, scale, given, **options).as_dict()
        self.stack.pop()
        assert found.keys() == wanted
        assert all(found[name] is tensor and untouched_around(tensor) for name, tensor in out.items())
        if entry.base is not self.base or entry.lora is not self.lora:
            return  # gradients by other parameters than those of the forward: of nothing in particular
        right = expected(self.base, self.lora, call, grad_y, self.formula)
        for name, tensor in found.items():
            of_call = name in CALL_NAMES
            assert name in out or tensor.dtype == owners[name].dtype
            right.check(
                name, tensor, 1.0 if of_call else scale, before[name] if accumulate and not of_call else None
            )

    @rule(data=st.data(), into=st.booleans())
    def forward_and_backward(self, data: st.DataObject, into: bool) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            self.forward(data, True, into)
            self.backward(data)

    @precondition(lambda self: self.stack)
    @rule(data=st.data())
    def backward_of_what_does_not_fit(self, data: st.DataObject) -> None:
        rows = torch.zeros(self.stack[-1].call.x.shape)
        change = data.draw(st.sampled_from(WRONG_ROWS))
        of_out = data.draw(st.sampled_from(WRONG_RESULTS))
        options = data.draw(
            st.sampled_from(
                [
                    {"grad_y": change(rows)},
                    {"out": {"grad_x": of_out(rows)}},
                    {"out": 3},
                    {"out": {"grad_z": rows}},
                    {"out": {"gate_up_lora_a": rows, "gate_lora_a": rows}},
                    {"skip": ["grad_z"]},
                    {"skip": "grad_x"},
                    {"scale": float("nan")},
                    {"scale": float("inf")},
                    {"scale": "x"},
                ]
            )
        )
        with self.refused(rows):
            self.op.backward(**({"grad_y": rows} | options))

    @rule()
    def clear(self) -> None:
        self.op.clear()
        self.stack.clear()

    @invariant()
    def depth_is_that_of_the_model(self) -> None:
        assert self.op.saved_depth == len(self.stack)
        assert self.op.memory()["saved_bytes"] >= 0


TestCalls = Calls.TestCase
TestCalls.settings = examples(60, stateful_step_count=25)
