"""report.md, and the tables that the terminal shows too."""

from __future__ import annotations

from pathlib import Path

from .comparison import Lane
from .options import OURS, Options
from .output import ADAPTER, BASE, PICTURE
from .results import Results, write_text
from .tables import Row, duration, loss, markdown_table, milliseconds

_LOADING = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base!r}, dtype="auto")
model = PeftModel.from_pretrained(base, {adapter!r})
"""

Table = tuple[Row, list[Row]]

CAVEAT = (
    "`grouped_mm` runs as PEFT ships it: PEFT builds `W + s B A` for all experts at each call, "
    "and a dense gradient of it, which is in its time. `benchmarks/peers.py` compares with factored LoRA."
)


def loss_table(results: Results) -> Table:
    """Held-out losses before and after each stage."""
    rows: list[Row] = []
    if results.base is not None:
        first, last = results.base.held_out[0][1], results.base.held_out[-1][1]
        rows.append(("base training, prose", loss(first), loss(last), f"{results.base.tokens_per_second:,.0f}"))
    rows.append(
        ("LoRA, answers", loss(results.before), loss(results.after), f"{results.lora.tokens_per_second:,.0f}")
    )
    return ("held-out loss", "before", "after", "tokens/s"), rows


def step_loss_table(ours: Lane, other: Lane) -> Table:
    """Losses of the compared steps, side by side."""
    pairs = zip(ours.losses, other.losses, strict=True)
    rows: list[Row] = [
        (str(step), loss(a), loss(b), f"{a - b:+.4f}") for step, (a, b) in enumerate(pairs, start=1)
    ]
    return ("loss of step", ours.name, other.name, "difference"), rows


def step_time_table(ours: Lane, other: Lane) -> Table:
    """Median time of a compared step, milliseconds, with the experts' share of it."""

    def row(title: str, a: float, b: float) -> Row:
        return title, milliseconds(a), milliseconds(b), f"{b / a:.2f} x" if a else "-"

    rows = [row("step", ours.median("step"), other.median("step"))]
    rows += [row(f"experts, {what}", ours.median(what), other.median(what)) for what in ("forward", "backward")]
    rows.append(row("experts", ours.experts, other.experts))
    rows.append(("experts' share of the step", f"{ours.share:.0%}", f"{other.share:.0%}", ""))
    return ("milliseconds", ours.name, other.name, "grouped_mm / ours"), rows


def adapter_table(results: Results) -> Table:
    """The held-out loss of the saved adapter in both worlds."""
    rows: list[Row] = [("in training, experts in amx_sft_moe", loss(results.adapter.loss))]
    if results.adapter.stock_loss is not None:
        rows.append(("read back by stock PEFT, experts in grouped_mm", loss(results.adapter.stock_loss)))
    elif results.adapter.stock_error:
        rows.append(("read back by stock PEFT", "failed"))
    elif results.adapter.stock_skipped:
        rows.append(("read back by stock PEFT", "not done"))
    return ("held-out loss of the adapter", "loss"), rows


def _facts(results: Results) -> str:
    data, model, options = results.data, results.model, results.options
    lines = [
        f"- Model: {model.name}, {model.layers} layers, H = {model.hidden}, I = {model.intermediate}, "
        f"E = {model.experts}, top-{model.top_k}; {model.frozen:,} parameters, frozen in {options.dtypes}.\n"
        f"- LoRA: rank {options.rank}, alpha {options.alpha:g}; {model.trained_experts:,} parameters on "
        f"experts, {model.trained_attention:,} on attention, fp32.\n"
        f"- Examples: {data.examples}; {data.train_examples:,} for training ({data.train_tokens:,} tokens), "
        f"{data.held_out_examples:,} held out. The loss counts the answers, not the questions."
    ]
    if data.prose:
        lines.insert(
            0, f"- Base training: {data.prose}; {data.prose_tokens:,} tokens, in fp32 with grouped_mm."
        )
    lines += [f"- {name}: {value}" for name, value in results.environment.items()]
    return "\n".join(lines)


def loading(options: Options) -> str:
    """Python that loads the adapter, wherever it is run: paths are absolute."""
    base = options.model or options.output / BASE
    return _LOADING.format(base=str(base.resolve()), adapter=str((options.output / ADAPTER).resolve()))


def markdown(results: Results) -> str:
    """The whole report, for a file beside the picture."""
    parts = ["# A fine-tuning run", _facts(results)]
    if PICTURE not in results.failed:
        parts.append(f"![Losses and step times]({PICTURE})")
    parts += [
        "## Losses",
        "Nats per token, on text that no step has seen.",
        markdown_table(*loss_table(results)),
    ]
    if results.comparison:
        parts += [
            f"## {OURS} beside grouped_mm",
            "The same batches from the same adapter, turn by turn; medians, without the first step.",
            markdown_table(*step_time_table(*results.comparison)),
            CAVEAT,
            markdown_table(*step_loss_table(*results.comparison)),
        ]
    form = "a pair of factors per expert and projection, the form that PEFT loads and servers converge on."
    if results.adapter.fused:
        form = f"fused, as PEFT writes it; not per expert: {results.adapter.fused}"
    written = f"`adapter/`, {results.adapter.bytes / 1e6:.1f} MB: {form}"
    if results.backward is not None:
        parts += [
            "## Where the time of a backward goes",
            f"The experts of layer {results.backward.layer} of {results.backward.layers} in one step, as the "
            "operator dumps it (`AMX_SFT_MOE_TIMER=text`).",
            f"```\n{results.backward.text}\n```",
        ]
    if results.failed:
        parts += ["## What failed", "\n".join(f"- {what}: {why}" for what, why in results.failed.items())]
    parts += [
        "## The adapter",
        written,
        markdown_table(*adapter_table(results)),
        *_reading_back(results),
        f"```python\n{loading(results.options)}```",
        "## Time",
        markdown_table(
            ("stage", "time"),
            [(name, duration(seconds)) for name, seconds in results.seconds.items()]
            + [("total", duration(sum(results.seconds.values())))],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _reading_back(results: Results) -> list[str]:
    """What the table of losses does not say about the adapter."""
    saved = results.adapter
    if saved.stock_error:
        return [f"```\n{saved.stock_error}\n```"]
    if saved.stock_skipped:
        return [f"Not read back by stock PEFT: {saved.stock_skipped}."]
    return [f"Beware: {saved.stock_differs}."] if saved.stock_differs else []


def write_report(results: Results, path: Path) -> None:
    """Writes `report.md`."""
    write_text(path, markdown(results))
