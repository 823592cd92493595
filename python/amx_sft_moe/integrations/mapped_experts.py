"""Experts whose matrices lie one by one in mapped files, in place of a model's stacked parameters.

transformers holds the experts of a layer in one parameter ``[E, rows, cols]``. Checkpoints mostly hold one
matrix per expert; stacking them is a copy of the whole model in memory. A :class:`MappedStack` is such a
parameter to whoever asks for its shape, dtype or size (PEFT, the Trainer, parameter counts), and takes no
memory. The hook takes the matrices out by :func:`weights_one_by_one`.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from amx_sft_moe.errors import ArgumentError, StateError

_aten = torch.ops.aten
_MARK = "_amx_sft_moe_original"
_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"  # torch's name


class MappedStack(torch.Tensor):
    """A frozen tensor ``[E, rows, cols]`` on the CPU whose experts are kept where they lie.

    Expert e is the rows of ``parts[0][e]``, ``parts[1][e]``, ... below each other. One expert may be read
    (``stack[e]``, a copy of that expert where it has several parts), parts and experts may be split off
    (``split``, ``chunk``, ``unbind``), which is what saving a model in its checkpoint's form asks for. Anything
    that would need all experts in one piece, or would write into them, raises StateError. ``.to(device)``
    leaves it where it is; another dtype is refused.

    Args:
        parts: for each part one matrix ``[rows of the part, cols]`` per expert, of one dtype.
        name: of the parameter, for messages.
    """

    parts: tuple[tuple[torch.Tensor, ...], ...]
    parameter_name: str

    # Everything goes to __torch_dispatch__, where views and copies have few names.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=torch.device("cpu"))
        made.parts = tuple(tuple(part) for part in parts)
        made.parameter_name = name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stack = next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, MappedStack))
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
        raise StateError(_refusal(self, f"rows {start} to {stop}"))

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the first matrix, as an identity: saving looks for parameters that share memory."""
        return self.parts[0][0].untyped_storage()

    def data_ptr(self) -> int:
        """Raises StateError: there is no such address."""
        raise StateError(_refusal(self, "data_ptr"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = list(self.shape)
        return f"MappedStack({self.parameter_name!r}, {shape=}, dtype={self.dtype}, parts={len(self.parts)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        # Files do not change: a copy of the model reads the same ones.
        copied = MappedStack(self.parts, self.parameter_name)
        return as_parameter(copied) if isinstance(self, nn.Parameter) else copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(_refusal(self, "pickling"))


def _refusal(stack: MappedStack, what: object) -> str:
    name = f"{stack.parameter_name}: " if stack.parameter_name else ""
    return (
        f"{name}expected a use that leaves the experts where they lie in mapped files, got {what}, which "
        "stacks or changes them. Run them by experts_implementation='amx_sft_moe'; save the adapter alone "
        "(model.save_pretrained or save_per_expert); merge it by `python -m amx_sft_moe adapter merge`; to "
        "change or train experts, load by from_pretrained"
    )


def _same(stack: MappedStack, *args: Any, **options: Any) -> MappedStack:
    dtype = options.get("dtype")
    if dtype is not None and dtype != stack.dtype:
        may = dtype in (torch.bfloat16, torch.float32)
        advice = (
            f": load the model by load_model(..., dtype={dtype})" if may else ", in which experts cannot be"
        )
        raise StateError(
            f"{stack.parameter_name}: expected to stay in {stack.dtype} as in its files, got {dtype}{advice}"
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


def weights_one_by_one(
    laid_out_otherwise: bool, gate_up: torch.Tensor, down: torch.Tensor
) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """Weights of which at least one is a stack, as :class:`amx_sft_moe.nn.ExpertWeights` takes them.

    Returns:
        ``gate_proj`` and ``up_proj``, a tuple of matrices ``[I, H]`` each, or ``gate_up_proj`` as it is; and
        ``down_proj``, matrices ``[H, I]``, or as it is.

    Args:
        laid_out_otherwise: whether the model holds its weights transposed or gate and up interleaved; stacks of
            such models are not made, so StateError says that something went wrong.
    """
    if laid_out_otherwise:
        stacks = [weight for weight in (gate_up, down) if isinstance(weight, MappedStack)]
        raise StateError(_refusal(stacks[0], "a transposed or interleaved layout"))
    for weight in (gate_up, down):
        if isinstance(weight, MappedStack) and weight.requires_grad and torch.is_grad_enabled():
            raise StateError(_refusal(weight, "requires_grad=True"))
    weights: dict[str, Any] = {"gate_up_proj": gate_up, "down_proj": down}
    if isinstance(gate_up, MappedStack):
        rows = gate_up.shape[1]
        del weights["gate_up_proj"]
        weights["gate_proj"], weights["up_proj"] = gate_up.rows(0, rows // 2), gate_up.rows(rows // 2, rows)
    if isinstance(down, MappedStack):
        weights["down_proj"] = down.rows(0, down.shape[1])
    return weights


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has an address to ask for; a stack, a fake tensor, a sharded one and those within
    transforms of torch.func have none."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def address_of(weight: torch.Tensor) -> int:
    """``data_ptr``, or 0 of what has none."""
    return weight.data_ptr() if has_memory(weight) else 0


def is_mapped(module: nn.Module) -> bool:
    """Whether a parameter of the experts module, adapted or not, is a stack."""
    return any(isinstance(parameter, MappedStack) for parameter in module.parameters())


def refuse_merging() -> None:
    """Has PEFT's own question before merging, where it asks it, answered with StateError for mapped models.

    Without that PEFT would merge other modules before it comes to the experts, which refuse. Idempotent.
    """
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.tuners_utils import BaseTuner

    original = getattr(BaseTuner, "_check_merge_allowed", None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def check(self: Any, *args: Any, **options: Any) -> Any:
        stack = next((each for each in self.model.parameters() if isinstance(each, MappedStack)), None)
        if stack is not None:
            raise StateError(_refusal(stack, "merging"))
        return original(self, *args, **options)

    setattr(check, _MARK, original)
    BaseTuner._check_merge_allowed = check  # type: ignore[method-assign]


def refuse_casts(model: nn.Module) -> None:
    """Has ``model.float()`` and the like refused by the stacks before any other parameter is changed."""

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for parameter in self.parameters():
            if isinstance(parameter, MappedStack):
                fn(parameter)
                break
        return type(self)._apply(self, fn, recurse)

    model._apply = types.MethodType(_apply, model)  # type: ignore[method-assign]


def leave_out_of_data_parallel(model: nn.Module) -> None:
    """Has DistributedDataParallel leave the stacks out, which would send them to all processes at its start.

    It asks the module that it is given for their names. PEFT's models answer with what this one says, in which
    their own names are too: each parameter that is adapted in an experts module puts a wrapper around it.
    """
    names = list(getattr(model, _LEFT_OUT, ()))
    for path, module in model.named_modules():
        stacks = [leaf for leaf, each in module._parameters.items() if isinstance(each, MappedStack)]
        wrapped = [f"{path}{'.base_layer' * depth}" for depth in range(len(module._parameters) + 1)]
        for below in ("", "base_model.model."):
            names += [f"{below}{each}.{leaf}" for leaf in stacks for each in wrapped]
    setattr(model, _LEFT_OUT, names)


def mapped_bytes(model: nn.Module) -> int:
    """Bytes of expert weights that ``model`` leaves one by one in mapped files."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if isinstance(p, MappedStack))
