"""DistributedDataParallel around models whose experts stay one by one in mapped files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from amx_sft_moe import StateError
from amx_sft_moe.checkpoints import load_model
from amx_sft_moe.integrations.mapped_experts import MappedStack
from checkpoint_folders import write
from families import token_batch, with_lora
from reference import one_thread

NAMES = "_ddp_params_and_buffers_to_ignore"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", torch.float32)


def injected(folder: Path) -> nn.Module:
    """LoRA without a PeftModel around the model, as transformers' own add_adapter puts it in."""
    model = load_model(folder, progress=False)
    torch.manual_seed(1)
    lora = LoraConfig(r=3, target_modules=["o_proj"], target_parameters=BOTH, init_lora_weights=False)
    return inject_adapter_in_model(lora, model)


def peft_model(*parameters: str) -> Callable[[Path], nn.Module]:
    return lambda folder: with_lora(load_model(folder, progress=False), target_parameters=list(parameters))


MODELS = {
    "both": peft_model(*BOTH),
    "one": peft_model("experts.down_proj"),
    "attention": peft_model(),
    "injected": injected,
}


def gradients(model: nn.Module, called: nn.Module) -> dict[str, Tensor]:
    called(**token_batch(), use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MODELS)
def test_a_training_step(kind: str, folder: Path, calls: list[Tensor]) -> None:
    model, alone = MODELS[kind](folder), MODELS[kind](folder)
    found = gradients(model, DistributedDataParallel(model))
    expected = gradients(alone, alone)
    assert found.keys() == expected.keys()
    assert any("lora_" in name for name in found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    assert len(calls) == 4
    stacks = {name for name, p in model.named_parameters() if isinstance(p, MappedStack)}
    assert len(stacks) == 4
    everything = {name for name, _ in model.named_parameters()}
    assert set(getattr(model, NAMES)) & everything == stacks, "and nothing else"


def test_names_of_the_user_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(load_model(folder, progress=False))
    of_the_class = ["lm_head.weight"]
    monkeypatch.setattr(kind, NAMES, of_the_class, raising=False)
    model = load_model(folder, progress=False)
    getattr(model, NAMES).append("model.norm.weight")
    left_out = DistributedDataParallel(with_lora(model)).parameters_to_ignore
    assert {"lm_head.weight", "model.norm.weight"} < left_out
    assert of_the_class == ["lm_head.weight"]


class Around(nn.Module):
    """Knows nothing of the model in it."""

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def test_a_module_around_hands_the_names_on(folder: Path) -> None:
    """As docs/memory.md says."""
    module = Around(MODELS["both"](folder))
    with pytest.raises(StateError, match="expected a use that leaves the experts where they lie"):
        DistributedDataParallel(module)
    setattr(module, NAMES, [f"model.{name}" for name in getattr(module.model, NAMES)])
    assert gradients(module, DistributedDataParallel(module))
