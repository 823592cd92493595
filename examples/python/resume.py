"""Stop and go on, bit for bit: with the Trainer's checkpoints and with those of a plain loop.

    python resume.py --stop-after 10        # as if somebody had stopped it after the checkpoint of step 10
    python resume.py                        # goes on from there; without a checkpoint it starts
    python resume.py --loop plain           # only one of the two loops

Losses and adapter are the same bits as without the interruption: both runs end with the same hashes. What that
takes:

* The adapter (fp32), the optimiser's state, the schedule, and torch's random state where something is random
  (dropout).
* The order of the data. The Trainer derives it from its seed and skips what was seen; the plain loop makes it a
  function of seed and step, so that nothing has to be kept.
* The same number of steps in all: the learning rate depends on it.
* The same number of threads. The operator gives the same bits for any, but torch's own operations need not.

Base weights are not in a checkpoint: they are frozen.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_cosine_schedule_with_warmup,
)
from transformers.trainer_utils import get_last_checkpoint

import amx_sft_moe
from amx_sft_moe.finetune.packing import TokenBlocks

BATCH, LEARNING_RATE, WARMUP = 8, 5e-3, 2
SAVE_STEPS = 50  # how much work an interruption may cost


def adapted_model(family: str, tokenizer: PreTrainedTokenizerBase, dtype: str) -> PeftModel:
    """The base with a fresh adapter."""
    model = tiny.make_model(family, tokenizer, dtype)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,  # experts take none
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return get_peft_model(model, lora)


class StopAfter(TrainerCallback):
    """Ends the training after a step, with a checkpoint, the schedule being that of the whole."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each optimiser step."""
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def with_trainer(
    model: PeftModel, rows: TokenBlocks, folder: Path, steps: int, stop_after: int | None
) -> list[float]:
    """Trains, from the last checkpoint in `folder` where there is one. The losses of all steps so far."""
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=WARMUP,
            logging_steps=1,
            save_steps=SAVE_STEPS,
            save_total_limit=2,
            report_to="none",
            use_cpu=True,
            seed=tiny.SEED,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[StopAfter(stop_after)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Checkpoint:
    """What a plain loop has to keep, in one file that is replaced as a whole."""

    def __init__(self, folder: Path, trained: dict[str, torch.nn.Parameter], **parts: Any) -> None:
        self.file = folder / "checkpoint.pt"
        self.trained = trained
        self.parts = parts  # by name; each with state_dict and load_state_dict

    def save(self, losses: list[float]) -> None:
        """Writes the state after step `len(losses)`. A crash leaves the old file or the new one."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["adapter"] = {name: parameter.detach() for name, parameter in self.trained.items()}
        state["random"] = torch.get_rng_state()
        state["losses"] = losses
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.file)

    def load(self) -> list[float]:
        """Puts the state back, in place; the losses so far. Nothing happens where there is no checkpoint."""
        if not self.file.exists():
            return []
        state = torch.load(self.file, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["adapter"][name])
        torch.set_rng_state(state["random"])
        return state["losses"]


def in_plain_loop(
    model: PeftModel, rows: TokenBlocks, folder: Path, steps: int, stop_after: int | None
) -> list[float]:
    """The same without a Trainer."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
    checkpoint = Checkpoint(folder, trained, optimizer=optimizer, schedule=schedule)
    losses = checkpoint.load()

    model.train()
    last = steps if stop_after is None else min(steps, stop_after)
    for step in range(len(losses), last):
        loss = model(**rows.batch(rows_of_step(step, len(rows))), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % SAVE_STEPS == 0 or len(losses) == last:
            checkpoint.save(losses)
    return losses


def rows_of_step(step: int, count: int) -> torch.Tensor:
    """[BATCH]: which rows step `step` trains on; each epoch has an order of its own."""
    epoch, batch = divmod(step, count // BATCH)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(tiny.SEED + epoch))
    return order[batch * BATCH : (batch + 1) * BATCH]


def hash_of(model: PeftModel) -> str:
    """SHA-256 of the adapter's bits."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.requires_grad:
            bits.update(parameter.detach().numpy().tobytes())
    return bits.hexdigest()


LOOPS = {"trainer": with_trainer, "plain": in_plain_loop}


def main() -> None:
    """Trains in the loops asked for, each in a folder of its own."""
    parser = tiny.arguments(__doc__, steps=20, output="resumable")
    parser.add_argument("--loop", choices=LOOPS, action="append", help="default: one after the other")
    parser.add_argument(
        "--stop-after", type=tiny.at_least_1, help="step after which to stop; default: train to the end"
    )
    options = parser.parse_args()

    amx_sft_moe.register()
    tokenizer = tiny.make_tokenizer()
    rows, _ = tiny.make_rows(tokenizer)
    for name in options.loop or LOOPS:
        model = adapted_model(options.family, tokenizer, options.dtype)
        losses = LOOPS[name](model, rows, options.output / name, options.steps, options.stop_after)
        for step, loss in enumerate(losses, 1):
            tiny.say(f"{name} step {step}: loss {loss!r}")
        tiny.say(f"{name} adapter after step {len(losses)}: sha256 {hash_of(model)}")


if __name__ == "__main__":
    main()
