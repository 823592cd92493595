"""Experts whose matrices lie one by one in mapped files, in place of a model's stacked parameters.

transformers holds the experts of a layer in one parameter ``[E, rows, cols]``. Checkpoints mostly hold one
matrix per expert; stacking them is a copy of the whole model in memory. A :class:`MappedStack` is such a
parameter to whoever asks for its shape, dtype or size (PEFT, the Trainer, parameter counts) and takes no memory.
The hook finds the matrices by :func:`mapped_weights_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amx_sft_moe.errors import ArgumentError, StateError

_aten = torch.ops.aten


class MappedStack(torch.Tensor):
    """A frozen tensor ``[E, rows, cols]`` on the CPU whose experts are kept where they lie.

    Expert e is the rows of ``parts[0][e]``, ``parts[1][e]``, ... below each other. One expert may be read
    (``stack[e]``, a copy of that expert where it has several parts), parts and experts may be split off
    (``split``, ``chunk``, ``unbind``), which is what saving a model in its checkpoint's form asks for. Anything
    that would need all experts in one piece, or would write into them, raises StateError. ``.to(device)`` leaves
    it where it is; another dtype is refused.

    Args:
        parts: for each part one matrix ``[rows of the part, cols]`` per expert, of one dtype.
        name: of the parameter, for messages.
    """

    parts: tuple[tuple[torch.Tensor, ...], ...]
    parameter_name: str

    # Everything goes to __torch_dispatch__, where views and copies have few names.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, parts: Sequence[Sequence[torch.Tensor]], name: str = "") -> MappedStack:
        first = parts[0][0]
        for number, part in enumerate(parts):
            if len(part) != len(parts[0]):
                raise ArgumentError(f"parts[{number}]: expected {len(parts[0])} experts, got {len(part)}")
            for expert, matrix in enumerate(part):
                expected = (part[0].shape[0], first.shape[-1])
                if tuple(matrix.shape) != expected or matrix.dtype != first.dtype:
                    raise ArgumentError(
                        f"parts[{number}][{expert}]: expected {list(expected)} {first.dtype}, got "
                        f"{list(matrix.shape)} {matrix.dtype}"
                    )
        rows = sum(part[0].shape[0] for part in parts)
        shape = (len(parts[0]), rows, first.shape[-1])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device="cpu")
        made.parts = tuple(tuple(part) for part in parts)
        made.parameter_name = name
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stack = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, MappedStack))
        rule = _RULES.get(func)
        if rule is None or args[:1] != (stack,):
            raise StateError(_refusal(stack, func))
        return rule(*args, **(kwargs or {}))

    def expert(self, index: int) -> torch.Tensor:
        """``[rows, cols]`` of one expert: in place where it is one matrix, else a copy."""
        matrices = [part[index] for part in self.parts]
        # Autograd wants a tensor that it has not seen.
        return matrices[0].detach() if len(matrices) == 1 else torch.cat(matrices)

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Rows start to stop of each expert, in place. They must lie within one part."""
        first = 0
        for part in self.parts:
            count = part[0].shape[0]
            if (start, stop) == (first, first + count):
                return part
            if first <= start and stop <= first + count:
                return tuple(matrix[start - first : stop - first] for matrix in part)
            first += count
        raise StateError(f"{self.parameter_name}: expected rows of one matrix, got {start} to {stop} of several")

    def __repr__(self, **options: Any) -> str:
        return (
            f"MappedStack({self.parameter_name!r}, shape={list(self.shape)}, dtype={self.dtype}, parts={len(self.parts)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        # Files do not change: a copy of the model reads the same ones.
        copied = MappedStack(self.parts, self.parameter_name)
        return as_parameter(copied) if isinstance(self, nn.Parameter) else copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(_refusal(self, "pickling"))


def _refusal(stack: MappedStack, what: object) -> str:
    name = f"{stack.parameter_name}: " if stack.parameter_name else ""
    return (
        f"{name}expected a use that leaves experts one by one in their mapped files, got {what}, which needs them "
        "stacked or changes them. Run them by experts_implementation='amx_sft_moe'; to merge an adapter use "
        "`python -m amx_sft_moe adapter merge`; to change or train the experts load the model with "
        "from_pretrained"
    )


def _same(stack: MappedStack, *args: Any, **options: Any) -> MappedStack:
    dtype = options.get("dtype")
    if dtype is not None and dtype != stack.dtype:
        raise StateError(
            f"{stack.parameter_name}: expected to stay in {stack.dtype}, as in its files, got {dtype}: give load_model that "
            "dtype"
        )
    return MappedStack(stack.parts, stack.parameter_name)


def _select(stack: MappedStack, dim: int, index: int) -> torch.Tensor:
    if dim not in (0, -3):
        raise StateError(_refusal(stack, f"select in dimension {dim}"))
    return stack.expert(index)


def _split(stack: MappedStack, size: int | Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    length = stack.shape[dim]
    if isinstance(size, int):
        size = [min(size, length - start) for start in range(0, length, size)]
    starts = [sum(size[:index]) for index in range(len(size))]
    if dim in (0, -3) and set(size) == {1}:
        return [stack.expert(index)[None] for index in range(length)]
    if dim in (1, -2):
        return [
            MappedStack([stack.rows(start, start + count)], stack.parameter_name)
            for start, count in zip(starts, size, strict=True)
        ]
    raise StateError(_refusal(stack, f"split into {list(size)} in dimension {dim}"))


def _unbind(stack: MappedStack, dim: int = 0) -> list[torch.Tensor]:
    if dim not in (0, -3):
        raise StateError(_refusal(stack, f"unbind in dimension {dim}"))
    return [stack.expert(index) for index in range(stack.shape[0])]


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten._to_copy.default: _same,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
}


def as_parameter(stack: MappedStack) -> nn.Parameter:
    """The stack as a parameter that requires no gradient."""
    return nn.Parameter(stack, requires_grad=False)


def mapped_weights_of(module: nn.Module) -> dict[str, tuple[torch.Tensor, ...]] | None:
    """The base weights of a mapped experts module, below whatever adapts it: ``gate_proj``, ``up_proj`` (a tuple of
    matrices ``[I, H]``) and ``down_proj`` (``[H, I]``), one matrix per expert, as :class:`FrozenExperts` takes
    them. ``None`` where the module's parameters are not mapped.

    Gate and up are the upper and the lower half of ``gate_up_proj``, so this is for modules with
    ``is_concatenated`` and without ``is_transposed``; others are never mapped. The same tuples come each time.
    """
    stacks = {name: _stack_of(module, name) for name in ("gate_up_proj", "down_proj")}
    if any(stack is None for stack in stacks.values()):
        return None
    found = getattr(stacks["gate_up_proj"], "_halves", None)
    if found is None:
        rows = stacks["gate_up_proj"].shape[1]
        found = tuple(stacks["gate_up_proj"].rows(*half) for half in ((0, rows // 2), (rows // 2, rows)))
        stacks["gate_up_proj"]._halves = found  # the hook tells by identity whether weights changed
    return {"gate_proj": found[0], "up_proj": found[1], "down_proj": stacks["down_proj"].rows(0, stacks["down_proj"].shape[1])}


def _stack_of(module: nn.Module, name: str) -> MappedStack | None:
    weight = module._parameters.get(name)
    if weight is None and nn.utils.parametrize.is_parametrized(module, name):
        weight = getattr(module.parametrizations[name], "original", None)
    return weight if isinstance(weight, MappedStack) else None


def mapped_bytes(model: nn.Module) -> int:
    """Bytes of expert weights that ``model`` leaves one by one in mapped files."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if isinstance(p, MappedStack))
