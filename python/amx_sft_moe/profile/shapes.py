"""Layers of known models."""

from __future__ import annotations

from dataclasses import dataclass


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
