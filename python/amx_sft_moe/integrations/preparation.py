"""What a model will train and how much memory that takes, told before anything of it is allocated."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from torch import nn

from amx_sft_moe.arguments import as_int
from amx_sft_moe.errors import ArgumentError
from amx_sft_moe.integrations import hook_in_use, training_memory
from amx_sft_moe.integrations.trained_parts import (
    DENSE,
    EMBEDDINGS,
    ROUTED,
    ROUTER,
    SHARED,
    Part,
    RoutedExperts,
    bytes_turned,
    is_within,
    lora_ranks,
    parts_of,
    routed_experts,
)
from amx_sft_moe.nn import SftMoeExperts

# Where configurations and routers say k. Names of a setting, and not of models.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "top_k")


@dataclass(frozen=True)
class MemoryItem:
    """One line of the memory table. ``counted``: one that makes up the total; otherwise a figure beside it."""

    name: str
    bytes: int
    counted: bool = True
    remark: str = ""


@dataclass(frozen=True)
class Preparation:
    """What :func:`prepare` found. ``str()`` of it is the table."""

    model: str
    parts: tuple[Part, ...]  # trained ones first
    memory: tuple[MemoryItem, ...]
    notes: tuple[str, ...]
    batch_size: int
    sequence_length: int
    optimizer: str | float

    @property
    def trained(self) -> tuple[Part, ...]:
        """The parts that train."""
        return tuple(part for part in self.parts if part.key.how)

    @property
    def trained_parameters(self) -> int:
        """How many values train."""
        return sum(part.parameters for part in self.trained)

    @property
    def total_bytes(self) -> int:
        """The sum of what is counted."""
        return sum(item.bytes for item in self.memory if item.counted)

    def __str__(self) -> str:
        everything = sum(part.parameters for part in self.parts)
        lines = [f"{self.model}: {self.trained_parameters:,} of {everything:,} parameters train"]
        rows: list[tuple[str, ...]] = [("part", "trains as", "modules", "parameters", "memory")]
        for part in self.trained:
            dtype = str(part.key.dtype).removeprefix("torch.")
            where = f"{part.key.group}: {part.key.target}"
            size = (f"{len(part.modules):,}", f"{part.parameters:,}", _size(part.bytes))
            rows.append((where, f"{part.key.how}, {dtype}", *size))
        lines += _table(rows, left=2)
        lines.append(
            f"memory at {self.batch_size:,} x {self.sequence_length:,} tokens, optimizer {self.optimizer}"
        )
        rows = [
            (item.name, _size(item.bytes) if item.counted else f"({_size(item.bytes)})", item.remark)
            for item in self.memory
        ]
        rows.append(("total", _size(self.total_bytes), "activations of the rest of the model come on top"))
        lines += _table(rows, left=1, remark=True)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def prepare(
    model: nn.Module,
    *,
    batch_size: int = 1,
    sequence_length: int = 2048,
    optimizer: str | float = "adamw",
    gradient_checkpointing: bool | None = None,
    top_k: int | None = None,
    quiet: bool = False,
    file: TextIO | None = None,
) -> Preparation:
    """Prints what trains and how much memory it takes, and refuses a model of which no routed expert trains.

    Only names, shapes and dtypes are read: the model may be on the meta device, and nothing is allocated. (PEFT
    itself makes its factors on the CPU and moves them; ``with torch.device("meta"):`` around it avoids that.)

    Args:
        model: any module with routed experts, adapted or not (a ``PeftModel``, ``model.add_adapter``,
            :class:`amx_sft_moe.nn.SftMoeExperts`, plain ``requires_grad``).
        batch_size, sequence_length: of one forward and backward; accumulation costs nothing more.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``sgd_momentum``, ``none`` as torch keeps their state, or bytes
            for each trained parameter.
        gradient_checkpointing: ``None`` takes it from the model.
        top_k: routes per token, where the model's configuration and routers do not say it.
        quiet: print nothing, only return.
        file: where to print; ``None`` is ``sys.stdout``.

    Returns:
        The same as an object: ``parts``, ``memory``, ``notes``, ``total_bytes``.

    Raises:
        ArgumentError: no routed expert trains (the message says what does, and how to target them), or an
            argument does not fit. TypeError: ``model`` is no module, or a size no int.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    as_int("batch_size", batch_size, 1)
    as_int("sequence_length", sequence_length, 1)
    experts = routed_experts(model)
    parts = parts_of(model, experts)
    _require_routed(model, experts, parts)
    tokens = batch_size * sequence_length
    shapes = _shapes(model, experts, top_k)
    layers = [shape for _, shape in shapes]
    flagged = set(_run_again(model))
    again = [
        one.module in flagged if gradient_checkpointing is None else gradient_checkpointing for one, _ in shapes
    ]
    memory = [
        *_state(model, parts, optimizer),
        *_activations(model, layers, tokens, again),
        *_factors_turned(model, experts),
        *_logits(model, layers, tokens),
        _beside_experts(model, parts, optimizer),
    ]
    found = Preparation(
        _name(model),
        tuple(parts),
        tuple(memory),
        tuple(_notes(experts, parts)),
        batch_size,
        sequence_length,
        optimizer,
    )
    if not quiet:
        print(found, file=sys.stdout if file is None else file)
    return found


def _require_routed(model: nn.Module, experts: list[RoutedExperts], parts: list[Part]) -> None:
    if not experts:
        raise ArgumentError(f"model: expected a model with routed experts, got {_name(model)} without any")
    if any(part.key.group == ROUTED and part.key.how for part in parts):
        return
    trained = sorted({f"{part.key.group} ({part.key.target})" for part in parts if part.key.how})
    raise ArgumentError(
        f"model: expected routed experts that train, got {_name(model)} with the experts of {len(experts)} "
        f"layers frozen; what trains: {', '.join(trained) or 'nothing'}. {_how_to_target(experts)}"
    )


def _how_to_target(experts: list[RoutedExperts]) -> str:
    targets: dict[str, None] = {}  # in order, each once
    for one in experts:
        if one.fused:
            names = [name for name, p in one.module._parameters.items() if p is not None and p.dim() == 3]
            weights = [name for name in names if not name.endswith(("_lora_a", "_lora_b"))]
            targets |= dict.fromkeys(".".join(filter(None, (_block(one.name), name))) for name in weights)
    if not targets:
        block = _block(experts[0].name)
        return f"To train them, name the projections below {block} in LoraConfig's target_modules"
    quoted = ", ".join(f'"{target}"' for target in targets)
    return f"To train them: LoraConfig(target_parameters=[{quoted}], ...)"


def _block(name: str) -> str:
    """``mlp.experts`` of ``model.layers.3.mlp.experts``: without the number, which is one layer's."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 if numbers else 0 :][-2:])


def _shapes(
    model: nn.Module, experts: list[RoutedExperts], top_k: int | None
) -> list[tuple[RoutedExperts, training_memory.LayerShape]]:
    if top_k is not None:
        as_int("top_k", top_k, 1)
    shapes = []
    for one in experts:
        if one.fused:
            k = top_k if top_k is not None else routes_per_token(model, one.module)
            if k is None:
                raise ArgumentError(
                    f"top_k: expected routes per token, since {_name(model)} does not say them, got None"
                )
            shape = training_memory.layer_shape(one.module, one.num_experts, k, lora_ranks(one, model))
            if shape is not None:
                shapes.append((one, shape))
    return shapes


def routes_per_token(model: nn.Module, experts: nn.Module) -> int | None:
    """How many experts a token goes to, as the module or the configuration says; ``None``: neither does."""
    config: Any = getattr(experts, "config", None) or getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for holder in (experts, config):
        for name in _TOP_K:
            if isinstance(k := getattr(holder, name, None), int):
                return k
    return None


def _state(model: nn.Module, parts: list[Part], optimizer: str | float) -> Iterable[MemoryItem]:
    trained = [part for part in parts if part.key.how]
    numbers, size = sum(part.parameters for part in trained), sum(part.bytes for part in trained)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    state = training_memory.optimizer_bytes(optimizer, numbers, size)
    yield MemoryItem("weights, frozen", sum(part.bytes for part in parts) - size + buffers)
    yield MemoryItem("weights, trained", size)
    yield MemoryItem("gradients", size, remark="in the parameters' own types")
    yield MemoryItem("optimizer state", state)


def _activations(
    model: nn.Module, layers: list[training_memory.LayerShape], tokens: int, again: list[bool]
) -> Iterable[MemoryItem]:
    """``again``: which layers gradient checkpointing runs again in the backward, one at a time."""
    if not layers:
        return
    activation_bytes = _activation_bytes(model)
    saved = [
        training_memory.saved_by_operator(layer, tokens)
        + training_memory.inputs_kept(layer, tokens, activation_bytes)
        for layer in layers
    ]
    kept = [size for size, one in zip(saved, again, strict=True) if not one]
    at_a_time = max((size for size, one in zip(saved, again, strict=True) if one), default=0)
    remark = f"{len(kept)} layers"
    if kept and at_a_time:
        remark += " and one of those that gradient checkpointing runs again"
    elif at_a_time:
        remark = "of one layer: gradient checkpointing runs each again"
    yield MemoryItem("saved activations of the experts", sum(kept) + at_a_time, remark=remark)
    if any(again):
        hidden = max(layer.hidden_size for layer in layers)
        inputs = max(_blocks_run_again(model), sum(again)) * tokens * hidden * activation_bytes
        yield MemoryItem("inputs of the checkpointed layers", inputs)
    scratch = max(training_memory.workspace(layer, tokens) for layer in layers)
    yield MemoryItem("workspace of the experts", scratch, remark="shared by all layers; and some MB a thread")


def _run_again(module: nn.Module, flag: bool = False) -> Iterator[nn.Module]:
    """The modules that gradient checkpointing runs again: with transformers' flag on themselves, or on the
    innermost around them that has one. Not all blocks of a model need to have it set (``every_n_layers``)."""
    flag = bool(getattr(module, "gradient_checkpointing", flag))
    if flag:
        yield module
    for child in module.children():
        yield from _run_again(child, flag)


def _blocks_run_again(model: nn.Module) -> int:
    """How many blocks gradient checkpointing keeps the input of. The model's own flag is of its blocks."""
    flagged = [(name, m) for name, m in model.named_modules() if hasattr(m, "gradient_checkpointing")]
    around = {name[:at] for name, _ in flagged for at, letter in enumerate(name) if letter == "."} | {""}
    return sum(m.gradient_checkpointing is True for name, m in flagged if name not in around)


def _factors_turned(model: nn.Module, experts: list[RoutedExperts]) -> Iterable[MemoryItem]:
    turned = max(bytes_turned(one, model) for one in experts)
    if turned > 0:
        remark = "both B of one layer and their gradients"
        yield MemoryItem("adapters' factors, turned", turned, remark=remark)


def _logits(model: nn.Module, layers: list[training_memory.LayerShape], tokens: int) -> Iterable[MemoryItem]:
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    if layers and (weight := getattr(get_head(), "weight", None)) is not None:
        logits = tokens * weight.shape[0] * (_activation_bytes(model) + 4)
        yield MemoryItem("logits and their gradient", logits, counted=False, remark="rough, not in the total")


def _beside_experts(model: nn.Module, parts: list[Part], optimizer: str | float) -> MemoryItem:
    others = [part for part in parts if part.key.group != ROUTED]
    size = sum(item.bytes for item in _state(model, others, optimizer))
    remark = "of the total, on a GPU after keep_experts_on_cpu"
    return MemoryItem("all but the experts", size, counted=False, remark=remark)


def _activation_bytes(model: nn.Module) -> int:
    dtypes = [
        p.element_size() for n, p in model.named_parameters() if p.is_floating_point() and "lora_" not in n
    ]
    return 2 if dtypes and max(set(dtypes), key=dtypes.count) <= 2 else 4


def _notes(experts: list[RoutedExperts], parts: list[Part]) -> Iterable[str]:
    trains = {part.key.group for part in parts if part.key.how}
    there = {part.key.group for part in parts}
    routed = {m for part in parts if part.key.group == ROUTED and part.key.how for m in part.modules}
    layers = [one for one in experts if any(is_within(m, one.name) for m in routed)]
    if len(layers) < len(experts):
        yield f"routed experts train in {len(layers)} of {len(experts)} layers"
    targets = {part.key.target for part in parts if part.key.group == ROUTED and part.key.how}
    names = {
        part.key.target for part in parts if part.key.group == ROUTED and part.key.target.endswith("_proj")
    }
    if missing := sorted(names - _with_their_halves(targets)):
        yield f"of the routed experts {', '.join(missing)} does not train"
    for group in (SHARED, DENSE):
        if group in there and group not in trains:
            yield f"{group}: none trains; target names that mean fused experts do not reach them"
    if ROUTER in trains:
        yield 'the router trains too ("all-linear" does that): which experts a token gets will move'
    if EMBEDDINGS in trains:
        yield "embeddings or the head train"
    elsewhere = [one for one in layers if not _runs_here(one)]
    if elsewhere:
        yield (
            f"the experts of {len(elsewhere)} layers ({elsewhere[0].name}, ...) do not run on this library: "
            'call register() and model.set_experts_implementation("amx_sft_moe"); their activations are '
            "estimated as if they did"
        )
    hooked = [(one, hook_in_use()) for one in layers if _runs_through_hook(one)]
    refused = [(one, why) for one, hook in hooked if (why := hook.why_not(one.module))]
    if refused:
        yield (
            f"the experts of {len(refused)} layers ({refused[0][0].name}, ...) will run through transformers' "
            f"default implementation: {refused[0][1]}; their activations are estimated as if they did not"
        )


def _with_their_halves(targets: set[str]) -> set[str]:
    """gate_up_proj is gate_proj and up_proj, whichever way the weights or the adapters have it."""
    halves = {"gate_proj", "up_proj"}
    if halves <= targets:
        return targets | {"gate_up_proj"}
    return targets | halves if "gate_up_proj" in targets else targets


def _runs_here(experts: RoutedExperts) -> bool:
    return isinstance(experts.module, SftMoeExperts) or _runs_through_hook(experts)


def _runs_through_hook(experts: RoutedExperts) -> bool:
    hook = hook_in_use()
    return hook is not None and experts.fused and bool(hook.is_ours(experts.module))


def _name(model: nn.Module) -> str:
    get_base: Any = getattr(model, "get_base_model", lambda: model)
    return type(get_base()).__name__


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 1024:,.2f} KiB"


def _table(rows: list[tuple[str, ...]], *, left: int, remark: bool = False) -> list[str]:
    """Rows with the first ``left`` columns to the left, the rest to the right, and a remark as it is."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for c, cell in enumerate(row):
            if remark and c == len(row) - 1:
                cells.append(cell)
            else:
                cells.append(cell.ljust(widths[c]) if c < left else cell.rjust(widths[c]))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
