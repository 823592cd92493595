"""LoRA on experts and attention with the Trainer of transformers and stock PEFT.

    python hf_trainer.py [--family olmoe] [--steps 120] [--output trained] [--device cuda]

With `--device cuda` the Trainer moves attention, router, embeddings and head to the GPU; the experts and their
adapters stay in CPU memory.

What is special to this package are the four marked lines. The experts then run in the operator, W + BA is
never built, the Trainer's logs (and TensorBoard) have the operator's phase times, and the adapter is written
one pair of matrices per expert, the layout that servers load.
"""

from __future__ import annotations

import tempfile

import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, default_data_collator

import amx_sft_moe
from amx_sft_moe.integrations import log_phase_times


def main() -> None:
    """Trains, evaluates, saves."""
    parser = tiny.arguments(__doc__, steps=120, output="hf-trainer-adapter")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all but the experts")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():  # the Trainer would train on the CPU then
        parser.error("--device cuda: expected a GPU that torch can use, got none")

    amx_sft_moe.register()  # (1) before the model is made
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(options.family, tokenizer, options.dtype)
    training, held_out = tiny.make_rows(tokenizer)

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],  # the routed experts, fused
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    if options.device != "cpu":
        amx_sft_moe.keep_experts_on_cpu(model)  # (2)

    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=scratch,
                max_steps=options.steps,
                per_device_train_batch_size=8,
                learning_rate=5e-3,
                lr_scheduler_type="cosine",
                warmup_steps=2,
                logging_steps=20,
                save_strategy="no",
                report_to="none",  # "tensorboard" shows losses and phase times over the steps
                use_cpu=options.device == "cpu",
                seed=tiny.SEED,
                disable_tqdm=True,
            ),
            train_dataset=training,
            eval_dataset=held_out,
            data_collator=default_data_collator,
            processing_class=tokenizer,
        )
        log_phase_times(trainer)  # (3)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]

    logs = [entry for entry in trainer.state.log_history if "amx_sft_moe/forward_ms" in entry]
    tiny.say(f"held-out loss: {before:.4f} before, {after:.4f} after {options.steps} steps")
    for name in ("forward_ms", "backward_ms", "share_of_step"):
        tiny.say(f"{name}: {logs[-1]['amx_sft_moe/' + name]:.3f} in the last steps")
    amx_sft_moe.adapters.save_per_expert(model, options.output)  # (4)
    tiny.say(f"adapter: {options.output}")


if __name__ == "__main__":
    main()
