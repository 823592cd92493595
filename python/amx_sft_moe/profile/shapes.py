"""Layers of known models, and how many of their experts fit in memory."""

from __future__ import annotations

from dataclasses import dataclass

BF16 = 2  # bytes


@dataclass(frozen=True)
class LayerShape:
    """The experts of one layer."""

    experts: int  # E
    top_k: int
    hidden: int  # H
    intermediate: int  # I, of one expert


# From the models' own configurations. The published experiment is deepseek-v3's.
SHAPES = {
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "kimi-k2": LayerShape(384, 8, 7168, 2048),
    "qwen3-235b-a22b": LayerShape(128, 8, 4096, 1536),
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "glm-4.5-air": LayerShape(128, 8, 4096, 1408),
    "gpt-oss": LayerShape(32, 4, 2880, 2880),
    "mixtral": LayerShape(8, 2, 4096, 14336),
    "small": LayerShape(16, 4, 512, 256),
}
PUBLISHED = "deepseek-v3"


def bytes_per_expert(shape: LayerShape, rank: int, element: int, lora_bytes: int) -> int:
    """Base weights of `element` bytes, LoRA factors and their gradients."""
    base = 3 * shape.hidden * shape.intermediate * element
    factors = 3 * rank * (shape.hidden + shape.intermediate) * lora_bytes
    return base + 2 * factors


def bytes_beside_experts(shape: LayerShape, tokens: int) -> int:
    """Inputs, results, saved activations and workspace of a step, roughly: some buffers of routed rows, [S, H]
    and [S, I] in fp32."""
    rows = tokens * shape.top_k
    return 4 * rows * (4 * shape.hidden + 6 * shape.intermediate) + (1 << 28)


def experts_that_fit(
    shape: LayerShape, tokens: int, rank: int, element: int, lora_bytes: int, memory: int
) -> int:
    """How many of the layer's experts `memory` bytes hold: all, or fewer, by eights where there are as many.

    Less than top_k, down to 0, means that the layer does not fit.
    """
    left = memory - bytes_beside_experts(shape, tokens)
    fit = max(left, 0) // bytes_per_expert(shape, rank, element, lora_bytes)
    if fit >= shape.experts:
        return shape.experts
    return fit // 8 * 8 if fit >= 8 else fit
