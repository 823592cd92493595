"""The function that transformers calls for the experts of a layer, and the decision whether it can take
them."""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from amx_sft_moe.autograd import sft_moe
from amx_sft_moe.integrations.adapters_in_use import NotUnderstoodError, lora_of
from amx_sft_moe.integrations.adapters_in_use import active_on as active_adapters_on
from amx_sft_moe.integrations.mapped_experts import MappedStack, mapped_weights_of
from amx_sft_moe.layer import ExpertBiases, FrozenExperts

try:
    from transformers import activations
    from transformers.integrations import moe
except ImportError as error:
    raise ImportError(
        "register: expected transformers 5 with transformers.integrations.moe (ALL_EXPERTS_FUNCTIONS), got "
        f"none: {error}"
    ) from error

logger = logging.getLogger("amx_sft_moe")

_FLOATS = (torch.bfloat16, torch.float32)
# What transformers' decorator sets on modules whose weights are laid out as in Qwen3-MoE.
_FLAGS = {
    "has_gate": True,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
# Exact types of act_fn (a subclass may compute anything) and what the operator calls them. All forms of the
# tanh approximation are the same formula.
_ACTIVATIONS = {nn.SiLU: "silu"} | {
    kind: activation
    for name, activation in (
        ("SiLUActivation", "silu"),
        ("GELUActivation", "gelu"),
        ("GELUTanh", "gelu_tanh"),
        ("NewGELUActivation", "gelu_tanh"),
        ("FastGELUActivation", "gelu_tanh"),
    )
    if (kind := getattr(activations, name, None)) is not None
}
_DEFAULT_GATE = getattr(moe, "_default_apply_gate", None)

_hooks: dict[str, ExpertsHook] = {}
# Layers' names in dumps, by experts module.
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


class ExpertsHook:
    """Callable ``(module, hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]``."""

    def __init__(self, kernel: str, num_threads: int | None) -> None:
        self._kernel = kernel
        self._num_threads = num_threads
        # Keyed weakly by the experts module: what it holds dies with the model, and copies make their own.
        self._layers: weakref.WeakKeyDictionary[nn.Module, FrozenExperts] = weakref.WeakKeyDictionary()
        self._warned: set[str] = set()

    def __call__(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        active = active_adapters_on(module)
        try:
            experts = self._experts(module, hidden_states, top_k_index, top_k_weights)
            lora = lora_of(module, active, experts.num_experts)
        except NotUnderstoodError as reason:
            self._warn_once(type(module).__name__, str(reason))
            with ExitStack() as adapted:
                for adapter in active:
                    adapted.enter_context(adapter.as_peft_does_it())
                return _default_implementation(module)(module, hidden_states, top_k_index, top_k_weights)
        return sft_moe(experts, hidden_states, top_k_index, top_k_weights, lora)

    def _experts(
        self, module: nn.Module, x: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor
    ) -> FrozenExperts:
        """The layer's base weights, where this call can be taken."""
        _require_layout(module)
        activation = _activation_of(module)
        _require_inputs(x, expert_ids, routing_weights)
        gate_up, down = base_weight(module, "gate_up_proj"), base_weight(module, "down_proj")
        if torch.is_grad_enabled() and (gate_up.requires_grad or down.requires_grad):
            raise NotUnderstoodError("base weights require a gradient, which the operator does not compute")
        biases = _biases_of(module) if getattr(module, "has_bias", False) else ExpertBiases()
        top_k = expert_ids.shape[1]
        found = self._layers.get(module)
        mapped = mapped_weights_of(module)
        weights = {"gate_up_proj": gate_up, "down_proj": down} if mapped is None else mapped
        if (
            found is None
            or (found.top_k, found.activation) != (top_k, activation)
            or found.weights.keys() != weights.keys()
            or any(found.weights[name] is not weight for name, weight in weights.items())
            or found.biases.gate_up_bias is not biases.gate_up_bias
            or found.biases.down_bias is not biases.down_bias
        ):
            _require_weights(gate_up, down, x.shape[1])
            _require_biases(biases, down)
            found = FrozenExperts(
                top_k=top_k,
                **weights,
                biases=biases,
                activation=activation,
                kernel=self._kernel,
                num_threads=self._num_threads,
                name=found.name if found is not None else _names.get(module, f"experts.{len(self._layers)}"),
            )
            self._layers[module] = found
        return found

    def rename(self, module: nn.Module, name: str) -> None:
        """Gives the layer another name, where it has run already."""
        if (found := self._layers.get(module)) is not None:
            found.name = name

    def _warn_once(self, kind: str, reason: str) -> None:
        if (message := f"{kind}: {reason}") not in self._warned:
            self._warned.add(message)
            logger.warning("%s; these experts run through transformers' default implementation", message)


def base_weight(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter below whatever adapts it."""
    weight = module._parameters.get(name)
    if weight is None and nn.utils.parametrize.is_parametrized(module, name):
        weight = getattr(module.parametrizations[name], "original", None)
    if weight is None:
        raise NotUnderstoodError(f"expected a parameter {name}, got none")
    return weight


def _require_layout(module: nn.Module) -> None:
    for flag, expected in _FLAGS.items():
        if getattr(module, flag, expected) is not expected:
            raise NotUnderstoodError(f"expected {flag}={expected}, got {getattr(module, flag)}")
    if _DEFAULT_GATE is None or getattr(type(module), "_apply_gate", _DEFAULT_GATE) is not _DEFAULT_GATE:
        raise NotUnderstoodError("expected the default gate, act_fn(gate) * up, got an overridden _apply_gate")


def _activation_of(module: nn.Module) -> str:
    act_fn = getattr(module, "act_fn", None)
    if type(act_fn) is nn.GELU:
        return "gelu_tanh" if act_fn.approximate == "tanh" else "gelu"
    if act_fn is nn.functional.silu:
        return "silu"
    if act_fn is nn.functional.gelu:
        return "gelu"
    if type(act_fn) not in _ACTIVATIONS:
        raise NotUnderstoodError(f"expected the activation SiLU or GELU, got {type(act_fn).__name__}")
    return _ACTIVATIONS[type(act_fn)]


def _biases_of(module: nn.Module) -> ExpertBiases:
    found = {}
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        # Only the plain parameter: a bias that something adapts is not what is stored.
        found[name] = module._parameters.get(name)
        if found[name] is None:
            raise NotUnderstoodError(f"expected a parameter {name}, got none")
    return ExpertBiases(gate_up_bias=found["gate_up_proj_bias"], down_bias=found["down_proj_bias"])


def _require_inputs(x: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> None:
    if x.dim() != 2 or expert_ids.dim() != 2 or routing_weights.dim() != 2:
        raise NotUnderstoodError(
            "expected hidden_states [T, H], top_k_index and top_k_weights [T, k], got "
            f"{list(x.shape)}, {list(expert_ids.shape)} and {list(routing_weights.shape)}"
        )
    for name, tensor in (("hidden_states", x), ("top_k_weights", routing_weights)):
        if tensor.device.type != "cpu" or tensor.dtype not in _FLOATS:
            raise NotUnderstoodError(
                f"expected {name} in bfloat16 or float32 on cpu, got {tensor.dtype} on {tensor.device}"
            )


def _require_weights(gate_up: torch.Tensor, down: torch.Tensor, hidden: int) -> None:
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        if type(weight) not in (torch.Tensor, nn.Parameter, MappedStack):
            raise NotUnderstoodError(f"expected {name} as a plain tensor, got {type(weight).__name__}")
        if weight.device.type != "cpu" or weight.dtype not in _FLOATS:
            raise NotUnderstoodError(
                f"expected {name} in bfloat16 or float32 on cpu, got {weight.dtype} on {weight.device}"
            )
        if weight.dim() != 3 or weight.stride(2) != 1:
            raise NotUnderstoodError(
                f"expected {name} with 3 dimensions and adjacent elements in the last, got shape "
                f"{list(weight.shape)}, strides {list(weight.stride())}"
            )
    if gate_up.dtype != down.dtype:
        raise NotUnderstoodError(
            f"expected one dtype, got gate_up_proj {gate_up.dtype} and down_proj {down.dtype}"
        )
    e, _, i = down.shape
    if tuple(gate_up.shape) != (e, 2 * i, hidden) or down.shape[1] != hidden:
        raise NotUnderstoodError(
            f"expected gate_up_proj [E, 2I, H] and down_proj [E, H, I] with H={hidden}, got "
            f"{list(gate_up.shape)} and {list(down.shape)}"
        )


def _require_biases(biases: ExpertBiases, down: torch.Tensor) -> None:
    e, h, i = down.shape
    for name, bias, shape in (
        ("gate_up_proj_bias", biases.gate_up_bias, (e, 2 * i)),
        ("down_proj_bias", biases.down_bias, (e, h)),
    ):
        if bias is None:
            continue
        if type(bias) is not nn.Parameter or bias.device.type != "cpu" or bias.dtype not in _FLOATS:
            raise NotUnderstoodError(
                f"expected {name} as a plain parameter in bfloat16 or float32 on cpu, got a "
                f"{type(bias).__name__} in {bias.dtype} on {bias.device}"
            )
        if tuple(bias.shape) != shape:
            raise NotUnderstoodError(f"expected {name} {list(shape)}, got {list(bias.shape)}")


def _default_implementation(module: nn.Module) -> Any:
    if mapped_weights_of(module):
        return type(
            module
        ).forward.__wrapped__  # reads expert by expert: there is no stack to give to grouped_mm
    # What transformers takes where nothing is asked for; "eager" is the class's own loop below its decorator.
    default = moe.ALL_EXPERTS_FUNCTIONS.get("grouped_mm")
    return default if default is not None else type(module).forward.__wrapped__


def register(name: str, kernel: str, num_threads: int | None) -> None:
    """Puts a hook into transformers' table under ``name``."""
    hook = ExpertsHook(kernel, num_threads)
    _hooks[name] = hook
    # A compiled model breaks its graph here: the operator works on memory, not on traced tensors.
    moe.ALL_EXPERTS_FUNCTIONS.register(name, torch.compiler.disable(hook.__call__))


def name_layer(module: nn.Module, name: str) -> None:
    """``name`` is what dumps and traces call this experts module."""
    _names[module] = name
    for hook in _hooks.values():
        hook.rename(module, name)


def is_ours(module: nn.Module) -> bool:
    """Whether calling ``module`` leads to a hook of ours."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in _hooks or "has_gate" not in module.__dict__:
        return False
    # A forward set on the instance (a kernel from the hub, a patch) may go elsewhere; accelerate's calls the
    # class's.
    return "forward" not in module.__dict__ or "_hf_hook" in module.__dict__
