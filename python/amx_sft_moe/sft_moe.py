"""The operator for callers who do their own backward: expert part of an MoE layer with LoRA, forward and
backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from amx_sft_moe import _core
from amx_sft_moe.arguments import MAX_THREADS, as_finite, as_int, as_text, parse_activation
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.kernels import choice_of

# A torch.Tensor, a numpy or ml_dtypes array, or any object that speaks DLPack. Named for the reader only:
# torch is optional and there is no type that covers them all.
Tensor = Any

GRADIENT_NAMES = (
    "grad_x",
    "grad_routing_weights",
    "gate_lora_a",
    "gate_lora_b",
    "up_lora_a",
    "up_lora_b",
    "down_lora_a",
    "down_lora_b",
    "gate_up_lora_a",
    "gate_up_lora_b",
    "gate_bias",
    "up_bias",
    "down_bias",
    "gate_up_bias",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
)


class Workspace(_core.Workspace):
    """Scratch memory that several operators may share, as long as they run one after another.

    Pass one object as ``workspace=`` to the operators of all layers of a model that one thread runs.
    """


class Gradients:
    """Result of :meth:`SftMoe.backward`. What was not computed, or does not exist for this adapter, is
    ``None``.

    Attributes:
        grad_x: ``[T, H]``, dtype of ``x``.
        grad_routing_weights: ``[T, k]``, dtype of ``routing_weights``.
        gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b: shape and dtype of the
            factors.
        gate_up_lora_a, gate_up_lora_b: instead of the gate and up ones where gate and up share one A.
        gate_bias, up_bias ``[E, I]``, down_bias ``[E, H]``, or gate_up_bias ``[E, 2I]``: of the biases that
            the operator has, where they were asked for, in the biases' dtypes.
        gate_proj, up_proj ``[E, I, H]`` or gate_up_proj ``[E, 2I, H]``, as the base weights were given, and
            down_proj ``[E, H, I]``: of the base weights, where they were asked for, in the weights' dtype.
    """

    __slots__ = GRADIENT_NAMES

    grad_x: Tensor | None
    grad_routing_weights: Tensor | None
    gate_lora_a: Tensor | None
    gate_lora_b: Tensor | None
    up_lora_a: Tensor | None
    up_lora_b: Tensor | None
    down_lora_a: Tensor | None
    down_lora_b: Tensor | None
    gate_up_lora_a: Tensor | None
    gate_up_lora_b: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_bias: Tensor | None
    gate_proj: Tensor | None
    up_proj: Tensor | None
    down_proj: Tensor | None
    gate_up_proj: Tensor | None

    def __init__(self, **tensors: Tensor) -> None:
        for name in GRADIENT_NAMES:
            setattr(self, name, tensors.pop(name, None))
        if tensors:
            raise ArgumentError(f"Gradients: expected names out of {GRADIENT_NAMES}, got {sorted(tensors)}")

    def as_dict(self) -> dict[str, Tensor]:
        """Names and tensors of the gradients that are there."""
        return {name: value for name in GRADIENT_NAMES if (value := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={list(tensor.shape)}" for name, tensor in self.as_dict().items())
        return f"Gradients({shapes})"


def _any(factors: Iterable[Tensor | None]) -> bool:
    return any(factor is not None for factor in factors)


class SftMoe:
    """Experts of one MoE layer with LoRA: ``y[t] = sum over routes of w * down(act(gate(x), up(x)))``.

    Base weights are read where they lie, never copied and never written; their gradients are computed for those
    who train them. Nothing here builds an autograd graph: tensors that require a gradient are read as they are.
    For autograd see :mod:`amx_sft_moe.nn`.

    Dimensions: T tokens, k = ``top_k``, E experts, H hidden, I intermediate, r a LoRA rank.

    Results are of the caller's kind (torch tensors for torch callers, numpy arrays, with ml_dtypes' bfloat16,
    for all others) and own their memory unless ``out=`` was given. ``x``, ``grad_y`` and routing weights are
    bfloat16 or float32. Rows of ``x`` and ``grad_y`` are contiguous, any number of elements apart that is not
    negative; routing weights and expert ids may have any strides.

    Threading: the GIL is released while computing. An object serves one call at a time; a second thread gets
    a :class:`StateError`. Different objects never disturb each other, unless they share a workspace.

    Args:
        num_experts: E.
        top_k: routes per token; routes may repeat an expert or be skipped (an id outside ``[0, E)``).
        hidden_size: H.
        intermediate_size: I.
        lora_rank: the rank of all factors given to :meth:`set_lora`; 0: as their shapes say, and each
            projection may have its own.
        lora_alpha: LoRA scaling is ``lora_alpha / r``; ``None`` means a scaling of 1.
        max_tokens: more tokens in a call are refused; ``None``: buffers grow.
        cache_depth: how many forwards may wait for their backward.
        activation: of the gate, ``act(g) u``: ``"silu"``, ``"gelu"`` (by erf), ``"gelu_tanh"`` (also called
            ``"gelu_pytorch_tanh"``); or ``"gpt_oss"``, or a mapping ``{"limit": 7.0, "alpha": 1.702}``, for
            gpt-oss's clamped form.
        kernel: ``"auto"`` (the environment variable ``AMX_SFT_MOE_KERNEL`` if set, read here and not again,
            else the best available) or a name that :func:`amx_sft_moe.info` lists.
        num_threads: threads of a call; ``None``: as many as OpenMP would use.
        workspace: scratch memory to share with other operators.
        name: of the layer, in dumps and traces.
        record_spans: keep, per thread, which phase it worked on when (``spans`` of :meth:`last_forward_times`).
            On in any case where ``AMX_SFT_MOE_TRACE`` or ``AMX_SFT_MOE_TIMER=json`` writes them.

    Raises:
        KernelError: the kernel is unknown or not available here.
        ArgumentError: a size or option out of range. TypeError: one of another type.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        max_tokens: int | None = None,
        cache_depth: int = 1,
        activation: str | Mapping[str, Any] = "silu",
        kernel: str = "auto",
        num_threads: int | None = None,
        *,
        workspace: Workspace | None = None,
        name: str = "",
        record_spans: bool = False,
    ) -> None:
        activation_name, limit, alpha = parse_activation(activation)
        if workspace is not None and not isinstance(workspace, _core.Workspace):
            raise TypeError(f"workspace: expected a Workspace, got {type(workspace).__name__}")
        self.num_experts = as_int("num_experts", num_experts, 1)
        self.top_k = as_int("top_k", top_k, 1)
        self.hidden_size = as_int("hidden_size", hidden_size, 1)
        self.intermediate_size = as_int("intermediate_size", intermediate_size, 1)
        self.lora_rank = as_int("lora_rank", lora_rank, 0)
        self.lora_alpha = None if lora_alpha is None else as_finite("lora_alpha", lora_alpha)
        self._core = _core.SftMoe(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            max_tokens=None if max_tokens is None else as_int("max_tokens", max_tokens, 0),
            cache_depth=as_int("cache_depth", cache_depth, 1),
            activation=activation_name,
            limit=limit,
            alpha=alpha,
            kernel=choice_of(kernel),
            num_threads=0 if num_threads is None else as_int("num_threads", num_threads, 1, MAX_THREADS),
            workspace=workspace,
            name=as_text("name", name),
            record_spans=bool(record_spans),
        )

    @property
    def name(self) -> str:
        """Of the layer, in dumps and traces."""
        return self._core.name

    @property
    def kernel(self) -> str:
        """Name of the kernel in use; before :meth:`set_base` the name that was asked for."""
        return self._core.kernel

    @property
    def weight_dtype(self) -> str | None:
        """``"bfloat16"`` or ``"float32"``; ``None`` before :meth:`set_base`."""
        return self._core.weight_dtype

    @property
    def saved_depth(self) -> int:
        """How many forwards wait for their backward. StateError where another thread is in this object."""
        return self._core.saved_depth

    def set_base(
        self,
        gate_proj: Tensor | Sequence[Tensor] | None = None,
        up_proj: Tensor | Sequence[Tensor] | None = None,
        down_proj: Tensor | Sequence[Tensor] | None = None,
        *,
        gate_up_proj: Tensor | Sequence[Tensor] | None = None,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        gate_up_bias: Tensor | None = None,
    ) -> None:
        """Sets the base weights, and biases where the projections have them. The tensors are kept alive
        and not copied; those of weights must stay in place.

        Each weight is one stacked tensor or a list of one matrix per expert, read-only memory maps included.
        All are bfloat16, or all float32, which selects fp32 kernels. Experts may have any stride, rows one of
        their length or more; elements of a row are adjacent. In-place changes are seen by the next call; call
        again when a tensor's memory moves.

        Biases are bfloat16 or float32, whatever the weights are, of any strides: gpt-oss's interleaved
        ``gate_up_proj_bias`` is ``gate_bias=b[:, ::2]``, ``up_bias=b[:, 1::2]``. They are read anew in every
        call. A projection without a bias has none; a call without them removes them.

        Args:
            gate_proj: ``[E, I, H]``.
            up_proj: ``[E, I, H]``.
            down_proj: ``[E, H, I]``.
            gate_up_proj: ``[E, 2I, H]``, gate rows first, instead of ``gate_proj`` and ``up_proj``.
            gate_bias, up_bias: ``[E, I]``.
            down_bias: ``[E, H]``.
            gate_up_bias: ``[E, 2I]``, gate entries first, instead of ``gate_bias`` and ``up_bias``, with either
                form of the weights.

        Raises:
            ArgumentError, TypeError: an argument does not fit. StateError: another dtype while forwards wait
                for their backward, or another thread is in this object. KernelError: the kernel does not take
                weights of that dtype.
        """
        biases = _core.Biases((gate_bias, up_bias, down_bias, gate_up_bias))
        self._core.set_base(gate_proj, up_proj, down_proj, gate_up_proj, biases)

    def set_lora(
        self,
        gate_lora_a: Tensor | None = None,
        gate_lora_b: Tensor | None = None,
        up_lora_a: Tensor | None = None,
        up_lora_b: Tensor | None = None,
        down_lora_a: Tensor | None = None,
        down_lora_b: Tensor | None = None,
        *,
        gate_up_lora_a: Tensor | None = None,
        gate_up_lora_b: Tensor | None = None,
        gate_scaling: float | None = None,
        up_scaling: float | None = None,
        down_scaling: float | None = None,
    ) -> None:
        """Sets all LoRA factors, ``W + scaling B A`` per expert; without arguments removes them.

        Factors are bfloat16 or float32 of any strides and are read anew in every call: nothing has to be
        called after an optimiser step. A projection without factors has no adapter. Where ``gate_lora_a`` and
        ``up_lora_a`` are the same tensor, or views of the same memory with the same strides, its gradient is
        the sum of both, in ``gate_lora_a``, and ``up_lora_a`` is ``None``.

        Args:
            gate_lora_a, up_lora_a: ``[E, r, H]``; ``down_lora_a``: ``[E, r, I]``.
            gate_lora_b, up_lora_b: ``[E, I, r]``; ``down_lora_b``: ``[E, H, r]``.
            gate_up_lora_a: ``[E, r, H]``, one A that gate and up share, instead of four gate and up factors.
            gate_up_lora_b: ``[E, 2I, r]``, gate rows first.
            gate_scaling, up_scaling, down_scaling: default ``lora_alpha / r``, or 1 without ``lora_alpha``;
                only beside factors of that projection.

        Raises:
            ArgumentError, TypeError: an argument does not fit. StateError: another thread is in this object.
        """
        separate = (gate_lora_a, gate_lora_b, up_lora_a, up_lora_b)
        shared = gate_up_lora_a is not None or gate_up_lora_b is not None
        if shared and _any(separate):
            raise TypeError(
                "set_lora: expected either gate_up_lora_a and _b or separate gate and up factors, got both"
            )
        gate_up = (gate_up_lora_a, gate_up_lora_b, None, None) if shared else separate
        scaling = [
            None if value is None else as_finite(name, value)
            for name, value in (
                ("gate_scaling", gate_scaling),
                ("up_scaling", up_scaling),
                ("down_scaling", down_scaling),
            )
        ]
        factors = (*gate_up, down_lora_a, down_lora_b)
        adapted = (shared or _any(factors[:2]), shared or _any(factors[2:4]), _any(factors[4:]))
        for name, value, has_factors in zip(("gate", "up", "down"), scaling, adapted, strict=True):
            if value is not None and not has_factors:
                raise ArgumentError(f"{name}_scaling: expected None without factors of {name}, got {value}")
        self._core.set_lora(_core.LoraFactors(shared, factors, scaling))

    def forward_sft(
        self,
        x: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
        save_for_backward: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Computes y ``[T, H]``, of the dtype of ``x`` unless ``out`` says otherwise.

        Args:
            x: ``[T, H]`` bfloat16 or float32.
            expert_ids: ``[T, k]`` int64 or int32; an id outside ``[0, E)`` skips the route.
            routing_weights: ``[T, k]`` float32 or bfloat16; of any strides, as the ids.
            save_for_backward: push what :meth:`backward` needs onto the stack (depth ``cache_depth``);
                ``False`` for evaluation saves nothing.
            out: ``[T, H]`` bfloat16 or float32, written and returned; never copied. out may be x itself.

        Raises:
            ArgumentError, TypeError: an argument does not fit. StateError: no base weights, the stack is full,
                or another thread is in this object or in a workspace that it shares. MemoryError, or
                KernelError of kernel ``onednn``: the pass broke off; nothing is saved, ``out`` may be written
                in part.
        """
        return self._core.forward_sft(x, expert_ids, routing_weights, save_for_backward, out)

    def backward(
        self,
        grad_y: Tensor,
        accumulate: bool = False,
        scale: float = 1.0,
        out: Gradients | Mapping[str, Tensor] | None = None,
        *,
        skip: Iterable[str] = (),
        bias_gradients: bool = False,
        weight_gradients: bool = False,
    ) -> Gradients:
        """Pops the last saved forward and computes its gradients. A refused call keeps the entry.

        Args:
            grad_y: ``[T, H]`` bfloat16 or float32.
            accumulate: add the gradients of factors, biases and base weights to what ``out`` holds instead of
                overwriting. ``grad_x`` and ``grad_routing_weights`` are always overwritten.
            scale: multiplied into this call's contribution to the gradients of parameters.
            out: tensors that receive gradients, by name; what it does not name is allocated. With
                ``accumulate`` it must name every gradient of a factor, and of a bias or a base weight that is
                wanted, unless skipped. Those of base weights are stacked tensors, bfloat16 or float32, of any
                strides, in memory that no input, weight or other gradient has too. ``grad_x`` and
                ``grad_routing_weights`` may be memory of ``grad_y`` or ``x``, but of no weight, bias or factor.
            skip: names of gradients that are not wanted and not computed, such as ``"grad_x"`` in a first
                layer. None that ``out`` has.
            bias_gradients: compute the gradients of all biases, not only of those that ``out`` names.
            weight_gradients: compute the gradients of all base weights, not only of those that ``out`` names:
                as much arithmetic as a forward, and tensors as large as the weights.

        Returns:
            Gradients: those of factors, biases and base weights in the parameters' shapes and dtypes. Experts
                without tokens get exact zeros.

        Raises:
            ArgumentError, TypeError: an argument does not fit. StateError: no forward waits for its backward,
                or another thread is in this object or in a workspace that it shares. MemoryError, or
                KernelError of kernel ``onednn``: the pass broke off; the entry is kept, but a part of the
                gradients may be written, with ``accumulate`` added. Before another try with ``accumulate``
                they have to be what they were.
        """
        given = out.as_dict() if isinstance(out, Gradients) else out
        if given is None:
            given = {}
        elif not isinstance(given, Mapping):
            raise TypeError(
                f"out: expected Gradients or a mapping of names to tensors, got {type(out).__name__}"
            )
        else:
            given = {name: tensor for name, tensor in given.items() if tensor is not None}
        if isinstance(skip, str) or not isinstance(skip, Iterable):
            raise TypeError(f"skip: expected names in a list or the like, got {type(skip).__name__} {skip!r}")
        names = list(skip)
        if unknown := [name for name in names if name not in GRADIENT_NAMES]:
            raise ArgumentError(f"skip: expected names out of {GRADIENT_NAMES}, got {unknown}")
        skipped = set(names)
        if both := sorted(skipped & given.keys()):
            raise ArgumentError(f"skip: expected names of which out has no tensor, got {both}")
        scale = as_finite("scale", scale)
        wants = bool(bias_gradients), bool(weight_gradients)
        return Gradients(**self._core.backward(grad_y, bool(accumulate), scale, given, skipped, *wants))

    def clear(self) -> None:
        """Forgets all forwards that wait for their backward. StateError if another thread is in this object."""
        self._core.clear()

    def last_forward_times(self) -> dict[str, Any]:
        """Where the time of the last forward went; empty before the first one.

        Keys: ``total_ms``, ``begin_ns`` and ``end_ns`` (of the steady clock, ``time.monotonic_ns()`` on Linux),
        ``index`` (of this pass among the operator's forwards), ``tokens``, ``routed_rows``, ``sync_points``;
        ``groups`` and ``phases`` (name to wall milliseconds), ``kinds`` (phase to ``"measured"``, ``"fused"``,
        ``"not needed"`` or ``"total"``), ``flop`` and ``bytes`` (phase to what it had to do: products over
        routed rows, and every tensor read or written once); and ``threads``: per thread ``busy_ms``,
        ``waiting_ms``, its ``phases`` (ms) and ``tasks``, and, where they are recorded, its ``spans``
        ``(phase, begin_ns, end_ns, tasks)`` in order, with ``spans_dropped`` that did not fit. StateError where
        another thread is in this object.
        """
        return self._core.last_times(False)

    def last_backward_times(self) -> dict[str, Any]:
        """The same for the last backward, under the published names (``D3_gemm``, ``backward_down``, ...)."""
        return self._core.last_times(True)

    def dump_times(self, form: str = "text") -> str:
        """The last forward and the last backward as text in the published form, or as JSON lines.

        ``AMX_SFT_MOE_TIMER=text`` (or ``json``), with ``AMX_SFT_MOE_TIMER_FILE`` if it is not to go to standard
        error, dumps each step of every operator whose base weights are first set (:meth:`set_base`) while it is
        set; ``AMX_SFT_MOE_TRACE=file.json`` writes each step as Chrome trace events, for Perfetto.
        docs/profiling.md describes both.

        Args:
            form: ``"text"`` (``[DOWN] D3_gemm: 41.123 ms``) or ``"json"``.

        Raises:
            ArgumentError: another form. StateError: another thread is in this object.
        """
        if form not in ("text", "json"):
            raise ArgumentError(f'form: expected "text" or "json", got {form!r}')
        return self._core.last_dump(False, form == "json") + self._core.last_dump(True, form == "json")

    def memory(self) -> dict[str, int]:
        """Bytes held: ``workspace_bytes`` (shared by all who share the workspace) and ``saved_bytes`` (the
        stack).

        Raises:
            StateError: another call is using this object, or another layer the workspace.
        """
        return self._core.memory()

    def __repr__(self) -> str:
        return (
            f"SftMoe(num_experts={self.num_experts}, top_k={self.top_k}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, kernel={self.kernel!r}, "
            f"weight_dtype={self.weight_dtype!r})"
        )
