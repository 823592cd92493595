"""finetune: hours of training are kept, whatever comes after them."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from amx_sft_moe.finetune import adapter, cli, job, model, output, stages
from amx_sft_moe.finetune.errors import FinetuneError
from amx_sft_moe.finetune.options import OURS, Options
from test_finetune_families import checkpoint, options
from test_finetune_output import earlier_run


@pytest.fixture
def wanted(tmp_path: Path) -> Options:
    return options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))


@pytest.mark.parametrize("of_ones_own", [True, False], ids=["the adapter", "the model that is made"])
def test_a_disk_without_room_is_refused_before_training(
    of_ones_own: bool, wanted: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(number: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, number))

    def trained(*arguments: object, **options: object) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(stages, "train", trained)
    if not of_ones_own:
        wanted = replace(wanted, model=None)
    what = "the adapter" if of_ones_own else "the model that is made"
    free(0)
    with pytest.raises(
        FinetuneError, match=rf"--output .*/out: expected .* bytes .* {what}, got 0$"
    ) as refused:
        job.run(wanted)
    needed = int(re.search(r"expected ([0-9,]+) bytes", str(refused.value))[1].replace(",", ""))
    free(needed - 1)
    with pytest.raises(FinetuneError, match=f"expected {needed:,} bytes of free space .*, got {needed - 1:,}$"):
        job.run(wanted)
    free(needed)
    with pytest.raises(AssertionError, match="training has begun"):
        job.run(wanted)
    # A file system that does not tell.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    with pytest.raises(AssertionError, match="training has begun"):
        job.run(wanted)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_room_that_an_adapter_takes(family: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint", family)
    bare = model.load_model(folder, torch.bfloat16, torch.bfloat16, OURS)
    adapted = model.add_adapter(bare, 2, 4.0, 0)
    (tmp_path / "adapter").mkdir()
    fused = adapter.save_adapter(adapted, tmp_path / "adapter", folder)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    shared = sum(tensor.nbytes for name, tensor in tensors.items() if "base_layer.lora_A" in name)
    assert bool(fused) == bool(shared) == (family == "gpt_oss")
    written = sum(tensor.nbytes for tensor in tensors.values())
    assert adapter.saved_bytes(adapted) == written + shared  # fused it stands there once


def written_before_it_was_read_back(folder: Path) -> bool:
    """Whether all is there but the times, and tells of the new adapter that stock PEFT has not read it yet."""
    assert {path.name for path in folder.iterdir()} == {"adapter", *output.REPORTS} - {output.TIMES}
    metrics = json.loads((folder / output.METRICS).read_text())
    size = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
    assert (metrics["adapter"]["bytes"], metrics["adapter"]["stock_loss"]) == (size, None)
    said = "Not read back by stock PEFT: this was written before it was tried.\n"
    return said in (folder / output.REPORT).read_text()


def test_reports_are_there_before_it_is_read_back(wanted: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory the run may be killed meanwhile, which nothing can catch."""

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages.adapter, "stock_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        job.run(wanted)
    assert written_before_it_was_read_back(wanted.output)
    monkeypatch.undo()
    assert job.run(wanted).adapter.stock_skipped == ""
    assert "Not read back" not in (wanted.output / output.REPORT).read_text()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_it_is_put_in_its_place_waits_for_the_reports(
    wanted: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier_run(wanted.output)
    for name in ("base-model", "todo"):
        (wanted.output / name).rename(wanted.output.parent / name)
    sync, synced = output.sync, []

    def interrupted(file: Path) -> None:
        if not synced:
            signal.raise_signal(signal.SIGINT)
        synced.append(file)
        sync(file)

    monkeypatch.setattr(output, "sync", interrupted)
    monkeypatch.setattr(cli, "parse", lambda argv: wanted)
    assert cli.main([]) == 130
    assert written_before_it_was_read_back(wanted.output)


def test_batches_for_which_memory_is_short_do_not_cost_the_adapter(
    wanted: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(stages.comparison, "batches", no_memory)
    found = job.run(replace(wanted, compare_steps=1))
    assert set(found.failed) == {"the comparison", output.TIMES}
    assert {path.name for path in wanted.output.iterdir()} == {"adapter", *output.REPORTS} - {output.TIMES}


def test_what_cannot_be_said_of_a_model_is_noticed_before_training(
    wanted: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*arguments: object) -> None:
        raise LookupError("of a family that nobody tried")

    def trained(*arguments: object, **options: object) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(job.model, "expert_sizes", unknown)
    monkeypatch.setattr(stages, "train", trained)
    with pytest.raises(LookupError, match="nobody tried"):
        job.run(wanted)
