"""How much memory a run takes at most, and how many experts fit."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from .options import Options

BYTES = {"bfloat16": 2, "float32": 4}
FLOAT64 = 8
# What does not grow with the layer: Python with torch, 230 MB, buffers of torch's products, 35 MB, and freed
# memory that malloc keeps, up to 32 MB.
PROCESS = 3 << 27
# A thread's packed weights and staged rows: up to 2.5 MB for hidden = 7168, 8.9 MB of kernel onednn.
OF_THREAD = 9 << 20


def _factor_elements(options: Options) -> int:
    """Elements of one expert's six LoRA factors."""
    return 3 * options.rank * (options.shape.hidden + options.shape.intermediate)


def bytes_of_experts(options: Options) -> int:
    """Base weights, LoRA factors and their gradients."""
    shape = options.shape
    base = 3 * shape.hidden * shape.intermediate * BYTES[options.dtype]
    factors = _factor_elements(options) * BYTES[options.lora_dtype]
    return shape.experts * (base + 2 * factors)


def bytes_of_step(options: Options, tokens: int) -> int:
    """Inputs, results, saved activations and workspace of a step of the operator, roughly: scores of the
    routing, x, y and their gradients, some buffers of routed rows in fp32, and what each thread packs."""
    shape = options.shape
    of_tokens = 4 * shape.experts + 4 * shape.hidden * BYTES[options.dtype]
    of_rows = 4 * (5 * shape.hidden + 6 * shape.intermediate + 6 * options.rank)
    return tokens * (of_tokens + shape.top_k * of_rows) + options.threads * OF_THREAD


def bytes_of_reference(options: Options) -> int:
    """What the check needs beside the operator's step, all in float64: one expert (see `float64_step`), the
    factors' gradients of all experts that it uses, and rows, of which one expert has a token's at most once."""
    shape = options.shape
    used = min(shape.experts, options.check_tokens * shape.top_k)
    expert = 3 * shape.hidden * shape.intermediate + 3 * _factor_elements(options)
    rows = options.check_tokens * (11 * shape.hidden + 6 * shape.intermediate + 6 * options.rank)
    return FLOAT64 * (expert + used * _factor_elements(options) + rows)


def planned_bytes(options: Options) -> int:
    """At most, the check and the timing one after the other."""
    check = bytes_of_step(options, options.check_tokens) + bytes_of_reference(options)
    return PROCESS + bytes_of_experts(options) + max(check, bytes_of_step(options, options.tokens))


def with_experts(options: Options, experts: int) -> Options:
    """The options with that many experts."""
    return replace(options, shape=replace(options.shape, experts=experts))


def experts_that_fit(options: Options, memory: int) -> int:
    """How many of the layer's experts `memory` bytes hold: all, or fewer, by eights where a token needs no
    more.

    Less than top_k, down to 0, means that the layer does not fit.
    """
    wanted = options.shape.experts
    fit = bisect_right(
        range(1, wanted + 1), memory, key=lambda experts: planned_bytes(with_experts(options, experts))
    )
    least = options.shape.top_k
    return fit if fit == wanted or fit < max(8, least) else max(fit // 8 * 8, least)
