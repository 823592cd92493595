"""The layer as plain torch operations, in any dtype: float64 is what everything is compared with, bfloat16 is
the eager torch of the accuracy contract. Shares no code with what it checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import Sizes

FACTORS = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
BIASES = ("gate_bias", "up_bias", "down_bias")
WEIGHTS = ("gate_proj", "up_proj", "down_proj")


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_glu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def gelu_tanh_glu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def gpt_oss(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """As the gpt-oss reference has it. At a limit itself the gradient passes, as torch's clamp had it up to
    2.13; from 2.14 on its is 0 there."""
    gate = torch.where(gate > limit, limit, gate)
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@dataclass
class Layer:
    """Base weights, factors (None where a projection has no adapter), the inputs of one call, and the biases
    that there are."""

    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    factors: dict[str, Tensor | None]
    x: Tensor
    expert_ids: Tensor
    routing_weights: Tensor
    grad_y: Tensor
    biases: dict[str, Tensor] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Layer:
        """A copy in another dtype; ids stay."""
        return Layer(
            self.gate_proj.to(dtype),
            self.up_proj.to(dtype),
            self.down_proj.to(dtype),
            {name: None if factor is None else factor.to(dtype) for name, factor in self.factors.items()},
            self.x.to(dtype),
            self.expert_ids,
            self.routing_weights.to(dtype),
            self.grad_y.to(dtype),
            {name: bias.to(dtype) for name, bias in self.biases.items()},
        )


def make_layer(
    sizes: Sizes,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    biases: bool = False,
) -> Layer:
    """Random tensors of sizes at which activations stay near 1, exactly representable in ``dtype``."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=random) * std * scale).to(dtype)

    e, h, i = sizes.experts, sizes.hidden, sizes.intermediate
    ins, outs = (h, h, i), (i, i, h)
    factors: dict[str, Tensor | None] = {}
    for name, rank, n_in, n_out in zip(("gate", "up", "down"), sizes.ranks, ins, outs, strict=True):
        factors[f"{name}_lora_a"] = normal(e, rank, n_in, std=n_in**-0.5) if rank else None
        factors[f"{name}_lora_b"] = normal(e, n_out, rank, std=0.5 * max(rank, 1) ** -0.5) if rank else None
    scores = torch.rand(sizes.tokens, e, generator=random)
    expert_ids = scores.argsort(dim=1)[:, : sizes.top_k]
    weights = torch.rand(sizes.tokens, sizes.top_k, generator=random).softmax(dim=1)
    layer = Layer(
        normal(e, i, h, std=h**-0.5),
        normal(e, i, h, std=h**-0.5),
        normal(e, h, i, std=i**-0.5),
        factors,
        normal(sizes.tokens, h),
        expert_ids,
        weights.to(dtype),
        normal(sizes.tokens, h),
    )
    if biases:  # drawn last: the rest is as without them
        layer.biases = {name: normal(e, out, std=0.5) for name, out in zip(BIASES, outs, strict=True)}
    return layer


def forward(
    layer: Layer,
    scaling: tuple[float, float, float] = (1.0, 1.0, 1.0),
    activation: Callable[[Tensor, Tensor], Tensor] = silu_glu,
) -> Tensor:
    """The eager loop over experts of transformers, LoRA factored as PEFT does it for linear layers."""
    y = torch.zeros_like(layer.x)

    def adapted(rows: Tensor, weight: Tensor, name: str, s: float, expert: int) -> Tensor:
        bias = layer.biases.get(f"{name}_bias")
        out = F.linear(rows, weight[expert], None if bias is None else bias[expert])
        a, b = layer.factors[f"{name}_lora_a"], layer.factors[f"{name}_lora_b"]
        return out if a is None else out + F.linear(F.linear(rows, a[expert]), b[expert]) * s

    for expert in range(layer.gate_proj.shape[0]):
        tokens, slots = torch.where(layer.expert_ids == expert)
        if len(tokens) == 0:
            continue
        rows = layer.x[tokens]
        gate = adapted(rows, layer.gate_proj, "gate", scaling[0], expert)
        up = adapted(rows, layer.up_proj, "up", scaling[1], expert)
        down = adapted(activation(gate, up), layer.down_proj, "down", scaling[2], expert)
        y = y.index_add(0, tokens, (down * layer.routing_weights[tokens, slots, None]).to(y.dtype))
    return y


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: on these sizes its teams only wait for each other, seconds long on a busy
    machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def gradients(layer: Layer, weights: bool = False, **options: object) -> dict[str, Tensor]:
    """y, grad_x, grad_routing_weights and the gradients of factors, biases and, with ``weights``, base weights
    by torch's autograd, in the layer's dtype."""
    leaves = {"grad_x": layer.x, "grad_routing_weights": layer.routing_weights}
    leaves |= {name: factor for name, factor in layer.factors.items() if factor is not None}
    leaves |= layer.biases
    base = {name: getattr(layer, name) for name in WEIGHTS}
    leaves |= base if weights else {}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    factors = {name: leaves.get(name) for name in FACTORS}
    inputs = Layer(
        *[leaves.get(name, weight) for name, weight in base.items()],
        factors,
        leaves["grad_x"],
        layer.expert_ids,
        leaves["grad_routing_weights"],
        layer.grad_y,
        {name: leaves[name] for name in layer.biases},
    )
    y = forward(inputs, **options)
    if not y.requires_grad:  # no routed row at all
        return {"y": y.detach()} | {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads = torch.autograd.grad(y, list(leaves.values()), layer.grad_y, allow_unused=True)
    found = {"y": y.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[name] = torch.zeros_like(leaf) if grad is None else grad
    return found


def run(op: object, layer: Layer, weights: bool = False, **set_lora: object) -> dict[str, Tensor]:
    """The same from an operator with base weights and factors set from ``layer``."""
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj, **layer.biases)
    op.set_lora(**layer.factors, **set_lora)
    y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    return {"y": y} | op.backward(layer.grad_y, bias_gradients=True, weight_gradients=weights).as_dict()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected tensor; of the difference alone where that
    is 0."""
    norm = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (norm or 1.0)


def largest(values: Iterable[float]) -> float:
    """The largest of them; NaN where any is NaN, which ``max`` would keep only if it came first."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Same names and shapes, and each tensor within the relative tolerance."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = relative_error(found[name], value)
        assert error <= tolerance, f"{name}: relative error {error:.2e} above {tolerance:.0e}"
