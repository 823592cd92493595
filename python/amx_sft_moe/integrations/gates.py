"""Which of the operator's activations an experts module computes, found out by what it does.

Models spell the same gate in many ways: an ``act_fn`` of one class or another, an ``_apply_gate`` of their own
with clamps and constants under names of their own. So the gate is run on a grid of values, and its results and
derivatives are compared with the formulas that the operator knows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from amx_sft_moe.integrations.adapters_in_use import NotUnderstoodError
from amx_sft_moe.integrations.mapped_experts import address_of, has_memory

_Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# From where exponentials matter to where only clamps do; crooked, so that no clamp has its kink on one of them.
_MAGNITUDES = (1.31e-3, 0.317, 1.173, 2.719, 5.37, 11.3, 37.1, 1.07e3, 1.3e5)
# The published constants of gpt-oss, for modules that have them in their code.
_LIMIT, _ALPHA = 7.0, 1.702
# Gates that go through float32 agree with float64 to this; different activations differ by 1e-4 and more.
_TOLERANCE = 2e-6
_PLAIN: dict[str, _Formula] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
}


@dataclass(frozen=True)
class Gate:
    """The activation as :class:`amx_sft_moe.SftMoe` takes it, and whether gate and up entries alternate."""

    activation: str | Mapping[str, Any]
    interleaved: bool


@dataclass(frozen=True)
class _Known:
    """What was found of a module, which it must not keep alive: nothing here leads to one."""

    gate: Gate | str  # or why there is none: an exception would have the module in its frames
    seen: tuple[Any, ...]


# Where a module keeps its forward and backward hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Gates do not change between calls, but attributes may: what was found holds while they are as they were.
_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def gate_of(module: nn.Module) -> Gate:
    """The gate of an experts module.

    Raises:
        NotUnderstoodError: it is none that the operator knows, or a part of the module that it calls, such as
            ``act_fn``, has hooks or a forward of its own: whoever put them there wants them called, and with
            the model's values.
    """
    _require_no_hooks(module)  # in each call and before anything of it is run; it changes nothing that is known
    seen = _what_decides(module)
    known = _known.get(module)
    if known is None or known.seen != seen:
        known = _Known(_recognise(module), seen)
        _known[module] = known
    if isinstance(known.gate, str):
        raise NotUnderstoodError(known.gate)
    return known.gate


def _require_no_hooks(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if part is module:
            continue  # its own are called around the whole, whoever computes it
        has_hooks = any(map(part.__dict__.get, _HOOKS))
        if has_hooks or _has_own_forward(part):
            what = "some" if has_hooks else "a forward of its own"
            raise NotUnderstoodError(
                f"expected {name} without hooks, which the operator cannot call, got {what}"
            )


def _has_own_forward(module: nn.Module) -> bool:
    own = module.__dict__.get("forward")
    # torch.compile's module has one, and the compiled module as a part, which is asked too. The package kernels
    # binds the class's own where it has no kernel.
    of_compiled = "_orig_mod" in module._modules
    return own is not None and not of_compiled and getattr(own, "__func__", None) is not type(module).forward


def _what_decides(module: nn.Module) -> tuple[Any, ...]:
    """Code, constants and modes that the gate may depend on."""
    act_fn = getattr(module, "act_fn", None)
    own, of_act_fn = module.__dict__, getattr(act_fn, "__dict__", {})
    return (
        # Not the type: torch's parametrizations make a new one whenever they come.
        getattr(type(module), "_apply_gate", None),
        _weakly(own.get("_apply_gate")),
        _weakly(act_fn),
        tuple([value for value in own.values() if type(value) in (bool, int, float)]),
        tuple([value for value in of_act_fn.values() if type(value) in (bool, int, float, str)]),
    )


def _weakly(code: Any) -> Any:
    """Something that is equal for equal code as long as that is there, and not afterwards; or the code itself
    where it knows no weak references."""
    try:
        return weakref.WeakMethod(code) if isinstance(code, MethodType) else weakref.ref(code)
    except TypeError:
        return code


def _recognise(module: nn.Module) -> Gate | str:
    # In a thread of its own, as torch keeps modes by thread. The caller's (no_grad, inference, autocast, hooks
    # on saved tensors, dispatch modes, torch.func) change nothing here and see nothing of it: under
    # checkpointing what is run and saved must not count, since the second time nothing is probed. Compiled
    # activations run uncompiled under _Reads, as torch.compile has it in dispatch modes: the thread would wait
    # for the lock of a compilation that waits for it.
    with ThreadPoolExecutor(1) as without_modes:
        return without_modes.submit(_matching_or_reason, module).result()


def _matching_or_reason(module: nn.Module) -> Gate | str:
    try:
        return _matching(module)
    except NotUnderstoodError as reason:
        return str(reason)


def _matching(module: nn.Module) -> Gate:
    for interleaved in (False, True):
        probe = _Probe(module, interleaved)
        for activation, formula in _candidates(module):
            if probe.agrees_with(formula):
                return Gate(activation, interleaved)
    act_fn = getattr(module, "act_fn", None)
    name = "no act_fn" if act_fn is None else f"act_fn {getattr(act_fn, '__name__', type(act_fn).__name__)}"
    own = "the default _apply_gate" if _has_default_gate(module) else "an overridden _apply_gate"
    raise NotUnderstoodError(
        "expected a gate that computes SiLU(gate) * up, GELU(gate) * up or gpt-oss's clamped form, got "
        f"{own} with {name} that computes something else"
    )


def _has_default_gate(module: nn.Module) -> bool:
    from transformers.integrations import moe

    return getattr(type(module), "_apply_gate", None) is getattr(moe, "_default_apply_gate", None)


def _numbers(module: nn.Module) -> list[float]:
    """Constants that the module holds, whatever their names."""
    values = [value for value in module.__dict__.values() if type(value) in (int, float) and value > 0]
    return list(dict.fromkeys(float(value) for value in values))


def _candidates(module: nn.Module) -> Iterator[tuple[str | Mapping[str, Any], _Formula]]:
    yield from _PLAIN.items()
    numbers = _numbers(module)
    for limit, alpha in product(dict.fromkeys([*numbers, _LIMIT]), dict.fromkeys([*numbers, _ALPHA])):
        yield {"limit": limit, "alpha": alpha}, _gpt_oss(limit, alpha)


def _gpt_oss(limit: float, alpha: float) -> _Formula:
    def formula(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)

    return formula


class _Reads(TorchDispatchMode):
    """Notes which of a module's tensors are read, and whether anything random is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tensors = [*module.parameters(), *module.buffers()]
        self._addresses = {address_of(tensor) for tensor in tensors if tensor.numel() > 0} - {0}
        self.found: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.found = "random numbers"
        read = list(_tensors((args, kwargs)))
        if any(not has_memory(each) or each.data_ptr() in self._addresses for each in read):
            self.found = "tensors of the module"
        return function(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for value in values:
            yield from _tensors(value)


class _Probe:
    """A module's gate on every pair of some gate and some up values: results and derivatives."""

    def __init__(self, module: nn.Module, interleaved: bool) -> None:
        # Both sides of every constant that could be a clamp.
        beside = [number * factor for number in _numbers(module) for factor in (0.97, 1.03)]
        positive = [*_MAGNITUDES, *(value for value in beside if value < 1e6)]
        values = torch.tensor(
            [*positive, *(-value for value in positive), 0.0137], dtype=torch.float64, device="cpu"
        )
        self._gate, self._up = (
            grid.clone().requires_grad_() for grid in torch.meshgrid(values, values, indexing="ij")
        )
        pairs = torch.stack((self._gate, self._up), dim=-1 if interleaved else 1).flatten(1)
        reads = _Reads(module)
        with reads:
            self._found = self._with_derivatives(module, pairs)
        if self._found is not None and reads.found is not None:
            raise NotUnderstoodError(
                f"expected a gate that depends on its input alone, got one that reads {reads.found}"
            )
        self._scales = self._scales_of_errors()

    def _with_derivatives(self, module: nn.Module, pairs: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        try:
            apply_gate: Any = module._apply_gate
            return self._differentiated(apply_gate(pairs))
        except Exception:  # other people's code on values of our choice
            return None

    def _differentiated(self, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (result.detach(), *torch.autograd.grad(result.sum(), (self._gate, self._up)))

    def _scales_of_errors(self) -> tuple[torch.Tensor, ...]:
        # Absolute errors of float32 are in proportion to what the activation multiplies.
        gate, up = self._gate.detach().abs(), self._up.detach().abs()
        return 1 + up, (1 + up) * (1 + gate.clamp(max=40)), 1 + gate.clamp(max=40)

    def agrees_with(self, formula: _Formula) -> bool:
        """Whether results and derivatives are those of ``formula``."""
        if self._found is None or self._found[0].shape != self._gate.shape:
            return False
        wanted = self._differentiated(formula(self._gate, self._up))
        return all(
            bool(((one - other).abs() <= _TOLERANCE * (scale + 10 * other.abs())).all())
            for one, other, scale in zip(self._found, wanted, self._scales, strict=True)
        )
