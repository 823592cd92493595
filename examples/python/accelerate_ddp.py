"""Data parallel training on CPUs: several processes, each with its share of the batch, their LoRA gradients
averaged by DistributedDataParallel over gloo.

    torchrun --nproc-per-node 2 accelerate_ddp.py [--steps 20] [--batch-size 16]
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 accelerate_ddp.py     # on CPUs
    python accelerate_ddp.py                                             # one process, the same losses

`accelerate launch --cpu --num_processes 2` is a trap: without an MPI hostfile it starts one process and says
nothing. The first line that is printed here tells how many there are.

When to do this: one process per machine or per NUMA node. Within a node the operator's own threads are the
better use of the cores. What it takes beyond plain_loop.py:

Threads. Processes of one machine share its cores: each takes an equal part, in torch and in the operator.
torchrun alone would set OMP_NUM_THREADS=1.

Base weights. DDP reduces only what requires a gradient, so they cost no traffic in a step. In memory:
* Tensors that transformers finds in the file as the model wants them (same names, shapes and dtype) stay
  mapped: all processes of a machine share one copy, the page cache.
* A checkpoint with one tensor per expert, as most are, is stacked while transformers loads it: a copy in each
  process. Write it once in the fused form, `save_pretrained(folder, save_original_format=False)`, as below, and
  it is mapped.
* DDP begins by sending all parameters, frozen ones too, from the first process to the others. All write what
  comes and so copy what was mapped, each for itself. `init_sync=False` leaves that out; accelerate's `prepare`
  cannot say it, so the model is wrapped here. What must be equal is then the task of the seed, and checked
  below.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator

import psutil
import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import amx_sft_moe


def adapted_model(folder: str, dtype: str) -> PeftModel:
    """The base of `folder` with LoRA; the same in all processes."""
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), experts_implementation="amx_sft_moe", local_files_only=True
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    set_seed(tiny.SEED)  # for the adapter
    return get_peft_model(base, lora)


def mapped_weights() -> torch.Tensor:
    """[2]: megabytes of safetensors files that this process has in memory as mapped, and how much of that it
    has written and thereby copied."""
    files = [file for file in psutil.Process().memory_maps() if file.path.endswith(".safetensors")]
    return torch.tensor([sum(f.rss for f in files), sum(f.private_dirty for f in files)]) / 1e6


def require_same_adapter(accelerator: Accelerator, trained: list[torch.nn.Parameter]) -> None:
    """Raises RuntimeError where the processes' adapters differ in a single bit."""
    bits = torch.stack([parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in trained])
    everyone = accelerator.gather(bits.unsqueeze(0))  # [processes, parameters]
    if not (everyone == bits).all():
        raise RuntimeError("the adapters of the processes have come apart")


def epochs(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Its batches, epoch after epoch without an end, each in an order of its own."""
    while True:
        yield from loader


def train(accelerator: Accelerator, folder: str, options: argparse.Namespace) -> None:
    """Trains an adapter on the base of `folder` in all processes; the first one speaks and saves."""
    say = tiny.say if accelerator.is_main_process else lambda text: None
    model = adapted_model(folder, options.dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    require_same_adapter(accelerator, trained)
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
    training, _ = tiny.make_rows(AutoTokenizer.from_pretrained(folder))
    order = torch.Generator().manual_seed(tiny.SEED)
    size = options.batch_size
    loader = DataLoader(training, batch_size=size, shuffle=True, drop_last=True, generator=order)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    parallel = DistributedDataParallel(model, init_sync=False) if accelerator.num_processes > 1 else model

    if len(loader) == 0:
        raise ValueError(f"--batch-size: expected at most {len(training)}, the rows there are, got {size}")

    for step, batch in zip(range(1, options.steps + 1), epochs(loader), strict=False):
        loss = parallel(**batch, use_cache=False).loss
        accelerator.backward(loss)  # DDP averages the gradients meanwhile
        norm = accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        say(f"step {step}: loss {mean:.7f}, gradient norm {norm:.7f}")

    require_same_adapter(accelerator, trained)
    for process, (mapped, copied) in enumerate(accelerator.gather(mapped_weights().unsqueeze(0)).tolist()):
        say(f"base weights in process {process}: {mapped:.3f} MB mapped, {copied:.3f} MB of them copied")
    if accelerator.is_main_process:
        amx_sft_moe.adapters.save_per_expert(model, options.output)
    say(f"adapter: {options.output}")


def main() -> None:
    """Starts what the processes have in common and lets them train."""
    parser = tiny.arguments(__doc__, steps=20, output="ddp-adapter")
    parser.add_argument(
        "--batch-size", type=tiny.at_least_1, default=16, help="of all processes together; default: 16"
    )
    parser.add_argument("--threads", type=int, help="of each process; default: an equal part of the cores")
    options = parser.parse_args()

    # split_batches: --batch-size is that of all processes together.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    threads = options.threads or max(len(os.sched_getaffinity(0)) // local_processes, 1)
    torch.set_num_threads(threads)
    amx_sft_moe.register(num_threads=threads)

    with tempfile.TemporaryDirectory() as scratch:
        if accelerator.is_main_process:
            tiny.say(f"processes: {accelerator.num_processes}, threads of each: {threads}")
            tokenizer = tiny.make_tokenizer()
            tokenizer.save_pretrained(scratch)
            base = tiny.make_model(options.family, tokenizer, options.dtype)
            base.save_pretrained(scratch, save_original_format=False)  # fused, so that it can be mapped
        [folder] = broadcast_object_list([scratch])
        train(accelerator, folder, options)
        accelerator.wait_for_everyone()  # before the first process removes the folder
    accelerator.end_training()


if __name__ == "__main__":
    main()
