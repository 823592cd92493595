"""Supervised fine-tuning on questions and answers with TRL's SFTTrainer.

    pip install '.[examples]'    # in a clone of this repository
    python trl_sft.py [--family deepseek_v3] [--steps 60] [--output trained]

Only the two marked lines are special to this package: SFTTrainer adds PEFT's LoRA itself, and the experts run
in the operator.
"""

from __future__ import annotations

import tempfile

import tiny
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import amx_sft_moe


def main() -> None:
    """Trains, evaluates, saves."""
    options = tiny.arguments(__doc__, steps=60, output="trl-adapter").parse_args()

    amx_sft_moe.register()  # (1) before the model is made
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(options.family, tokenizer, options.dtype)
    # Rows of a prompt and a completion: the loss counts on the completion only.
    questions = Dataset.from_list(tiny.make_questions()).train_test_split(test_size=32, seed=tiny.SEED)

    with tempfile.TemporaryDirectory() as scratch:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=scratch,
                max_steps=options.steps,
                per_device_train_batch_size=8,
                max_length=tiny.LENGTH,
                learning_rate=5e-3,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                # SFTConfig's own defaults are True. Both work; at this size they only cost time.
                bf16=False,  # autocast; without it the base is bf16 by --dtype, and the adapter fp32 as ever
                gradient_checkpointing=False,  # less memory, a second forward
                seed=tiny.SEED,
                disable_tqdm=True,
            ),
            train_dataset=questions["train"],
            eval_dataset=questions["test"],
            processing_class=tokenizer,
            peft_config=LoraConfig(
                task_type="CAUSAL_LM",
                r=8,
                lora_alpha=16,
                target_modules=["q_proj", "o_proj"],
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            ),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]

    tiny.say(f"held-out loss: {before:.4f} before, {after:.4f} after {options.steps} steps")
    amx_sft_moe.adapters.save_per_expert(trainer.model, options.output)  # (2)
    tiny.say(f"adapter: {options.output}")


if __name__ == "__main__":
    main()
