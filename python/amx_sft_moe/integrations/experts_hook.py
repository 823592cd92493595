"""The function that transformers calls for the experts of a layer, and the decision whether it can take
them."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from amx_sft_moe import compiled
from amx_sft_moe.arguments import as_text
from amx_sft_moe.autograd import LoraFactors, require_no_transform, sft_moe
from amx_sft_moe.errors import ArgumentError, StateError
from amx_sft_moe.integrations.adapters_in_use import (
    ActiveAdapters,
    NotUnderstoodError,
    lora_of,
    traced_on,
)
from amx_sft_moe.integrations.adapters_in_use import active_on as active_adapters_on
from amx_sft_moe.integrations.gates import gate_of
from amx_sft_moe.integrations.layouts import (
    FLOATS,
    Layout,
    as_operator_takes_them,
    base_weight,
    biases_of,
    lay_out_rows,
    layout_of,
    require_biases,
    require_gated,
    require_kinds,
    require_weights,
)
from amx_sft_moe.integrations.mapped_experts import address_of, has_memory, is_mapped
from amx_sft_moe.layer import ExpertWeights, Weight

try:
    from transformers.integrations import moe
except ImportError as error:
    raise ImportError(
        "register: expected transformers 5 with transformers.integrations.moe (ALL_EXPERTS_FUNCTIONS), got "
        f"none: {error}"
    ) from error

logger = logging.getLogger("amx_sft_moe")

_hooks: dict[str, ExpertsHook] = {}
# Layers' names in dumps, by experts module; numbers for those that were given none.
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_unnamed = itertools.count()


@dataclass(frozen=True, eq=False)
class _Layer:
    """An experts module as the operator runs it, and what that was made from."""

    experts: ExpertWeights
    layout: Layout
    made_from: tuple[Any, ...]


def _state_of(weights: Mapping[str, torch.Tensor], top_k: int) -> tuple[Any, ...]:
    # Parameters are replaced, and their memory moves: .to(), FSDP, merging, a contiguous copy.
    return top_k, *[
        part
        for weight in weights.values()
        for part in (id(weight), address_of(weight), weight.dtype, weight.shape, weight.stride())
    ]


class ExpertsHook:
    """Callable ``(module, hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]``."""

    def __init__(self, kernel: str, num_threads: int | None) -> None:
        self._kernel = kernel
        self._num_threads = num_threads
        # Keyed weakly by the experts module: what it holds dies with the model, and copies make their own.
        # Memory that parameters had lives on in here until the module's next call.
        self._layers: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()
        self._in_graphs: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int, Layout], _LayerInGraph]] = (
            weakref.WeakKeyDictionary()
        )
        # Whose memory was not laid out, and is not from then on; and why.
        self._left: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
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
            layer = self._layer(module, hidden_states, top_k_index, top_k_weights)
            lora = _lora_of(module, active, layer.experts.num_experts, layer.layout)
            biases = biases_of(module, layer.layout)
            weights = _trained_weights_of(module, layer.layout)
        except NotUnderstoodError as reason:
            self._layers.pop(module, None)  # it may hold memory that the parameters no longer have
            if active and is_mapped(module):
                raise StateError(
                    f"{type(module).__name__}: {reason}; no other implementation has adapters on mapped experts"
                ) from None
            _require_one_device(module, hidden_states.device, str(reason))
            self.warn_once(type(module).__name__, str(reason))
            return _by_default(module, active, hidden_states, top_k_index, top_k_weights)
        device = hidden_states.device
        if device.type == "cpu":
            return sft_moe(layer.experts, hidden_states, top_k_index, top_k_weights, lora, biases, weights)
        # The rest of the model is elsewhere: activations come here and go back, and so do their gradients.
        x, expert_ids, routing = [tensor.to("cpu") for tensor in (hidden_states, top_k_index, top_k_weights)]
        return sft_moe(layer.experts, x, expert_ids, routing, lora, biases, weights).to(device)

    def _layer(
        self, module: nn.Module, x: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor
    ) -> _Layer:
        """The layer that takes this call; NotUnderstoodError where none can."""
        _require_memory(hidden_states=x, top_k_index=expert_ids, top_k_weights=routing_weights)
        extents = x.shape[1:], expert_ids.shape[1:], routing_weights.shape[1:]
        _require_inputs(*extents, x.dtype, routing_weights.dtype)
        return self._layer_for(module, x.shape[1], expert_ids.shape[1])

    def _layer_for(self, module: nn.Module, hidden: int, top_k: int) -> _Layer:
        require_gated(module)
        gate_up, down = base_weight(module, "gate_up_proj"), base_weight(module, "down_proj")
        weights = {"gate_up_proj": gate_up, "down_proj": down}
        gate = gate_of(module)
        require_no_transform()  # before the memory of weights is asked for and laid out
        layout = layout_of(module, gate.interleaved)
        made_from = layout, gate.activation, _state_of(weights, top_k)
        found = self._layers.get(module)
        if found is not None and found.made_from != made_from:
            found = None
            # Before memory is laid out anew: it may hold the old one. Another thread may have been here.
            self._layers.pop(module, None)
        if layout.biased:
            require_biases(module, layout, down.shape)
        if found is None:
            require_kinds(weights)
            require_weights(layout, gate_up, down, hidden)
            # Selective checkpointing counts operations; the second time there are none of these.
            with _disable_current_modes():
                found = self._new_layer(module, layout, weights, top_k, gate.activation)
            if not _is_offloaded(module):
                self._layers[module] = found
        return found

    def _new_layer(
        self,
        module: nn.Module,
        layout: Layout,
        weights: dict[str, torch.Tensor],
        top_k: int,
        activation: str | Mapping[str, Any],
    ) -> _Layer:
        try:
            lay_out_rows(type(module).__name__, layout, weights, left_before=self._left.get(module))
        except NotUnderstoodError as reason:
            self._left[module] = str(reason)
            raise
        made_from = layout, activation, _state_of(weights, top_k)
        with torch.no_grad():  # kept for longer than a graph; trained weights are inputs of each call
            views = as_operator_takes_them(layout, weights["gate_up_proj"], weights["down_proj"])
        return _Layer(self._experts(module, views, top_k, activation), layout, made_from)

    def _experts(
        self,
        module: nn.Module,
        weights: Mapping[str, Weight],
        top_k: int,
        activation: str | Mapping[str, Any],
    ) -> ExpertWeights:
        return ExpertWeights(
            top_k=top_k,
            gate_up_proj=weights.get("gate_up_proj"),
            gate_proj=weights.get("gate_proj"),
            up_proj=weights.get("up_proj"),
            down_proj=weights["down_proj"],
            activation=activation,
            kernel=self._kernel,
            num_threads=self._num_threads,
            name=_name_of(module),
        )

    def rename(self, module: nn.Module, name: str) -> None:
        """Gives the layer another name, where it has run already."""
        if (found := self._layers.get(module)) is not None:
            found.experts.name = name

    def warn_once(self, kind: str, reason: str) -> None:
        """Says that the default implementation runs, and why, the first time that it is so."""
        if (message := f"{kind}: {reason}") not in self._warned:
            self._warned.add(message)
            logger.warning("%s; these experts run through transformers' default implementation", message)

    def forward(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """What transformers calls: the hook itself, and while torch.compile traces a model, one operator of its
        graph in place of it."""
        inputs = hidden_states, top_k_index, top_k_weights
        if not torch.compiler.is_compiling():
            return self(module, *inputs)
        adapters = traced_on(module)
        if adapters is None:
            return _after_a_break(self, module, *inputs)
        dtypes = hidden_states.dtype, top_k_weights.dtype
        extents = [tuple(map(int, tensor.shape[1:])) for tensor in inputs]
        found = _constant_plan(self, module, *extents, *dtypes)
        if found is None:
            return _by_default(module, adapters, *inputs)
        handle, saved, num_experts, *flags = found
        layout = Layout(*flags)
        try:
            lora = _lora_of(module, adapters, num_experts, layout)
        except NotUnderstoodError:  # said by the eager call that follows
            return _by_default(module, adapters, *inputs)
        x, expert_ids, routing = [tensor.to("cpu") for tensor in inputs]
        # Weights are looked at after the plan, which may lay out their memory: graphs are guarded by strides.
        weights = _trained_weights_of(module, layout)
        biases = biases_of(module, layout)
        y = compiled.sft_moe((handle, saved), x, expert_ids, routing, lora, biases, weights)
        return y.to(hidden_states.device)

    def in_graph(self, module: nn.Module, hidden: int, top_k: int) -> _LayerInGraph:
        """What graphs that call this layer hold; NotUnderstoodError where they cannot."""
        layout = self._layer_for(module, hidden, top_k).layout
        # Each as long as the module: a graph that was traced with other routes per token may be called again.
        of_module = self._in_graphs.setdefault(module, {})
        key = hidden, top_k, layout
        if key not in of_module:
            of_module[key] = _LayerInGraph(self, module, (hidden, top_k), layout)
        return of_module[key]


class _LayerInGraph:
    """A layer of a compiled graph: asks in each call what the hook asks."""

    def __init__(self, hook: ExpertsHook, module: nn.Module, shape: tuple[int, int], layout: Layout) -> None:
        self._hook = hook
        self._module = weakref.ref(module)  # whose hook owns this object
        self.shape = shape
        self.layout = layout

    def experts(self) -> ExpertWeights:
        """The layer's base weights, where they are now."""
        module = self._module()
        if module is None:
            raise StateError("compiled graph: expected a layer that it was traced with, got one that is gone")
        name = type(module).__name__
        if active_adapters_on(module):
            raise StateError(f"{name}: expected no LoRA beside that of the compiled graph, got some")
        try:
            layer = self._hook._layer_for(module, *self.shape)
        except NotUnderstoodError as reason:
            raise StateError(f"{name}: changed since it was compiled: {reason}") from None
        if layer.layout != self.layout:
            raise StateError(f"{name}: expected {self.layout}, as it was compiled, got {layer.layout}")
        return layer.experts


def _plan(
    hook: ExpertsHook,
    module: nn.Module,
    hidden: tuple[int, ...],
    ids: tuple[int, ...],
    routes: tuple[int, ...],
    x_dtype: torch.dtype,
    routing_dtype: torch.dtype,
) -> tuple[int, torch.dtype, int, bool, bool, bool] | None:
    """How a graph calls the layer: handle, dtype of what is saved, number of experts, parts of its layout; None
    where the default implementation runs. Asked once, while dynamo traces; extents are those after the number
    of tokens."""
    try:
        _require_inputs(hidden, ids, routes, x_dtype, routing_dtype)
        compiled.refuse_export()  # now: a gate cannot be tried on an export's weights, which have no memory
        layer = hook.in_graph(module, hidden[0], ids[0])
    except NotUnderstoodError as reason:
        hook.warn_once(type(module).__name__, str(reason))
        return None
    layout = layer.layout
    num_experts = layer.experts().num_experts
    return *compiled.handle_of(layer), num_experts, layout.transposed, layout.interleaved, layout.biased


_constant_plan: Any = torch.compiler.assume_constant_result(_plan)


def _name_of(module: nn.Module) -> str:
    if module not in _names:
        _names[module] = f"experts.{next(_unnamed)}"
    return _names[module]


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate has the weights in memory for the length of a call only, from disk or elsewhere."""
    hook = module.__dict__.get("_hf_hook")
    return any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ())))


def _require_memory(**inputs: torch.Tensor) -> None:
    if torch._C._are_functorch_transforms_active():
        return  # they are refused, where the operator would take the layer
    for name, tensor in inputs.items():
        if type(tensor) is torch.Tensor or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type == "cpu" and not has_memory(
            tensor
        ):  # what is elsewhere comes to CPU memory first
            raise NotUnderstoodError(f"expected {name} as a plain tensor, got {type(tensor).__name__}")


def _require_inputs(
    hidden: Sequence[int],
    ids: Sequence[int],
    routes: Sequence[int],
    x_dtype: torch.dtype,
    routing_dtype: torch.dtype,
) -> None:
    """Takes the extents after the number of tokens."""
    if not len(hidden) == len(ids) == len(routes) == 1 or ids != routes:
        raise NotUnderstoodError(
            "expected hidden_states [T, H], top_k_index and top_k_weights [T, k], got "
            f"{['T', *hidden]}, {['T', *ids]} and {['T', *routes]}"
        )
    for name, dtype in (("hidden_states", x_dtype), ("top_k_weights", routing_dtype)):
        if dtype not in FLOATS:
            raise NotUnderstoodError(f"expected {name} in bfloat16 or float32, got {dtype}")


def _trained_weights_of(module: nn.Module, layout: Layout) -> Mapping[str, Weight] | None:
    """The base weights of this call as inputs of autograd, where they train."""
    gate_up, down = base_weight(module, "gate_up_proj"), base_weight(module, "down_proj")
    if not (torch.is_grad_enabled() and (gate_up.requires_grad or down.requires_grad)):
        return None
    return as_operator_takes_them(layout, gate_up, down)


def _require_one_device(module: nn.Module, device: torch.device, reason: str) -> None:
    """Raises StateError where no other implementation can run either."""
    for name, parameter in module.named_parameters():
        if parameter.device.type != device.type:
            raise StateError(
                f"{type(module).__name__}: {reason}; other implementations want one device, got "
                f"{name} on {parameter.device} and activations on {device}"
            )


def _lora_of(
    module: nn.Module, adapters: list[ActiveAdapters], num_experts: int, layout: Layout
) -> LoraFactors:
    how = {"transposed": layout.transposed, "interleaved": layout.interleaved}
    return lora_of(module, adapters, num_experts, **how)


def _by_default(module: nn.Module, adapters: list[ActiveAdapters], *inputs: torch.Tensor) -> torch.Tensor:
    with ExitStack() as adapted:
        for adapter in adapters:
            adapted.enter_context(adapter.as_peft_does_it())
        return _default_implementation(module)(module, *inputs)


def _outside_of_graphs(hook: ExpertsHook, module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    # Where adapters came before the graph that is traced, each call knows anew which apply: it ends here.
    return hook(module, *inputs)


_after_a_break: Any = torch.compiler.disable(_outside_of_graphs)


def _default_implementation(module: nn.Module) -> Any:
    if is_mapped(module):
        # Reads expert by expert; there is no stack to give to grouped_mm.
        return _eager_implementation(module)
    # What transformers takes where nothing is asked for.
    default = moe.ALL_EXPERTS_FUNCTIONS.get("grouped_mm")
    return default if default is not None else _eager_implementation(module)


def _eager_implementation(module: nn.Module) -> Any:
    """The class's own loop, below transformers' decorator."""
    decorated: Any = type(module).forward
    return decorated.__wrapped__


def register(name: str, kernel: str, num_threads: int | None) -> None:
    """Puts a hook into transformers' table under ``name``."""
    if not as_text("name", name):
        raise ArgumentError("name: expected a name for transformers' table, got an empty str")
    if name not in _hooks and (name == "eager" or name in moe.ALL_EXPERTS_FUNCTIONS):
        raise ArgumentError(f"name: expected one that transformers does not have yet, got {name!r}")
    hook = ExpertsHook(kernel, num_threads)
    _hooks[name] = hook
    moe.ALL_EXPERTS_FUNCTIONS.register(name, hook.forward)


def name_layer(module: nn.Module, name: str) -> None:
    """``name`` is what dumps and traces call this experts module."""
    as_text("name", name)
    _names[module] = name
    for hook in _hooks.values():
        hook.rename(module, name)


def why_not(module: nn.Module) -> str | None:
    """Why the operator cannot compute what this experts module computes; ``None`` where it can. Only flags, the
    gate and dtypes are looked at: weights may be on the meta device."""
    try:
        require_gated(module)
        layout_of(module, gate_of(module).interleaved)
        for name in ("gate_up_proj", "down_proj"):
            if (dtype := base_weight(module, name).dtype) not in FLOATS:
                raise NotUnderstoodError(f"expected {name} in bfloat16 or float32, got {dtype}")
    except NotUnderstoodError as reason:
        return str(reason)
    return None


def is_ours(module: nn.Module) -> bool:
    """Whether calling ``module`` leads to a hook of ours."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in _hooks or "has_gate" not in module.__dict__:
        return False
    # A forward set on the instance (a kernel from the hub, a patch) may go elsewhere; accelerate's calls the
    # class's.
    return "forward" not in module.__dict__ or "_hf_hook" in module.__dict__
