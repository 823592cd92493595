"""finetune: hours of training are kept, whatever comes after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from amx_sft_moe.finetune import job, output, stages
from amx_sft_moe.finetune.options import Options
from test_finetune_families import checkpoint, options


@pytest.fixture
def wanted(tmp_path: Path) -> Options:
    return options(tmp_path, checkpoint(tmp_path / "checkpoint", "mixtral"))


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
