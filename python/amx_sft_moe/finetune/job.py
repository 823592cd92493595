"""The run: its stages in order, then the files and the last words."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
from peft import PeftModel

from amx_sft_moe.adapters.files import CONFIG
from amx_sft_moe.errors import cause_of

from . import hook, model, output, report, results, stages
from .errors import FinetuneError
from .options import Options
from .plot import draw
from .stages import Base, Text, Tokens
from .terminal import Terminal

Found = TypeVar("Found")


def terminal(options: Options) -> Terminal:
    """What a run with these options speaks to."""
    return Terminal(stages=6 if options.compare_steps else 5)


def run(options: Options, say: Terminal | None = None) -> results.Results:
    """The whole job; returns what it also writes into `options.output`. Raises FinetuneError; what goes wrong
    once the adapter is written is in the result (`errors`)."""
    say = say or terminal(options)
    torch.set_num_threads(options.threads)
    if options.model is not None:
        model.check_checkpoint(options.model)
    kernel = hook.register(options.kernel, options.threads, getattr(torch, options.dtype))
    environment = _environment(kernel, options.threads)
    say.line("amx_sft_moe finetune")
    for label, value in environment.items():
        say.fact(label, value)

    with (
        tempfile.TemporaryDirectory(prefix="amx-sft-moe-", ignore_cleanup_errors=True) as folder,
        output.opened(options.output, with_base=options.model is None) as out,
    ):
        scratch = Path(folder)
        if (options.output / output.ADAPTER / CONFIG).exists():
            say.fact("beware", f"the adapter in {options.output} is replaced once the new one is trained")
        with say.stage("Text"):
            text = stages.read_text(options, say)
        with say.stage("Base model" if options.model is None else f"Base model {options.model}"):
            base = stages.base_model(options, text, out, scratch, say)
        with say.stage("LoRA on experts and attention, the experts in amx_sft_moe"):
            examples = stages.encode_examples(options, text, base, say)
            with_adapter = stages.load_adapted(options, out, base, say)
            tokens = stages.lay_out(options, examples, with_adapter, say)
            # What there is to say of them is found out before training: failing here costs nothing yet.
            known = partial(
                results.Results,
                options=options,
                environment=environment,
                data=_data(text, base, tokens),
                model=_model(options, with_adapter),
                base=base.curve,
            )
            adapted = stages.train_adapter(options, with_adapter, tokens, scratch, say)
        loss = adapted.curve.held_out[-1][1]
        found = known(lora=adapted.curve, adapter=results.Adapter(0, loss, stock_skipped=results.NOT_YET))
        report_now = partial(_write_so_far, found, say)
        # Nothing that fails from here on, the process being killed included, keeps back what is known by then.
        with say.stage("The adapter, read back by stock PEFT"):
            base = stages.keep(options, out, base, adapted, found, report_now, say)
            stages.read_back(options, base, adapted, tokens, scratch, found.adapter, say)
        report_now()
        if options.compare_steps:
            with say.stage("The same steps with torch's grouped_mm"):
                compare = partial(stages.compare, options, base, adapted, tokens.training, say)
                found.comparison = _tried("the comparison", compare, found, say)
        with say.stage("Where the time of a backward goes"):
            dump = partial(stages.backward_times, options, adapted, tokens.training, scratch, say)
            found.backward = _tried(output.TIMES, dump, found, say)
        found.seconds = dict(say.seconds)
        _write(found, options.output)

    _summary(found, say)
    return found


def _tried(what: str, work: Callable[[], Found], found: results.Results, say: Terminal) -> Found | None:
    """What `work` returns. None where it fails, with the reason in `found.failed`."""
    try:
        return work()
    except Exception as error:  # mostly memory: grouped_mm takes several times as much
        found.failed[what] = str(error) if isinstance(error, FinetuneError) else cause_of(error)
        say.fact("failed", found.failed[what].splitlines()[0])
        return None


def _environment(kernel: str, threads: int) -> dict[str, str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    return {
        "kernel": f"{kernel}, {threads} thread{'s' * (threads != 1)}",
        "packages": f"{packages}, Python {platform.python_version()}",
    }


def _data(text: Text, base: Base, tokens: Tokens) -> results.Data:
    return results.Data(
        prose=f"prose of {stages.LIBRARY}" if base.prose else "",
        examples=text.origin,
        prose_tokens=base.prose[0].tokens if base.prose else 0,
        prose_held_out_tokens=base.prose[1].tokens if base.prose else 0,
        train_examples=len(text.examples[0]),
        held_out_examples=len(text.examples[1]),
        train_tokens=tokens.training.tokens,
        held_out_tokens=tokens.held_out.tokens,
        truncated=tokens.truncated,
        dropped=tokens.dropped,
        vocabulary=len(base.tokenizer),
    )


def _model(options: Options, adapted: PeftModel) -> results.Model:
    sizes, trained = model.expert_sizes(adapted), model.trained_parameters(adapted)
    return results.Model(
        name="Qwen3-MoE, made and trained here" if options.model is None else str(options.model),
        layers=model.bare_model(adapted).config.get_text_config().num_hidden_layers,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        experts=sizes.experts,
        top_k=sizes.top_k,
        frozen=trained.frozen,
        trained_experts=trained.experts,
        trained_attention=trained.attention,
    )


def _write_so_far(found: results.Results, say: Terminal) -> None:
    """Writes reports of what is known by now. What fails is tried again with those of the end."""
    _write(replace(found, seconds=dict(say.seconds), failed=dict(found.failed)), found.options.output)


def _write(found: results.Results, folder: Path) -> None:
    """Writes the reports, each for itself: hours of training are in them. What fails, and why, is in
    `found.failed`, of which the later ones tell."""
    for name, write in {
        output.TIMES: results.write_times,
        output.PICTURE: draw,
        output.REPORT: report.write_report,
        output.METRICS: results.write_metrics,
    }.items():
        try:
            write(found, folder / name)
        except Exception as error:  # a full disk, or whatever matplotlib raises
            found.failed[name] = cause_of(error)


def _summary(found: results.Results, say: Terminal) -> None:
    """What one wants to have seen at the end, and where the rest is but those reports that failed."""
    say.table(report.loss_table(found))
    say.table(report.adapter_table(found))
    takers = "for PEFT; servers drop its form" if found.adapter.fused else "for PEFT and for servers"
    files = {f"{output.ADAPTER}/": f"the adapter, {takers}"}
    if found.base is not None:
        files[f"{output.BASE}/"] = "the model that it belongs to, with its tokenizer"
    files |= {
        output.REPORT: "this run in words, tables and a picture",
        output.PICTURE: "the picture",
        output.METRICS: "every number",
        output.TIMES: "the timing dump",
    }
    say.line(f"\nDone in {say.total()}. In {found.options.output}{os.sep}:")
    for name, meaning in files.items():
        if name not in found.failed:
            say.fact(name, meaning)
