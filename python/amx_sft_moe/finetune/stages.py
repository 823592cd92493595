"""The stages of a run, each a function that says what it found and returns it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from amx_sft_moe.errors import cause_of
from amx_sft_moe.kept_memory import empty_cache

from . import adapter, comparison, corpus, hook, jsonl, model, packing, report, results
from .corpus import Document, Example
from .errors import DivergedError, FinetuneError
from .held_out import IGNORED
from .options import OURS, TORCH_GROUPED, Options
from .output import ADAPTER, BASE, Output
from .packing import Encoded, TokenBlocks
from .separation import keeps_examples_apart
from .tables import loss
from .terminal import Terminal
from .tokenizer import train_tokenizer
from .training import Curve, train

LIBRARY = "Python's standard library"
SAME_LOSS = 0.01  # nats; bf16 in another order of sums stays far below

Item = TypeVar("Item")


@dataclass(frozen=True)
class Text:
    """What there is to learn from: (training, held out) of each. No prose where a checkpoint is given."""

    prose: tuple[list[Document], list[Document]]
    examples: tuple[list[Example], list[Example]]
    origin: str  # of the examples


@dataclass(frozen=True)
class Base:
    """The checkpoint that the adapter belongs to; tokens and curve where it was trained here."""

    folder: Path  # where it lies now
    place: Path  # where it will lie once it is kept
    tokenizer: PreTrainedTokenizerBase
    prose: tuple[TokenBlocks, TokenBlocks] | None = None
    curve: Curve | None = None


@dataclass(frozen=True)
class Examples:
    """The examples as tokens, each for itself."""

    training: list[Encoded]
    held_out: list[Encoded]
    padding: int
    truncated: int
    dropped: int


@dataclass(frozen=True)
class Tokens:
    """The examples as the model sees them, in rows."""

    training: TokenBlocks
    held_out: TokenBlocks
    truncated: int
    dropped: int


@dataclass(frozen=True)
class Adapted:
    """The model with its trained adapter, the adapter that it started from, and how training went."""

    model: PeftModel
    start: dict[str, torch.Tensor]
    curve: Curve


def _taken(items: Sequence[Item], most: int | None) -> list[Item]:
    """At most `most` items, spread evenly over all."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


def read_text(options: Options, say: Terminal) -> Text:
    """Reads and splits the prose and the examples that this run needs."""
    if options.data is None:
        examples, origin = corpus.questions(), f"signatures and docstrings of {LIBRARY}"
        split_examples = corpus.split_questions
    else:
        examples, origin = jsonl.read_examples(options.data), options.data.name
        split_examples = corpus.split_examples
    prose: tuple[list[Document], list[Document]] = ([], [])
    if options.model is None:
        prose = corpus.split_documents(_taken(corpus.prose(), options.texts), options.held_out)
        characters = [sum(len(document.text) for document in part) for part in prose]
        say.fact("prose", f"{characters[0]:,} characters for training, {characters[1]:,} held out: {LIBRARY}")
    taken = _taken(examples, options.texts)
    split = split_examples(taken, options.held_out)
    if len(taken) < len(examples):
        origin += f" ({len(taken):,} of {len(examples):,}, as --quick takes them)"
    say.fact("examples", f"{len(split[0]):,} for training, {len(split[1]):,} held out: {origin}")
    return Text(prose, split, origin)


def base_model(options: Options, text: Text, out: Output, scratch: Path, say: Terminal) -> Base:
    """The user's checkpoint, or a model made, trained on the prose and written here."""
    if options.model is not None:
        return Base(options.model, options.model, model.load_tokenizer(options.model))
    assert out.base is not None
    texts = [document.text for document in text.prose[0]]
    texts += [example.prompt + example.completion for example in text.examples[0]]
    tokenizer = train_tokenizer(texts, options.shape.vocabulary, options.sequence_length)
    training, held_out = (packing.chunk(tokenizer, part, options.sequence_length) for part in text.prose)
    held_out = held_out.first(options.evaluation_rows)
    made = model.make_model(options.shape, tokenizer, options.sequence_length, options.seed)
    shape = options.shape
    sizes = f"{shape.layers} layers, H = {shape.hidden}, I = {shape.intermediate}, E = {shape.experts}"
    dtype = getattr(torch, options.dtype)
    out.require_space("the model that is made", made.num_parameters() * dtype.itemsize)
    say.fact("tokenizer", f"byte-level BPE, {len(tokenizer):,} tokens")
    say.fact("model", f"Qwen3-MoE, {sizes}, top-{shape.top_k}, {made.num_parameters():,} parameters")
    say.fact("training", f"{training.tokens:,} tokens of prose, all parameters, fp32, {TORCH_GROUPED}")
    curve = train(
        made,
        training,
        held_out,
        title="  base",
        steps=options.base_steps,
        batch_size=options.batch_size,
        learning_rate=options.base_learning_rate,
        seed=options.seed,
        scratch=scratch,
    )
    _say_curve(say, curve)
    with out.writing():
        model.save_base(made, tokenizer, dtype, out.base)
    return Base(out.base, out.folder / BASE, tokenizer, (training, held_out), curve)


def encode_examples(options: Options, text: Text, base: Base, say: Terminal) -> Examples:
    """The examples as tokens; says how many did not fit. FinetuneError where the model lacks a token, or none
    is left."""
    vocabulary = model.vocabulary_size(base.folder)
    encoded: list[list[Encoded]] = []
    truncated = dropped = 0
    limit = options.sequence_length
    for part, what in zip(text.examples, ("training example", "held-out example"), strict=True):
        found, counts = packing.encode_examples(base.tokenizer, part, limit)
        packing.require_any(found, limit, f"{what}, of {len(part):,},")
        _require_known(found, base, vocabulary)
        encoded.append(found)
        truncated += counts.truncated
        dropped += counts.dropped
    tokens = sum(len(example.tokens) for example in encoded[0])
    predicted = sum(label != IGNORED for example in encoded[0] for label in example.labels)
    say.fact("examples", f"{tokens:,} tokens, {predicted:,} of them in answers, which count")
    if truncated:
        say.fact("too long", f"{truncated:,} examples cut to {limit} tokens")
    if dropped:
        say.fact("left out", f"{dropped:,} examples without a token to predict within {limit}")
    return Examples(encoded[0], encoded[1], _padding_id(base.tokenizer, vocabulary), truncated, dropped)


def _padding_id(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> int:
    """A token to fill rows up with, which nothing looks at: one that the model has an embedding for.

    A tokenizer's own padding can be a token that was added after the model was made.
    """
    given = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in given if token is not None and token < vocabulary), 0)


def _require_known(encoded: Sequence[Encoded], base: Base, vocabulary: int) -> None:
    for example in encoded:
        for token in example.tokens:
            if token >= vocabulary:
                raise FinetuneError(
                    f"{base.place}: expected token ids below {vocabulary} (vocab_size of config.json) of its "
                    f"tokenizer, got {token} ({base.tokenizer.convert_ids_to_tokens(token)!r})"
                )


def load_adapted(options: Options, out: Output, base: Base, say: Terminal) -> PeftModel:
    """The base with a new adapter, the experts in our operator. FinetuneError where the disk has no room for
    that adapter."""
    dtypes = getattr(torch, options.dtype), getattr(torch, options.dense_dtype)
    bare = model.load_model(base.folder, *dtypes, OURS, options.cache_dir)
    if gigabytes := model.mapped_gigabytes(bare):
        say.fact("mapped", f"{gigabytes:.3f} GB of experts, used as they lie in {base.place}")
    if left := model.attention_left_out(bare):
        say.fact("left out", f"{', '.join(left)}: PEFT takes the name for an expert's, so it gets no LoRA")
    adapted = model.add_adapter(bare, options.rank, options.alpha, options.seed)
    out.require_space("the adapter", adapter.saved_bytes(adapted))
    return adapted


def lay_out(options: Options, examples: Examples, adapted: PeftModel, say: Terminal) -> Tokens:
    """Several examples a row, or one where this model would not keep them apart."""
    parts = examples.training, examples.held_out
    rows = [packing.pack(part, options.sequence_length, examples.padding) for part in parts]
    if not keeps_examples_apart(adapted, rows):
        rows = [packing.one_per_row(part, options.sequence_length, examples.padding) for part in parts]
        kind = model.bare_model(adapted).config.model_type
        say.fact("rows", f"of one example each: in {kind} several in a row would not stay apart")
    training, held_out = rows
    held_out = held_out.first(options.evaluation_rows)
    return Tokens(training, held_out, examples.truncated, examples.dropped)


def train_adapter(
    options: Options, adapted: PeftModel, tokens: Tokens, scratch: Path, say: Terminal
) -> Adapted:
    """LoRA through the Trainer."""
    trained = model.trained_parameters(adapted)
    experts = f"{trained.experts:,} parameters on the experts of {trained.layers} layers"
    say.fact("trained", f"{experts}, {trained.attention:,} on attention, rank {options.rank}, fp32")
    say.fact("frozen", f"{trained.frozen:,} parameters in {options.dtypes}")
    start = model.adapter_state(adapted)
    try:
        curve = train(
            adapted,
            tokens.training,
            tokens.held_out,
            title="  LoRA",
            steps=options.steps,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            seed=options.seed,
            scratch=scratch,
        )
    except DivergedError as error:
        raise FinetuneError(f"{error}: {_advice(options)}") from error
    _say_curve(say, curve)
    empty_cache()  # of gradients: what comes next asks how much memory there is
    return Adapted(adapted, start, curve)


def keep(
    options: Options,
    out: Output,
    base: Base,
    adapted: Adapted,
    found: results.Results,
    report: Callable[[], None],
    say: Terminal,
) -> Base:
    """Writes the adapter, and puts it and the base where they stay; returns the base there. Why the adapter is
    not per expert where it is not, and what could not be written beside it, goes into `found`, of which
    `report` writes as soon as both are in place.

    FinetuneError, and all stays as it was, where training has not led to numbers.
    """
    _require_finite(options, adapted)
    with out.writing():
        reason = adapter.save_adapter(adapted.model, out.adapter, base.place)
        found.adapter.fused = reason
        found.adapter.bytes = sum(file.stat().st_size for file in out.adapter.glob("adapter_model*"))
        lacks_tokenizer = adapter.save_tokenizer(base.tokenizer, out.adapter)
    if lacks_tokenizer:
        found.failed["its tokenizer"] = lacks_tokenizer
        say.fact("beware", f"the adapter is kept without its tokenizer: {lacks_tokenizer}")
    say.fact("form", f"fused, as PEFT writes it; not per expert: {reason}" if reason else "per expert")
    out.keep(report)
    return replace(base, folder=base.place)


def _require_finite(options: Options, adapted: Adapted) -> None:
    """FinetuneError where the last step, of which no training loss tells, has broken the adapter."""
    after = adapted.curve.held_out[-1][1]
    state = model.adapter_state(adapted.model)
    broken = [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]
    if math.isfinite(after) and not broken:
        return
    found = f"numbers that are not finite in {broken[0]}" if broken else f"a held-out loss of {after}"
    raise FinetuneError(f"training has diverged: expected a finite adapter, got {found}: {_advice(options)}")


def _advice(options: Options) -> str:
    """What to know, and to do, after LoRA has diverged."""
    return (
        f"nothing was kept, {options.output} is as it was; try a smaller --learning-rate than "
        f"{options.learning_rate:g}"
    )


def read_back(
    options: Options,
    base: Base,
    adapted: Adapted,
    tokens: Tokens,
    scratch: Path,
    saved: results.Adapter,
    say: Terminal,
) -> None:
    """Has stock PEFT read the adapter, where memory is left for a second model; failing is a result too. What
    it finds goes into `saved`."""
    folder = options.output / ADAPTER
    here = loss(saved.loss)
    saved.stock_skipped = ""
    try:
        dtype = getattr(torch, options.dense_dtype)
        # Stock torch has the experts in the dtype of the rest.
        if not model.room_for_copies(adapted.model, _copies(options)):
            saved.stock_skipped = "memory is short for a second model"
            say.fact("held-out loss", f"{here} here; not read back, {saved.stock_skipped}")
            return
        stock = adapter.stock_loss(
            base.folder, folder, tokens.held_out, dtype, options.batch_size, options.threads, scratch
        )
    except Exception as error:  # a full disk as well
        unread = f"stock PEFT could not read {folder}: {cause_of(error)}"
        saved.stock_error = str(error) if isinstance(error, FinetuneError) else unread
        say.fact("held-out loss", f"{here} here; {saved.stock_error.splitlines()[0]}")
        return
    saved.stock_loss = stock
    say.fact("held-out loss", f"{here} here, {loss(stock)} in stock PEFT on a fresh base")
    if not abs(stock - saved.loss) <= SAME_LOSS:
        saved.stock_differs = (
            f"stock PEFT does not get the same model out of {folder}: expected a held-out loss within "
            f"{SAME_LOSS:g} of {here}, got {loss(stock)}"
        )
        say.fact("beware", saved.stock_differs)


def compare(
    options: Options, base: Base, adapted: Adapted, blocks: TokenBlocks, say: Terminal
) -> list[comparison.Lane] | None:
    """The same steps with torch's grouped_mm beside ours, where memory is left for W + BA of all layers.

    Experts that stay one by one in their files are stacked in memory for grouped_mm: a second model. So are
    those of another dtype than the rest, which grouped_mm does not take: there all is in the dtype of the rest.
    """
    dtype, dense = getattr(torch, options.dtype), getattr(torch, options.dense_dtype)
    apart = model.mapped_gigabytes(adapted.model) > 0 or dense != dtype
    if not model.room_for_copies(adapted.model, 2 * _copies(options) if apart else 1):
        copies = "stack the experts and copy them" if apart else "hold a second copy of the weights"
        say.fact("left out", f"PEFT with {TORCH_GROUPED} would {copies}, memory is short for it")
        return None
    other = adapted.model
    if apart:
        if dense != dtype:
            say.fact(TORCH_GROUPED, f"in {options.dense_dtype}, in which torch multiplies faster on this CPU")
        stacked = model.load_stacked(base.folder, dense, TORCH_GROUPED)
        other = model.add_adapter(stacked, options.rank, options.alpha, options.seed)
    models = {OURS: adapted.model, TORCH_GROUPED: other}
    count = options.compare_steps
    batches = comparison.batches(blocks, count, options.batch_size, options.seed)
    lanes = comparison.compare(models, adapted.start, batches, count, options.learning_rate)
    for table in (report.step_loss_table(*lanes), report.step_time_table(*lanes)):
        say.table(table)
    return lanes


def _copies(options: Options) -> int:
    """How many times the experts' memory a model has that is all in the dtype of the rest."""
    experts, rest = getattr(torch, options.dtype), getattr(torch, options.dense_dtype)
    return rest.itemsize // experts.itemsize


def backward_times(
    options: Options, adapted: Adapted, blocks: TokenBlocks, scratch: Path, say: Terminal
) -> hook.BackwardTimes:
    """The timing dump of one layer's backward."""
    (batch,) = comparison.batches(blocks, 1, options.batch_size, options.seed)
    times = hook.backward_times(adapted.model, batch, options.kernel, options.threads, scratch)
    say.fact("layer", f"{times.layer} of {times.layers}, {batch['input_ids'].numel():,} tokens")
    say.text(times.text)
    return times


def _say_curve(say: Terminal, curve: Curve) -> None:
    before, after = curve.held_out[0][1], curve.held_out[-1][1]
    say.fact("held-out loss", f"{loss(before)} before, {loss(after)} after {len(curve.step_seconds)} steps")
    say.fact("speed", f"{curve.tokens_per_second:,.0f} tokens/s")
