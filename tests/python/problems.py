"""Hypothesis strategies for what a caller hands over, in any sizes, dtypes, strides and forms, and what float64
makes of it.

Only shapes and choices are drawn by Hypothesis; numbers come from torch's generator with a drawn seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from torch import Tensor

from amx_sft_moe import SftMoe
from amx_sft_moe.sft_moe import GRADIENT_NAMES
from cases import kernels
from reference import BIASES, FACTORS, WEIGHTS, Layer, gelu_glu, gelu_tanh_glu, gpt_oss, gradients, silu_glu

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = st.sampled_from([BF16, FP32])
AVAILABLE = [(name, dtype) for dtype, w in ((BF16, "bfloat16"), (FP32, "float32")) for name in kernels(w)]
KERNELS = st.sampled_from(AVAILABLE)
Formula = Callable[[Tensor, Tensor], Tensor]
ACTIVATIONS: list[tuple[Any, Formula]] = [
    ("silu", silu_glu),
    ("gelu", gelu_glu),
    ("gelu_tanh", gelu_tanh_glu),
]
BIAS_NAMES = (*BIASES, "gate_up_bias")
WEIGHT_NAMES = (*WEIGHTS, "gate_up_proj")
PROJECTIONS = ("gate", "up", "down")
# Errors of what is computed, and of its last rounding.
OF_KERNEL = {BF16: 4e-2, FP32: 2e-5}
OF_RESULT = {BF16: 2**-8, FP32: 2**-22}


def examples(count: int, **options: Any) -> settings:
    """The same `count` cases in every run; with AMX_SFT_MOE_HYPOTHESIS=full fifty times as many, and
    others each time."""
    full = os.environ.get("AMX_SFT_MOE_HYPOTHESIS") == "full"
    return settings(
        max_examples=count * (50 if full else 1),
        deadline=None,
        derandomize=not full,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        **options,
    )


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory: order of its dimensions from the outermost, distance of neighbours in each,
    a margin, and the dimension that is one element expanded."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    margin: int
    expanded: int | None

    def store(self, tensor: Tensor) -> Tensor:
        """A view of new memory with the values of ``tensor`` (expanded: its first ones again and again); what
        lies between its elements is NaN."""
        shape, expanded = tensor.shape, self.expanded
        if expanded is not None and shape[expanded] > 0:
            tensor = tensor.narrow(expanded, 0, 1)
        extents = [tensor.shape[d] * self.steps[d] for d in self.order]
        fill = torch.nan if tensor.is_floating_point() else 0
        memory = torch.full([n + 2 * self.margin for n in extents], fill, dtype=tensor.dtype)
        slices = [
            slice(self.margin, self.margin + n, self.steps[d]) for n, d in zip(extents, self.order, strict=True)
        ]
        view = memory[tuple(slices)].permute([self.order.index(d) for d in range(tensor.dim())])
        return view.copy_(tensor).expand(shape)


@st.composite
def layouts(draw: Any, dims: int, adjacent: bool = False, expand: bool = True) -> Layout:
    """Layouts of ``dims`` dimensions; ``adjacent``: with the elements of a row side by side."""
    order = draw(st.permutations(range(dims)))
    steps = draw(st.lists(st.sampled_from([1, 1, 2]), min_size=dims, max_size=dims))
    if adjacent:
        order = [*[d for d in order if d != dims - 1], dims - 1]
        steps[-1] = 1
    expanded = draw(st.sampled_from([None, None, None, *range(dims - adjacent)])) if expand else None
    return Layout(tuple(order), tuple(steps), draw(st.integers(0, 1)), expanded)


@st.composite
def normals(draw: Any) -> Callable[..., Tensor]:
    """Functions that make random tensors of given extents, dtype and standard deviation."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return lambda *shape, dtype, std=1.0: (torch.randn(shape, generator=random) * std).to(dtype)


@dataclass(frozen=True)
class Extents:
    experts: int
    top_k: int
    hidden: int
    inner: int

    def operator(self, **options: Any) -> SftMoe:
        return SftMoe(self.experts, self.top_k, self.hidden, self.inner, **options)


def formulas(dtype: torch.dtype) -> st.SearchStrategy[tuple[Any, Formula]]:
    """Activations; one with a clamp near 0, where many values are, only for small errors."""
    clamps: list[tuple[Any, Formula]] = [("gpt_oss", clamped(7.0, 1.702, dtype))]
    if dtype == FP32:
        clamps.append(({"limit": 0.75, "alpha": 1.5}, clamped(0.75, 1.5, dtype)))
    return st.sampled_from(ACTIVATIONS + clamps)


def clamped(limit: float, alpha: float, dtype: torch.dtype) -> Formula:
    """gpt-oss's activation. Gradients jump at its clamps: no examples where an error decides on the side."""

    def formula(gate: Tensor, up: Tensor) -> Tensor:
        for values in (gate, up.abs()):
            error = OF_KERNEL[dtype] * (limit + values.square().mean().sqrt())
            assume(not ((values - limit).abs() <= error).any())
        return gpt_oss(gate, up, limit, alpha)

    return formula


def extents(limit: int = 24) -> st.SearchStrategy[Extents]:
    return st.builds(
        Extents, st.integers(1, 5), st.integers(1, 4), st.integers(1, limit), st.integers(1, limit)
    )


@dataclass
class Base:
    """Base weights and biases: the arguments of ``set_base``, and each projection's tensors."""

    arguments: dict[str, Any]
    weights: list[Tensor]
    biases: dict[str, Tensor]
    dtype: torch.dtype


@st.composite
def bases(draw: Any, sizes: Extents, dtype: torch.dtype, stacked: bool = False) -> Base:
    """Gate and up apart or in one tensor, experts in one tensor or (not ``stacked``) in lists, some biases."""
    normal = draw(normals())
    e, h, i = sizes.experts, sizes.hidden, sizes.inner

    def laid(*shape: int) -> Tensor:
        tensor = normal(*shape, dtype=dtype, std=shape[2] ** -0.5)
        return draw(layouts(3, adjacent=True, expand=False)).store(tensor)

    def bias(length: int) -> Tensor:
        return draw(layouts(2)).store(normal(e, length, dtype=draw(DTYPES), std=0.5))

    down = laid(e, h, i)
    arguments = {"down_proj": down}
    if draw(st.booleans()):
        both = arguments["gate_up_proj"] = laid(e, 2 * i, h)
        weights = [both[:, :i], both[:, i:], down]
    else:
        weights = [laid(e, i, h), laid(e, i, h), down]
        arguments |= {"gate_proj": weights[0], "up_proj": weights[1]}
    if not stacked:
        arguments = {
            name: list(weight) if draw(st.booleans()) else weight for name, weight in arguments.items()
        }
    biases: dict[str, Tensor] = {}
    given = draw(st.sets(st.sampled_from(BIASES)))
    if given >= {"gate_bias", "up_bias"} and draw(st.booleans()):
        both = arguments["gate_up_bias"] = bias(2 * i)
        biases |= {"gate_bias": both[:, :i], "up_bias": both[:, i:]}
    for name in sorted(given - set(biases)):
        arguments[name] = biases[name] = bias(h if name == "down_bias" else i)
    return Base(arguments, weights, biases, dtype)


@dataclass
class Lora:
    """Arguments of ``set_lora``, the six factors and each projection's scaling."""

    arguments: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, Tensor | None] = field(default_factory=lambda: dict.fromkeys(FACTORS))
    scaling: tuple[float, float, float] = (1.0, 1.0, 1.0)
    ranks: tuple[int, int, int] = (0, 0, 0)

    @property
    def same_a(self) -> bool:
        """One tensor is A of gate and of up."""
        a = self.arguments.get("gate_lora_a")
        return a is not None and a is self.arguments.get("up_lora_a")


@st.composite
def loras(draw: Any, sizes: Extents, alpha: float | None, scalings: bool = True) -> Lora:
    """Factors of ranks 0 to 9, some or all absent, gate and up with one A or not."""
    normal = draw(normals())
    e, h, i = sizes.experts, sizes.hidden, sizes.inner

    def factor(*shape: int, std: float) -> Tensor:
        return draw(layouts(3)).store(normal(*shape, dtype=draw(DTYPES), std=std))

    ranks = list(draw(st.tuples(*[st.integers(0, 9)] * 3)))
    shared = draw(st.sampled_from([None, None, "argument", "same tensor"]))
    factors: dict[str, Tensor | None] = dict.fromkeys(FACTORS)
    for p, (name, n_in, n_out) in enumerate(zip(PROJECTIONS, (h, h, i), (i, i, h), strict=True)):
        if name == "up" and shared:
            ranks[1] = ranks[0]
        if ranks[p] == 0 and draw(st.booleans()):
            continue
        factors[f"{name}_lora_a"] = factor(e, ranks[p], n_in, std=n_in**-0.5)
        factors[f"{name}_lora_b"] = factor(e, n_out, ranks[p], std=0.5 * max(ranks[p], 1) ** -0.5)
    if shared and ranks[0] > 0:
        factors["up_lora_a"] = factors["gate_lora_a"]
    arguments: dict[str, Any] = dict(factors)
    if shared == "argument" and ranks[0] > 0:
        wide = factor(e, 2 * i, ranks[0], std=0.5 * ranks[0] ** -0.5)
        factors["gate_lora_b"], factors["up_lora_b"] = wide[:, :i], wide[:, i:]
        arguments = {name: value for name, value in arguments.items() if name.startswith("down")}
        arguments |= {"gate_up_lora_a": factors["gate_lora_a"], "gate_up_lora_b": wide}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    scaling = [1.0 if alpha is None or rank == 0 else alpha / rank for rank in ranks]
    for p, name in enumerate(PROJECTIONS):
        if scalings and factors[f"{name}_lora_b"] is not None and draw(st.booleans()):
            scaling[p] = arguments[f"{name}_scaling"] = draw(st.sampled_from([1.0, 0.5, -2.0, 0.0]))
    return Lora(arguments, factors, tuple(scaling), tuple(ranks))


def parameters(base: Base, lora: Lora) -> dict[str, Tensor]:
    """Factors, biases and base weights by the names of their gradients; lists of weights as one tensor."""
    found = {name: value for name, value in (base.arguments | lora.arguments).items() if name in GRADIENT_NAMES}
    found |= {name: torch.stack(value) for name, value in found.items() if isinstance(value, list)}
    if lora.same_a:
        del found["up_lora_a"]
    return found


@dataclass
class Call:
    """Inputs of a forward."""

    x: Tensor
    expert_ids: Tensor
    routing_weights: Tensor

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.expert_ids, self.routing_weights


@st.composite
def calls(draw: Any, sizes: Extents, max_tokens: int = 24, adjacent: bool = True, exact: Any = FP32) -> Call:
    """Tokens, of values exact in ``exact``, with routes that repeat experts, are outside, or all go to one."""
    tokens, normal = draw(st.integers(0, max_tokens)), draw(normals())
    shape = (tokens, sizes.top_k)
    ids = (normal(*shape, dtype=FP32, std=sizes.experts / 2) + sizes.experts / 2).floor().long()
    ids = draw(st.sampled_from([ids, ids, ids, ids.clamp(max=0), ids * 0 - 1, ids * 2**20 - 2**31]))
    id_type = draw(st.sampled_from([torch.int64, torch.int32]))
    return Call(
        draw(layouts(2, adjacent)).store(normal(tokens, sizes.hidden, dtype=exact).to(draw(DTYPES))),
        draw(layouts(2)).store(ids.clamp(-(2**31), 2**31 - 1).to(id_type)),
        draw(layouts(2)).store(normal(*shape, dtype=draw(DTYPES))),
    )


@dataclass
class Expected:
    """By name: the float64 results, and of what size each element typically is, which is what its error is
    relative to: sums can cancel."""

    values: dict[str, Tensor]
    typical: dict[str, Tensor]
    dtype: torch.dtype

    def check(self, name: str, found: Tensor, scale: float = 1.0, before: Tensor | None = None) -> None:
        """Asserts that ``found`` is the result times ``scale``, added to ``before``. What nothing
        was added to is exact."""
        value = self.values[name] * scale
        size = self.typical[name] * abs(scale)
        if size.numel() > 0:
            size = (size + value.square().mean().sqrt()) * (size > 0)
        allowed = OF_KERNEL[self.dtype] * size + OF_RESULT[found.dtype] * value.abs()
        if before is not None:
            value, allowed = value + before.double(), allowed + OF_RESULT[found.dtype] * before.double().abs()
        assert found.shape == value.shape, name
        right = (found.double() - value).abs() <= allowed
        assert right.all(), f"{name}: {found[~right]}, expected {value[~right]} +- {allowed[~right]}"


def expected(base: Base, lora: Lora, call: Call, grad_y: Tensor, activation: Callable[..., Tensor]) -> Expected:
    """Everything that forward and backward give, under the names that the operator gives them."""
    layer = Layer(*base.weights, lora.factors, *call.inputs(), grad_y, base.biases).to(torch.float64)
    values = gradients(layer, weights=True, scaling=lora.scaling, activation=activation)
    squares = Layer(
        *[weight.square() for weight in (layer.gate_proj, layer.up_proj, layer.down_proj)],
        {name: None if factor is None else factor.square() for name, factor in layer.factors.items()},
        *[layer.x.square(), layer.expert_ids, layer.routing_weights.square(), layer.grad_y.square()],
        {name: bias.square() for name, bias in layer.biases.items()},
    )
    # Slopes of activations stay below 1.2, and so do theirs.
    sizes = gradients(
        squares,
        weights=True,
        scaling=tuple(s * s for s in lora.scaling),
        activation=lambda gate, up: 1.44 * (gate + gate * gate / 2) * (up + 1),
    )
    for results in (values, sizes):
        if "gate_up_lora_a" in lora.arguments:
            results["gate_up_lora_a"] = results.pop("gate_lora_a") + results.pop("up_lora_a")
            results["gate_up_lora_b"] = torch.cat([results.pop("gate_lora_b"), results.pop("up_lora_b")], 1)
        elif lora.same_a:
            results["gate_lora_a"] = results["gate_lora_a"] + results.pop("up_lora_a")
        if "gate_up_bias" in base.arguments:
            results["gate_up_bias"] = torch.cat([results.pop("gate_bias"), results.pop("up_bias")], 1)
        if "gate_up_proj" in base.arguments:
            results["gate_up_proj"] = torch.cat([results.pop("gate_proj"), results.pop("up_proj")], 1)
    return Expected(values, {name: size.sqrt() for name, size in sizes.items()}, base.dtype)
