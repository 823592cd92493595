"""LoRA on experts and attention in a plain PyTorch loop: AdamW, gradient accumulation, clipping, and at the end
where the time went inside the operator.

    python plain_loop.py [--steps 60] [--accumulation 2] [--gradient-checkpointing]

`AMX_SFT_MOE_TIMER=text python plain_loop.py` prints the same names for each pass of each layer instead.
"""

from __future__ import annotations

import time
from collections import Counter

import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

import amx_sft_moe
from amx_sft_moe.finetune.packing import TokenBlocks
from amx_sft_moe.layer import collect_times, take_times


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: TokenBlocks) -> float:
    """Loss in nats per token."""
    model.eval()
    loss = model(**rows.tensors(), use_cache=False).loss.item()
    model.train()
    return loss


def say_times(steps: int) -> None:
    """What all layers' passes took since `collect_times(True)`, by published name, per optimiser step."""
    groups, phases, inside = Counter(), Counter(), Counter()
    for forward, backward in take_times():  # of each layer
        for totals in (forward, backward):
            groups.update(totals["groups"])
            phases.update(totals["phases"])
            inside.update({name: totals[name] for name in ("total_ms", "busy_ms", "waiting_ms")})
    for title, times in (("groups", groups), ("phases", phases)):
        tiny.say(f"{title}, ms per step:")
        for name, ms in times.items():
            tiny.say(f"  {name}: {ms / steps:.3f}")
    waiting = inside["waiting_ms"] / (inside["busy_ms"] + inside["waiting_ms"])
    tiny.say(f"operator: {inside['total_ms'] / steps:.3f} ms per step, threads waiting {waiting:.0%} of it")


def main() -> None:
    """Trains, evaluates, saves."""
    parser = tiny.arguments(__doc__, steps=60, output="plain-loop-adapter")
    parser.add_argument(
        "--accumulation", type=tiny.at_least_1, default=2, help="batches per step; default: %(default)s"
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a second forward")
    options = parser.parse_args()

    amx_sft_moe.register()  # before the model is made
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(options.family, tokenizer, options.dtype)
    training, held_out = tiny.make_rows(tokenizer)

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(model, lora)
    if options.gradient_checkpointing:
        # Reentrant checkpointing works as well; it also needs model.enable_input_require_grads().
        model.gradient_checkpointing_enable({"use_reentrant": False})

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, options.steps)
    order = torch.Generator().manual_seed(tiny.SEED)
    loader = DataLoader(training, batch_size=8, shuffle=True, drop_last=True, generator=order)
    batches = iter(loader)

    before = evaluate(model, held_out)
    collect_times(True)
    take_times()  # from zero
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        total = 0.0
        for _ in range(options.accumulation):
            if (batch := next(batches, None)) is None:  # the next epoch
                batches = iter(loader)
                batch = next(batches)
            # All rows predict the same number of tokens, so the mean over batches is the mean over tokens.
            loss = model(**batch, use_cache=False).loss / options.accumulation
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == options.steps:
            tiny.say(f"step {step}: loss {total:.4f}, gradient norm {norm:.3f}")
    seconds = time.perf_counter() - began
    say_times(options.steps)
    collect_times(False)
    tiny.say(f"step: {seconds / options.steps * 1e3:.1f} ms")

    after = evaluate(model, held_out)
    tiny.say(f"held-out loss: {before:.4f} before, {after:.4f} after {options.steps} steps")
    amx_sft_moe.adapters.save_per_expert(model, options.output)
    tiny.say(f"adapter: {options.output}")


if __name__ == "__main__":
    main()
