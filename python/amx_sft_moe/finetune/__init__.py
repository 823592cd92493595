"""The main job: LoRA fine-tuning of a Mixture-of-Experts model on this CPU, offline, experts in the operator.

`python -m amx_sft_moe finetune` runs the stages of `job.run` in order:

    corpus, jsonl          text and question/answer examples, split into training and held-out
    tokenizer              a byte-level BPE trained on them
    packing                token blocks [N, L], with labels only where the loss counts
    model                  a small Qwen3-MoE, or the user's checkpoint; LoRA on its experts and attention
    separation             whether examples that share a row see each other in that model
    training, held_out     the HF Trainer with one progress bar; the loss on text that no step has seen
    output                 the folder of the run; adapter and base come to lie in it together
    adapter                the adapter on disk, per expert, and its loss under stock PEFT
    clock, comparison      the same steps with torch's grouped_mm beside ours, and the experts' share of each
    hook                   the operator behind transformers, and where the time of a backward goes
    results, report, plot  what metrics.json, report.md and finetune.png say; tables, terminal: how
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the given arguments; returns its exit status (see `cli.main`)."""
    # Imported late: the command has to prepare the environment before torch and transformers are imported.
    from .cli import main as run

    return run(argv)
