"""Arithmetic of factors: gate and up in one pair and back, ranks padded, scalings folded. Each says whether
the weights' change stays exactly the same."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from amx_sft_moe.adapters.adapter import Factors
from amx_sft_moe.adapters.base import GATE_UP, BaseModel, ExpertsLayout
from amx_sft_moe.errors import ArgumentError


def zeros(layout: ExpertsLayout, projection: str, rank: int, scaling: float, dtype: torch.dtype) -> Factors:
    """An adapter that changes nothing."""
    out_size, in_size = layout.sizes(projection)
    a, b = torch.zeros(rank, in_size, dtype=dtype), torch.zeros(out_size, rank, dtype=dtype)
    return Factors((a,) * layout.num_experts, (b,) * layout.num_experts, scaling)


def padded(factors: Factors, rank: int) -> Factors:
    """The same product at a higher rank: rows and columns of zeros."""
    more = rank - factors.rank
    if more == 0:
        return factors
    a = tuple(torch.cat([a, a.new_zeros(more, a.shape[1])]) for a in factors.a)
    b = tuple(torch.cat([b, b.new_zeros(b.shape[0], more)], dim=1) for b in factors.b)
    return Factors(a, b, factors.scaling)


def common_scaling(scalings: Iterable[float]) -> float:
    """One that products with all of these can have: the first that is not 0."""
    return next((scaling for scaling in scalings if scaling != 0), 0.0)


def folded(factors: Factors, scaling: float) -> tuple[Factors, bool]:
    """The same product with another scaling, the ratio of the two multiplied into B; and whether no B was
    rounded (always so for powers of two). A product with scaling 0 gets a B of zeros.

    Raises:
        ArgumentError: ``scaling`` is 0 and the product is not.
    """
    if factors.scaling == scaling:
        return factors, True
    if factors.scaling == 0:
        nothing = tuple(torch.zeros_like(b) for b in factors.b)
        return Factors(factors.a, nothing, scaling), not any(bool(b.any()) for b in factors.b)
    if scaling == 0:
        raise ArgumentError(f"scaling: expected one that {factors.scaling:g} can be turned into, got 0")
    ratio, exact, changed = factors.scaling / scaling, True, []
    for b in factors.b:
        wanted = b.double() * ratio
        changed.append(wanted.to(b.dtype))
        exact = exact and torch.equal(changed[-1].double(), wanted)
    # The ratio itself may be rounded.
    return Factors(factors.a, tuple(changed), scaling), exact and ratio * scaling == factors.scaling


def cast(factors: Factors, dtype: torch.dtype) -> tuple[Factors, bool]:
    """Both matrices in another element type, and whether nothing was rounded."""

    def to(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(value.to(dtype) for value in values)

    found = Factors(to(factors.a), to(factors.b), factors.scaling)
    before, after = (*factors.a, *factors.b), (*found.a, *found.b)
    return found, all(torch.equal(x.double(), y.double()) for x, y in zip(before, after, strict=True))


def fused(gate: Factors | None, up: Factors | None, layout: ExpertsLayout) -> tuple[Factors, bool]:
    """Gate and up as factors of ``gate_up_proj``: of the same rank where they share A (or one is missing),
    of the ranks' sum, block by block, where they do not. And whether no number was rounded."""
    given = gate or up
    if given is None:
        raise ValueError("gate, up: expected at least one, got neither")
    exact = True
    if gate is not None and up is not None:
        scaling = common_scaling((gate.scaling, up.scaling))
        (gate, first), (up, second) = folded(gate, scaling), folded(up, scaling)
        given, exact = gate, first and second
    share = gate is None or up is None or gate.shares_a_with(up)
    a, b = [], []
    for expert in range(layout.num_experts):
        parts = [(rows, part) for rows, part in (("gate_proj", gate), ("up_proj", up)) if part is not None]
        a.append(given.a[expert] if share else torch.cat([part.a[expert] for _, part in parts]))
        dtype = functools.reduce(torch.promote_types, (part.b[expert].dtype for _, part in parts))
        out = torch.zeros(2 * layout.intermediate_size, a[-1].shape[0], dtype=dtype)
        at = 0
        for projection, part in parts:
            columns = slice(None) if share else slice(at, at + part.rank)
            out[layout.rows(projection), columns] = part.b[expert]
            at += part.rank
        b.append(out)
    return Factors(tuple(a), tuple(b), given.scaling), exact


def block_ranks(fused_factors: Iterable[tuple[ExpertsLayout, Factors]]) -> dict[int, int]:
    """By rank R of fused gate-up factors, the rank of gate's own part, where all B of that rank are made of
    two blocks: what :func:`fused` makes of separate A, and stock PEFT of a per-expert adapter."""
    used: dict[int, list[torch.Tensor]] = {}
    for layout, factors in fused_factors:
        sides = used.setdefault(factors.rank, [torch.zeros(factors.rank, dtype=torch.bool) for _ in "gu"])
        for b in factors.b:
            for side, projection in zip(sides, GATE_UP, strict=True):
                side |= (b[layout.rows(projection)] != 0).any(dim=0)
    found = {}
    for rank, (gate, up) in used.items():
        if not bool(gate.any()) or not bool(up.any()):
            continue
        last_of_gate, first_of_up = int(gate.nonzero()[-1]), int(up.nonzero()[0])
        if last_of_gate < first_of_up:
            half = rank // 2
            found[rank] = half if last_of_gate < half <= first_of_up else first_of_up
    return found


def split(factors: Factors, layout: ExpertsLayout, gate_rank: int | None) -> tuple[Factors, Factors]:
    """Gate and up of fused factors. ``gate_rank``: from :func:`block_ranks`; ``None``: A is for both."""
    ends = (slice(None), slice(None)) if gate_rank is None else (slice(0, gate_rank), slice(gate_rank, None))
    parts = []
    for projection, columns in zip(GATE_UP, ends, strict=True):
        rows = layout.rows(projection)
        b = tuple(b[rows, columns] for b in factors.b)
        a = factors.a if gate_rank is None else tuple(a[columns] for a in factors.a)
        parts.append(Factors(a, b, factors.scaling))
    return parts[0], parts[1]


def split_all(whole: dict[tuple[str, str], Factors], base: BaseModel) -> dict[str, dict[str, Factors]]:
    """By module and projection from ``(module, fused parameter) -> factors``."""
    blocks = block_ranks((base.layout(m), f) for (m, p), f in whole.items() if p == "gate_up_proj")
    experts: dict[str, dict[str, Factors]] = {}
    for (module, parameter), factors in whole.items():
        place = experts.setdefault(module, {})
        if parameter == "down_proj":
            place[parameter] = factors
        else:
            parts = split(factors, base.layout(module), blocks.get(factors.rank))
            place.update(zip(GATE_UP, parts, strict=True))
    return experts
