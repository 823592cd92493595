"""Transposed experts: their memory is laid out once, and they stay what they were to everyone else."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from amx_sft_moe.integrations import layouts
from families import family_model, token_batch, train
from reference import one_thread

OURS = "amx_sft_moe"
NAMES = ("gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="amx_sft_moe")
    return lambda: [r.getMessage() for r in caplog.records if "laid out by rows" in r.getMessage()]


def gpt_oss(implementation: str = OURS) -> nn.Module:
    return family_model("gpt_oss", implementation, num_hidden_layers=1, layer_types=["full_attention"])


def experts_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp.experts


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(token_batch()["input_ids"]).logits


def is_by_rows(model: nn.Module) -> bool:
    return all(getattr(experts_of(model), name).stride(1) == 1 for name in NAMES)


def test_inference_tensors(log: Callable[[], list[str]], calls: list[Tensor]) -> None:
    """Of a model that is made, cast or copied in inference mode."""
    inputs = token_batch()["input_ids"]
    with torch.inference_mode():
        models = [gpt_oss(implementation) for implementation in (OURS, "eager")]
        assert experts_of(models[0]).down_proj.is_inference()
        torch.testing.assert_close(models[0](inputs).logits, models[1](inputs).logits)
        torch.testing.assert_close(copy.deepcopy(models[0])(inputs).logits, models[1](inputs).logits)
    torch.testing.assert_close(logits(models[0]), logits(models[1]))
    assert len(calls) == 3
    assert len(log()) == 2


def test_once_and_in_place(log: Callable[[], list[str]], calls: list[Tensor]) -> None:
    model, reference = gpt_oss(), gpt_oss("eager")
    experts = experts_of(model)
    parameters = [getattr(experts, name) for name in NAMES]
    before = [(id(p), p.data_ptr(), p.shape) for p in parameters]
    for _ in range(2):
        torch.testing.assert_close(logits(model), logits(reference))
    assert [(id(p), p.data_ptr(), p.shape) for p in parameters] == before, (
        "the same parameters, the same memory"
    )
    assert is_by_rows(model)
    for name in NAMES:
        assert torch.equal(getattr(experts, name), getattr(experts_of(reference), name))
    assert len(log()) == 2
    assert all(message.endswith("laid out by rows in place") for message in log())
    assert len(calls) == 2


def test_saved_copied_and_moved(tmp_path: Path, calls: list[Tensor]) -> None:
    model = gpt_oss()
    first = logits(model)
    state = model.state_dict()

    model.save_pretrained(tmp_path / "pretrained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained", experts_implementation=OURS)
    assert torch.equal(logits(again), first)
    for name, value in load_file(tmp_path / "pretrained" / "model.safetensors").items():
        assert torch.equal(value, state[name]), name

    torch.save(state, tmp_path / "state.pt")
    other = gpt_oss()
    with torch.no_grad():
        experts_of(other).gate_up_proj.zero_()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(logits(other), first)
    other.load_state_dict({name: value.clone().contiguous() for name, value in state.items()}, assign=True)
    assert torch.equal(logits(other), first)
    assert is_by_rows(other)

    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), first)
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}
    narrow = logits(twin.to(torch.bfloat16))
    torch.testing.assert_close(narrow.float(), first, rtol=0.1, atol=0.2)
    assert is_by_rows(twin)

    for name in NAMES:  # as some tools make them
        parameter = getattr(experts_of(model), name)
        parameter.data = parameter.data.contiguous()
    assert torch.equal(logits(model), first)
    assert is_by_rows(model)
    assert len(calls) == 7


def held(weight: nn.Parameter, tmp_path: Path) -> Tensor:
    return weight.detach()


def tied(weight: nn.Parameter, tmp_path: Path) -> Tensor:
    return nn.Parameter(weight.data, requires_grad=False)


def shared(weight: nn.Parameter, tmp_path: Path) -> Tensor:
    weight.share_memory_()
    return weight


def part_of_more(weight: nn.Parameter, tmp_path: Path) -> Tensor:
    more = torch.cat([weight.data.flatten(), torch.ones(3)])
    weight.data = more[:-3].view(weight.shape)
    return weight


def mapped(weight: nn.Parameter, tmp_path: Path) -> Tensor:
    path = tmp_path / "weight.bin"
    path.write_bytes(weight.detach().numpy().tobytes())
    flat = torch.from_file(str(path), shared=True, size=weight.numel())
    weight.data = flat.view(weight.shape)
    return weight


def numpys(weight: nn.Parameter, tmp_path: Path) -> Tensor:
    weight.data = torch.from_numpy(weight.detach().numpy().copy())
    return weight


@pytest.mark.parametrize("also", [held, tied, shared, part_of_more, mapped, numpys])
def test_memory_of_others_is_not_written(
    also: Callable[[nn.Parameter, Path], Tensor],
    log: Callable[[], list[str]],
    tmp_path: Path,
    calls: list[Tensor],
) -> None:
    model = gpt_oss()
    weight = experts_of(model).gate_up_proj
    other = also(weight, tmp_path)
    storage = other.untyped_storage()
    bytes_before = bytes(storage.tolist())
    torch.testing.assert_close(logits(model), logits(gpt_oss("eager")))
    assert bytes(storage.tolist()) == bytes_before
    assert is_by_rows(model)
    assert any("gate_up_proj" in message and "in new memory" in message for message in log())
    assert len(calls) == 1


def test_without_a_count_of_users_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    model = gpt_oss()
    assert not layouts._is_its_own(experts_of(model).gate_up_proj)
    torch.testing.assert_close(logits(model), logits(gpt_oss("eager")))


def test_first_call_in_inference_mode() -> None:
    model = gpt_oss()
    in_new_memory = experts_of(model).down_proj.detach()
    with torch.inference_mode():
        model(token_batch()["input_ids"])
    assert in_new_memory.data_ptr() != experts_of(model).down_proj.data_ptr()
    assert is_by_rows(model)
    for parameter in experts_of(model).parameters():
        parameter.requires_grad_()
    model.set_experts_implementation("eager")
    model(**token_batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in experts_of(model).parameters())


def test_optimiser_and_gradients_of_the_laid_out_parameter() -> None:
    """Whoever trains the weights through the default implementation sees nothing of the strides."""
    losses = []
    for lay_out in (False, True):
        model = gpt_oss("eager")
        if lay_out:
            layout = layouts.Layout(transposed=True, interleaved=True, biased=True)
            layouts.lay_out_rows("", layout, {name: getattr(experts_of(model), name) for name in NAMES})
            assert is_by_rows(model)
        for parameter in model.parameters():
            parameter.requires_grad_()
        losses.append(train(model, 3))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_gradients_of_before_are_laid_out_too() -> None:
    """A step of micro-batches through two implementations, by an optimizer that does not look at strides."""
    changes = []
    for implementations in (("eager", "eager"), ("eager", OURS)):
        model = gpt_oss()
        weights = [getattr(experts_of(model), name).requires_grad_() for name in NAMES]
        before = [weight.detach().clone() for weight in weights]
        optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
        for implementation in implementations:
            model.set_experts_implementation(implementation)
            model(**token_batch()).loss.backward()
        optimizer.step()
        changes.append([weight - old for weight, old in zip(weights, before, strict=True)])
    assert is_by_rows(model)
    for eager, ours in zip(*changes, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-5)


def test_a_call_that_falls_back_lays_nothing_out() -> None:
    model = gpt_oss()
    experts_of(model).gate_up_proj_bias = None
    x, ids, weights = torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    with pytest.raises(TypeError):  # from the default implementation, which needs the bias, too
        experts_of(model)(x, ids, weights)
    assert experts_of(model).gate_up_proj.is_contiguous()


@pytest.mark.parametrize("also", [held, shared, part_of_more])
def test_weights_that_train_in_memory_of_others_are_left_to_transformers(
    also: Callable[[nn.Parameter, Path], Tensor], tmp_path: Path, calls: list[Tensor]
) -> None:
    """Who holds that memory may be who updates it, as FSDP2 and flat buffers do."""
    model = gpt_oss()
    weight = experts_of(model).gate_up_proj
    other = also(weight, tmp_path)
    weight.requires_grad_()
    first = model(**token_batch()).loss
    first.backward()
    assert weight.grad.any()
    with torch.no_grad():
        other.sub_(0.5)
    second = model(**token_batch()).loss
    assert first != second
    eager = gpt_oss("eager")
    with torch.no_grad():
        experts_of(eager).gate_up_proj.sub_(0.5)
    torch.testing.assert_close(second, eager(**token_batch()).loss, check_stride=False)
    assert not calls
    assert weight.is_contiguous()
    assert experts_of(model).down_proj.is_contiguous()


def test_what_was_left_to_transformers_once_stays_there(calls: list[Tensor]) -> None:
    """The optimizer has made its state by then, in the strides of before."""
    losses = []
    for implementation in (OURS, "eager"):
        model = gpt_oss(implementation)
        weights = [getattr(experts_of(model), name).requires_grad_() for name in NAMES]
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
        held = model.state_dict()
        for _ in range(3):
            loss = model(**token_batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            held.clear()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not calls


def test_a_second_thread_waits_for_the_layout(monkeypatch: pytest.MonkeyPatch, calls: list[Tensor]) -> None:
    """Experts that are turned are seen through other tensors meanwhile."""
    model = gpt_oss().requires_grad_()
    expected = logits(gpt_oss("eager"))
    half_way, go_on = threading.Event(), threading.Event()
    turn = layouts._turn_in_place

    def slowly(weight: Tensor) -> None:
        alias = weight.data
        half_way.set()
        assert go_on.wait(30)
        del alias
        turn(weight)

    monkeypatch.setattr(layouts, "_turn_in_place", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(logits, model)
        assert half_way.wait(30)
        second = pool.submit(logits, model)
        time.sleep(0.3)
        assert not second.done()
        go_on.set()
        for found in (first.result(), second.result()):
            torch.testing.assert_close(found, expected)
    assert len(calls) == 2
