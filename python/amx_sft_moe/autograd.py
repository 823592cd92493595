"""The operator as a differentiable function of x, the routing weights, the LoRA factors, the biases and the
base weights.

Everything that backward needs goes through ``save_for_backward``: gradient checkpointing of both kinds,
saved-tensor hooks and double-use checks work, and activations die with the graph. LoRA factors, biases and
base weights are ordinary inputs, so hooks, clipping, DDP, FSDP and GradScaler see their gradients, and a change
in place between forward and backward is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from amx_sft_moe import _core
from amx_sft_moe.arguments import as_finite
from amx_sft_moe.errors import ArgumentError, StateError
from amx_sft_moe.layer import ExpertBiases, ExpertWeights, Scratch, Weight, require_tensor, thread_scratch
from amx_sft_moe.profiler_ranges import profiler_ranges

_NUM_FACTORS = 6
_NO_FACTORS = (None,) * _NUM_FACTORS
_GATE_A, _UP_A, _UP_B = 0, 2, 3
_FIRST_FACTOR = 2  # of the gradients; before it: x, routing_weights
_NUM_BIASES = 4
_WEIGHTS = _NUM_FACTORS + _NUM_BIASES  # where base weights begin among the parameters of a call
# Positions of x, routing_weights and the first factor among the inputs of _Experts; biases and base weights
# follow the factors.
_X, _ROUTING_WEIGHTS, _FACTORS = 2, 4, 5

NO_SECOND_DERIVATIVE = (
    "amx_sft_moe: expected one derivative of the experts, got a second: their gradients are not differentiable "
    "(create_graph=True)"
)
CHANGED_WEIGHTS = "backward: expected base weights as they were in the forward, got changed ones"


@dataclass(frozen=True)
class LoraFactors:
    """LoRA of one layer as inputs of :func:`sft_moe`: six tensors, ``None`` where a projection has no
    adapter.

    With ``shared_a`` the first two are ``gate_up_lora_a [E, r, H]`` and ``gate_up_lora_b [E, 2I, r]`` and the
    next two ``None``; otherwise they are A ``[E, r, in]`` and B ``[E, out, r]`` of gate and of up; the last
    two of down. bfloat16 or float32, any strides. ``scaling`` is that of gate, up and down.

    Raises:
        ArgumentError, TypeError: another number of factors or scalings, a factor that is no tensor, a scaling
            that is no number, or factors of up beside ``shared_a``.
    """

    factors: Sequence[torch.Tensor | None] = _NO_FACTORS
    shared_a: bool = False
    scaling: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        for name, given, count in (("factors", self.factors, _NUM_FACTORS), ("scaling", self.scaling, 3)):
            if not isinstance(given, (tuple, list)):
                raise TypeError(f"LoraFactors: {name}: expected {count} in a tuple, got {type(given).__name__}")
            if len(given) != count:
                raise ArgumentError(f"LoraFactors: {name}: expected {count}, got {len(given)}")
        for number, factor in enumerate(self.factors):
            require_tensor(f"LoraFactors: factors[{number}]", factor)
        if not torch.compiler.is_compiling():  # where a number may be a symbol; the operator asks too
            # Copied: what a caller does to the list afterwards is not for this layer's backward.
            object.__setattr__(self, "scaling", tuple(map(_number, range(3), self.scaling)))
        if self.shared_a and (self.factors[_UP_A] is not None or self.factors[_UP_B] is not None):
            raise ArgumentError(
                "LoraFactors: factors[2], factors[3]: expected None, as the first two are of gate and up with "
                "shared_a, got tensors"
            )


def _number(index: int, value: Any) -> float:
    name = f"LoraFactors: scaling[{index}]"
    if isinstance(value, torch.Tensor):  # whose gradient nobody would get
        raise TypeError(f"{name}: expected a number, got a Tensor")
    return as_finite(name, value)


_NO_LORA = LoraFactors()


def run_forward(
    experts: ExpertWeights,
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y and what :func:`run_backward` needs of it; ``parameters`` are six factors, four biases and
    four base weights, of which the operator has the memory. ``apart``: A of gate and A of up have a gradient
    each, though they may be one in memory."""
    x = _adjacent(x)
    operator = experts.operator()
    with profiler_ranges("forward", operator), thread_scratch() as scratch:
        core_parameters = _for_core(shared_a, apart, scaling, parameters, operator, scratch)
        return operator.forward_saved(x, expert_ids, routing_weights, *core_parameters, save)


def run_backward(
    experts: ExpertWeights,
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    saved: torch.Tensor,
    grad_y: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Gradients of x, the routing weights and the parameters, where ``wanted``."""
    x, grad_y = _adjacent(x), _adjacent(grad_y.resolve_neg())  # within a graph nobody else can
    operator = experts.operator()
    with profiler_ranges("backward", operator), thread_scratch() as scratch:
        core_parameters = _for_core(shared_a, apart, scaling, parameters, operator, scratch)
        inputs = x, expert_ids, routing_weights, saved, grad_y
        given = _memory_for_gradients(parameters, wanted, apart, scratch)
        grad_x, grad_weights, *grads = operator.backward_saved(*inputs, *core_parameters, wanted, given)
        factors = zip(parameters[:_NUM_FACTORS], grads, strict=False)
        grads[:_NUM_FACTORS] = [
            grad if factor is None or grad is None else laid_out_like(factor, grad, operator)
            for factor, grad in factors
        ]
    return [grad_x, grad_weights, *grads]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: ExpertWeights,
        lora: LoraFactors,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        routing_weights: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = x, expert_ids, routing_weights
        form = lora.shared_a, _are_apart(parameters), lora.scaling
        y, saved = run_forward(experts, *form, *inputs, parameters, save=True)
        # Only what is no tensor may hang on ctx: the rest would outlive its layer under checkpointing.
        ctx.experts = experts
        ctx.form = form
        # A tensor, so that checkpointing has those of its second forward: between the two PEFT's
        # parametrizations may have counted as changes.
        versions = torch.tensor(experts.versions(), dtype=torch.int64, device="cpu")
        # Base weights too, though the operator has them: autograd then checks that nobody changed them.
        ctx.save_for_backward(x, expert_ids, routing_weights, saved, versions, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        require_no_transform(grad_y)
        of_forward = ctx.saved_tensors  # once: checkpointing lets nobody ask twice
        with torch.no_grad():
            grads = _Experts._gradients(ctx, of_forward, grad_y)
        return _not_differentiable(grads, (*of_forward, grad_y)) if torch.is_grad_enabled() else grads

    @staticmethod
    def _gradients(
        ctx: Any, of_forward: Sequence[Any], grad_y: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, expert_ids, routing_weights, saved, versions, *parameters = of_forward
        # Autograd knows no changes of what a hook on saved tensors copied; the operator reads the weights' own
        # memory.
        if ctx.experts.versions() != versions.tolist():
            raise StateError(CHANGED_WEIGHTS)
        inputs = x, expert_ids, routing_weights, saved, grad_y
        needs = ctx.needs_input_grad
        wanted = [needs[_X], needs[_ROUTING_WEIGHTS], *needs[_FACTORS:]]
        shared_a, apart, scaling = ctx.form
        grad_x, grad_weights, *grads = run_backward(
            ctx.experts, shared_a, apart, scaling, *inputs, parameters, wanted
        )
        return None, None, grad_x, None, grad_weights, *grads


def _not_differentiable(
    grads: tuple[torch.Tensor | None, ...], made_of: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a backward with ``create_graph``, which raise where they are differentiated.

    torch's once_differentiable does the same only where grad_y requires a gradient. It need not: the gradients
    depend on x and the parameters too, and a penalty on them would be without effect, silently. Those are
    inputs of the node that refuses: autograd leaves out nodes with no way to what it was asked for.
    """
    inputs: list[Any] = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
    inputs += [tensor for tensor in made_of if tensor is not None and tensor.requires_grad]
    refuse = torch._C._functions.DelayedError(NO_SECOND_DERIVATIVE.encode(), len(inputs))
    return tuple(refuse(*inputs)[: len(grads)])


def _require_no_tangents(inputs: Sequence[torch.Tensor | None]) -> None:
    """Refuses inputs of forward-mode AD, whose tangents the operator would drop."""
    if forward_ad._current_level < 0:
        return
    for tensor in inputs:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(
                "sft_moe: expected inputs without tangents, as it has no forward-mode derivative, got a dual "
                f"tensor of shape {list(tensor.shape)}"
            )


def require_tensors(**inputs: torch.Tensor) -> None:
    """Refuses inputs of other kinds: the operator reads numpy arrays too, autograd cannot save them."""
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested:  # which has no shape to speak of
            raise ArgumentError(f"{name}: expected one tensor, got a nested one")


def _require_kinds(**arguments: tuple[object, type]) -> None:
    for name, (given, kind) in arguments.items():
        if not isinstance(given, kind):
            raise TypeError(f"{name}: expected {kind.__name__}, got {type(given).__name__}")


def require_no_transform(grad_y: torch.Tensor | None = None) -> None:
    """Refuses torch.func's transforms and batched gradients, whose tensors have no memory."""
    batched = grad_y is not None and torch._C._functorch.is_legacy_batchedtensor(grad_y)
    if batched or torch._C._are_functorch_transforms_active():
        raise StateError(
            "torch.func: expected calls outside of its transforms (grad, vjp, jvp, vmap) and of "
            "is_grads_batched, got one inside: the experts have no batched or functional form"
        )


def _require_no_tracer() -> None:
    """Refuses tracers that see torch's own operations alone: their graphs would have y's memory, and nothing
    that writes to it."""
    if (traced := torch._C._get_tracing_state() is not None) or get_proxy_mode() is not None:
        raise StateError(
            f"{'torch.jit.trace' if traced else 'make_fx'}: expected torch.compile or eager, got a trace: base "
            "weights are not part of the graph"
        )


def _are_apart(parameters: Sequence[torch.Tensor | None]) -> bool:
    """Whether A of gate and A of up are two to autograd, with a gradient each. Memory does not tell: that of a
    tensor is also that of its detached one, and of another leaf."""
    gate, up = parameters[0], parameters[2]
    if gate is None or up is None or gate is up:
        return False
    return gate.requires_grad != up.requires_grad or (gate.requires_grad and _owner(gate) is not _owner(up))


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that receives the gradient of this one, where it is a view."""
    base = tensor._base
    return tensor if tensor.is_leaf or base is None else base


def _for_core(
    shared_a: bool,
    apart: bool,
    scaling: Sequence[float],
    parameters: Sequence[torch.Tensor | None],
    operator: _core.SftMoe,
    scratch: Scratch,
) -> tuple[_core.LoraFactors, _core.Biases]:
    """Factors and biases of a call as the operator takes them; its base weights it has. What is turned lies in
    ``scratch``."""
    factors = list(parameters[:_NUM_FACTORS])
    one = _has_one_a(factors, apart)
    for number, factor in enumerate(factors):
        if factor is not None and not (one and number == _UP_A):
            factors[number] = _by_expert(factor, operator, scratch, number)
    gate_a, up_a = factors[_GATE_A], factors[_UP_A]
    if one:
        factors[_UP_A] = gate_a  # turned or not, the operator sees that gate and up have one A
    elif apart and gate_a is not None and up_a is not None and gate_a.data_ptr() == up_a.data_ptr():
        factors[_UP_A] = up_a.detach().clone()  # the operator goes by addresses
    return _core.LoraFactors(shared_a, factors, scaling), _core.Biases(parameters[_NUM_FACTORS:_WEIGHTS])


def _has_one_a(factors: Sequence[torch.Tensor | None], apart: bool) -> bool:
    """Whether gate and up have one A and one gradient of it, which is gate's."""
    gate, up = factors[_GATE_A], factors[_UP_A]
    if apart or gate is None or up is None:
        return False
    return gate.dtype == up.dtype and gate.is_set_to(up)


def _adjacent(tensor: torch.Tensor) -> torch.Tensor:
    # Expanded gradients (of a sum or a mean) and transposed inputs: rows may be strided, their elements not.
    if tensor.dim() != 2 or tensor.layout != torch.strided:
        return tensor
    if (tensor.stride(1) != 1 and tensor.size(1) > 1) or tensor.stride(0) < 0:
        return tensor.contiguous()
    return tensor


# PEFT keeps B of all experts as [out, r, E]: seen by expert, each element lies on a cache line of its own. As
# one matrix [out r, E] that is transposed torch turns it some 10 times as fast as by that permutation, on one
# thread; the operator does it with all of its threads. (peft 0.18 has A [in, r, E] instead, gpt-oss every
# second row.) Only the parameter itself is saved for backward, never the turned copy.


def _has_expert_last(factor: torch.Tensor) -> bool:
    experts, rows, cols = factor.shape
    inner = min(factor.stride()[1:])
    return experts > 1 and rows * cols > 1 and factor.stride(0) == 1 and inner >= experts


def _has_columns_outside(factor: torch.Tensor) -> bool:
    return factor.stride(2) > factor.stride(1)


def _is_to_be_turned(factor: torch.Tensor) -> bool:
    # What the operator does not take is left to it to refuse, by its name.
    can_be = factor.dim() == 3 and factor.dtype in (torch.bfloat16, torch.float32) and not factor.is_neg()
    return can_be and factor.device.type == "cpu" and _has_expert_last(factor)


def _by_expert(factor: torch.Tensor, operator: _core.SftMoe, scratch: Scratch, number: int) -> torch.Tensor:
    """The factor ``[E, rows, cols]`` with each expert's matrix in one piece."""
    if not _is_to_be_turned(factor):
        return factor
    if _has_columns_outside(factor):
        return _by_expert(factor.transpose(1, 2), operator, scratch, number).transpose(1, 2)
    experts, rows, cols = factor.shape
    matrix = factor.detach().permute(1, 2, 0).reshape(rows * cols, experts)
    turned = scratch.tensor(number, (experts, rows * cols), factor.dtype)
    operator.transpose(matrix, turned)
    return turned.view(factor.shape)


def _memory_for_gradients(
    parameters: Sequence[torch.Tensor | None], wanted: Sequence[bool], apart: bool, scratch: Scratch
) -> list[torch.Tensor | None]:
    """Where the operator puts gradients that are turned afterwards, in the order of ``wanted``."""
    given: list[torch.Tensor | None] = [None] * len(wanted)
    one = _has_one_a(parameters, apart)
    for number, factor in enumerate(parameters[:_NUM_FACTORS]):
        at = _FIRST_FACTOR + number
        if one and number == _UP_A:
            continue
        if factor is not None and wanted[at] and _is_to_be_turned(factor):
            given[at] = scratch.tensor(_NUM_FACTORS + number, factor.shape, factor.dtype)
    return given


def laid_out_like(
    factor: torch.Tensor, grad: torch.Tensor, operator: _core.SftMoe | None = None
) -> torch.Tensor:
    """A contiguous gradient ``[E, rows, cols]`` in the order of its factor's strides, so that autograd need not
    copy it. Without an operator torch turns it, as where a graph is traced."""
    if grad.dim() != 3 or not _has_expert_last(factor):
        return grad
    if _has_columns_outside(factor):
        return laid_out_like(factor.transpose(1, 2), grad.transpose(1, 2), operator).transpose(1, 2)
    experts, rows, cols = factor.shape
    matrix = grad.reshape(experts, rows * cols)
    turned = matrix.t().contiguous() if operator is None else operator.transpose(matrix, None)
    return turned.view(rows, cols, experts).permute(2, 0, 1)


def sft_moe(
    experts: ExpertWeights,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    lora: LoraFactors = _NO_LORA,
    biases: ExpertBiases | None = None,
    weights: Mapping[str, Weight] | None = None,
) -> torch.Tensor:
    """Experts' output y ``[T, H]`` of the dtype of x, differentiable with respect to x, routing weights,
    factors, biases and base weights.

    Gradients have the dtype of what they are of, and only those needed are computed. Where nothing requires a
    gradient, or under ``torch.no_grad()``, nothing is saved. Not differentiable twice: of a
    backward with ``create_graph=True`` the gradients raise RuntimeError where they are differentiated. Nor in
    forward mode: dual tensors are refused.

    Args:
        experts: the base weights.
        x: ``[T, H]`` bfloat16 or float32, in CPU memory. An input whose rows are not contiguous is copied
            first.
        expert_ids: ``[T, k]`` int64 or int32; an id outside ``[0, E)`` skips the route.
        routing_weights: ``[T, k]`` float32 or bfloat16.
        lora: the LoRA factors of this call.
        biases: the biases of this call, in place of those of ``experts``.
        weights: the base weights of this call as inputs of autograd, in place of those of ``experts``: by the
            same names, views of the same memory, such as those of a parameter that is laid out in another way.
            Their gradients flow back through torch's view operations.

    Raises:
        ArgumentError, TypeError: an argument does not fit. StateError: the thread's workspace is in use, or a
            tracer other than torch.compile's is at work (torch.export, torch.jit.trace, make_fx), or a
            transform of torch.func; from the backward, where base weights have been changed in place since the
            forward, which torch's counts of versions tell, or gradients come batched (is_grads_batched). A
            ``.data`` that was replaced is not noticed: the backward computes with the new one.
    """
    require_tensors(x=x, expert_ids=expert_ids, routing_weights=routing_weights)
    _require_kinds(experts=(experts, ExpertWeights), lora=(lora, LoraFactors))
    biases = experts.biases if biases is None else biases
    _require_kinds(biases=(biases, ExpertBiases))
    if torch.compiler.is_compiling():
        from amx_sft_moe import compiled  # which needs this module

        inputs = x, expert_ids, routing_weights
        given = experts.weights if weights is None else weights
        return compiled.sft_moe(compiled.in_graph(experts), *inputs, lora, biases, given)
    _require_no_tracer()
    require_no_transform()
    parameters = (*lora.factors, *biases.tensors(), *experts.inputs(weights))
    _require_no_tangents((x, routing_weights, *parameters))
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, routing_weights, *parameters)
    ):
        return _Experts.apply(experts, lora, x, expert_ids, routing_weights, *parameters)
    inputs = x, expert_ids, routing_weights
    form = lora.shared_a, False, lora.scaling
    return run_forward(experts, *form, *inputs, parameters, save=False)[0]
