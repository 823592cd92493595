"""torch modules: the experts of a layer with trainable LoRA factors on base weights, frozen or trained.

:func:`sft_moe` is the function below the module, for models that keep their parameters elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from amx_sft_moe import compiled
from amx_sft_moe.arguments import as_finite, as_int, as_text
from amx_sft_moe.autograd import LoraFactors, require_tensors, sft_moe
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.layer import ExpertBiases, ExpertWeights

__all__ = ["ExpertBiases", "ExpertWeights", "LoraFactors", "SftMoeExperts", "sft_moe"]

_BASE_NAMES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
_BIAS_NAMES = ("gate_bias", "up_bias", "down_bias", "gate_up_bias")
_SEPARATE = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
_SHARED = ("gate_up_lora_a", "gate_up_lora_b", None, None, "down_lora_a", "down_lora_b")


class SftMoeExperts(nn.Module):
    """Experts of one MoE layer: base weights and, with ``lora_rank > 0``, trainable LoRA factors.

    The router stays outside. Base weights are parameters that share the memory of the tensors given; they are
    not copied. One that requires a gradient (an ``nn.Parameter`` does unless told otherwise) is trained; the
    others stay as they are. Factors start as in PEFT: A uniform (Kaiming), B zero.

    Parameters of the module: ``gate_up_proj`` or ``gate_proj`` and ``up_proj``, ``down_proj``; the factors
    ``gate_lora_a [E, r, H]``, ``gate_lora_b [E, I, r]``, ``up_lora_a``, ``up_lora_b``, ``down_lora_a [E, r,
    I]``, ``down_lora_b [E, H, r]``, or with ``shared_lora_a`` ``gate_up_lora_a [E, r, H]``, ``gate_up_lora_b
    [E, 2I, r]``; the biases that were given.

    A base weight or bias may be replaced by assignment; the old one is let go at once, or with the last graph
    that has yet to run backward.

    Args:
        top_k: routes per token.
        gate_up_proj: ``[E, 2I, H]``, gate rows first; or
        gate_proj, up_proj: ``[E, I, H]`` each.
        down_proj: ``[E, H, I]``. All bfloat16, or all float32, in CPU memory.
        gate_bias, up_bias: ``[E, I]``, or gate_up_bias: ``[E, 2I]``, gate entries first.
        down_bias: ``[E, H]``. Biases are bfloat16 or float32, trained where they require a gradient.
        lora_rank: r; 0 for no adapter.
        lora_alpha: the scaling is ``lora_alpha / lora_rank``; ``None`` means 1.
        shared_lora_a: gate and up share one A, as in PEFT's adapters of fused experts.
        lora_dtype: of the factors, float32 or bfloat16.
        activation, kernel, num_threads, name: as for :class:`amx_sft_moe.SftMoe`.

    Threading: threads may run one module at the same time; each gets an operator and scratch memory of its
        own.

    Raises:
        ArgumentError: a shape, device, size or option does not fit, or a tensor is the result of an operation.
            TypeError: an element type or a kind of argument does not, or a weight is missing. KernelError: the
            kernel is unknown, not available here, or takes no weights of that dtype.
    """

    def __init__(
        self,
        top_k: int,
        *,
        down_proj: torch.Tensor,
        gate_up_proj: torch.Tensor | None = None,
        gate_proj: torch.Tensor | None = None,
        up_proj: torch.Tensor | None = None,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        gate_up_bias: torch.Tensor | None = None,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        shared_lora_a: bool = False,
        lora_dtype: torch.dtype = torch.float32,
        activation: str | Mapping[str, Any] = "silu",
        kernel: str = "auto",
        num_threads: int | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self._name = as_text("name", name)
        self.top_k = as_int("top_k", top_k, 1)
        self.lora_rank = as_int("lora_rank", lora_rank, 0)
        self.lora_alpha = None if lora_alpha is None else as_finite("lora_alpha", lora_alpha)
        self.shared_lora_a = shared_lora_a
        if lora_dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"lora_dtype: expected torch.float32 or torch.bfloat16, got {lora_dtype}")
        self._options: dict[str, Any] = {"activation": activation, "kernel": kernel, "num_threads": num_threads}
        given = dict(zip(_BASE_NAMES, (gate_up_proj, gate_proj, up_proj, down_proj), strict=True))
        for name, weight in given.items():
            self.register_parameter(name, None if weight is None else _as_parameter(name, weight))
        for name, bias in zip(_BIAS_NAMES, (gate_bias, up_bias, down_bias, gate_up_bias), strict=True):
            self.register_parameter(name, None if bias is None else _as_parameter(name, bias))
        self._experts: ExpertWeights | None = None
        made = self.experts()  # refuses shapes and dtypes that do not fit
        self.num_experts, self.hidden_size, self.intermediate_size = (
            made.num_experts,
            made.hidden_size,
            made.intermediate_size,
        )
        self._make_factors(lora_dtype)

    def _make_factors(self, dtype: torch.dtype) -> None:
        e, r, h, i = self.num_experts, self.lora_rank, self.hidden_size, self.intermediate_size
        shapes = {"down_lora_a": (e, r, i), "down_lora_b": (e, h, r)}
        if self.shared_lora_a:
            shapes |= {"gate_up_lora_a": (e, r, h), "gate_up_lora_b": (e, 2 * i, r)}
        else:
            shapes |= dict.fromkeys(("gate_lora_a", "up_lora_a"), (e, r, h))
            shapes |= dict.fromkeys(("gate_lora_b", "up_lora_b"), (e, i, r))
        for name, shape in shapes.items():
            # Beside the weights, whatever torch's default device is.
            factor = torch.empty(shape, dtype=dtype, device="cpu") if r > 0 else None
            self.register_parameter(name, None if factor is None else nn.Parameter(factor))
        self.reset_lora_parameters()

    def reset_lora_parameters(self) -> None:
        """Draws A anew and sets B to zero, so that the adapter is the identity."""
        for name in self.lora_names():
            factor = getattr(self, name)
            if name.endswith("_a"):
                for expert in factor:
                    nn.init.kaiming_uniform_(expert, a=math.sqrt(5))
            else:
                nn.init.zeros_(factor)

    def lora_names(self) -> list[str]:
        """Names of the LoRA parameters, in the order of :class:`LoraFactors`."""
        if self.lora_rank == 0:
            return []
        return [name for name in (_SHARED if self.shared_lora_a else _SEPARATE) if name is not None]

    @property
    def layer_name(self) -> str:
        """Of the layer in dumps and traces; may be set at any time."""
        return self._name

    @layer_name.setter
    def layer_name(self, name: str) -> None:
        self._name = as_text("layer_name", name)
        if self._experts is not None:
            self._experts.name = name

    @property
    def top_k(self) -> int:
        """Routes per token; may be set at any time, as ``lora_alpha``, and counts from the next forward on.

        The backward of a forward before keeps its own; that of a compiled graph is refused then.
        """
        return self._top_k

    @top_k.setter
    def top_k(self, top_k: int) -> None:
        self._top_k = as_int("top_k", top_k, 1)
        self._experts = None

    @property
    def scaling(self) -> float:
        """``lora_alpha / lora_rank``."""
        return 1.0 if self.lora_alpha is None or self.lora_rank == 0 else self.lora_alpha / self.lora_rank

    def experts(self) -> ExpertWeights:
        """Base weights and biases as the operator sees them; made anew where a parameter or k was replaced."""
        weights = {name: weight for name in _BASE_NAMES if (weight := getattr(self, name)) is not None}
        biases = ExpertBiases(*[getattr(self, name) for name in _BIAS_NAMES])
        found = self._experts
        if (
            found is None
            or any(weights.get(name) is not weight for name, weight in found.weights.items())
            or any(a is not b for a, b in zip(biases.tensors(), found.biases.tensors(), strict=True))
        ):
            given = {"down_proj": None, **weights}  # which refuses by name what is missing
            found = ExpertWeights(top_k=self.top_k, biases=biases, **given, **self._options, name=self._name)
            self._experts = found
        return found

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Experts' output, of the shape, dtype and device of x.

        Parameters stay in CPU memory (``amx_sft_moe.keep_experts_on_cpu``); inputs from elsewhere come there.

        Args:
            x: ``[..., H]`` bfloat16 or float32.
            expert_ids: ``[T, k]`` int64 or int32, T the number of tokens in x.
            routing_weights: ``[T, k]`` float32 or bfloat16.

        Raises:
            As :func:`sft_moe`.
        """
        if torch.compiler.is_compiling():
            return self._in_graph(x, expert_ids, routing_weights)
        experts = self.experts()
        inputs = _on_cpu(_as_tokens(x, experts.hidden_size), expert_ids, routing_weights)
        return sft_moe(experts, *inputs, self._lora()).view(x.shape).to(x.device)

    def _in_graph(
        self, x: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        handle = compiled.in_graph(self)
        biases = ExpertBiases(*[getattr(self, name) for name in _BIAS_NAMES])
        weights = {name: weight for name in _BASE_NAMES if (weight := getattr(self, name)) is not None}
        inputs = _on_cpu(_as_tokens(x, weights["down_proj"].shape[1]), expert_ids, routing_weights)
        return compiled.sft_moe(handle, *inputs, self._lora(), biases, weights).view(x.shape).to(x.device)

    def _lora(self) -> LoraFactors:
        names = _SHARED if self.shared_lora_a else _SEPARATE
        factors = tuple([None if name is None else getattr(self, name) for name in names])
        return LoraFactors(factors, self.shared_lora_a and self.lora_rank > 0, (self.scaling,) * 3)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """torch's, where assignments arrive too: a base weight or bias that is replaced is let go at once."""
        super().register_parameter(name, param)
        if name in _BASE_NAMES or name in _BIAS_NAMES:
            self._experts = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles make operators of their own: this one's views are of this module's tensors.
        return {**self.__dict__, "_experts": None}

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, top_k={self.top_k}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, lora_rank={self.lora_rank}, "
            f"scaling={self.scaling:g}"
        )


def _as_tokens(x: torch.Tensor, hidden: int) -> torch.Tensor:
    require_tensors(x=x)
    if x.dim() == 0 or x.shape[-1] != hidden:
        raise ArgumentError(f"x: expected [..., {hidden}], got shape {list(x.shape)}")
    return x.reshape(-1, hidden)


def _on_cpu(
    x: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = {"x": x, "expert_ids": expert_ids, "routing_weights": routing_weights}
    require_tensors(**inputs)
    for name, tensor in inputs.items():
        # Tensors of subclasses may have their numbers elsewhere.
        if type(tensor) is torch.Tensor and tensor.is_meta:
            raise ArgumentError(f"{name}: expected a tensor with numbers, got one on the meta device")
    return x.to("cpu"), expert_ids.to("cpu"), routing_weights.to("cpu")


def _as_parameter(name: str, tensor: torch.Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_leaf:
        raise ArgumentError(
            f"{name}: expected a leaf tensor, got the result of an operation, which the module would cut off "
            "from its graph (call sft_moe with biases= or weights= instead)"
        )
    return nn.Parameter(tensor, requires_grad=tensor.requires_grad)
