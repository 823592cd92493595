"""PEFT's LoRA on fused experts through the hook: losses and all gradients against PEFT's own way."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

import amx_sft_moe
from amx_sft_moe.integrations import experts_hook, peft_lora
from models import EXPERTS, add_lora, base_model, batch, loss_and_gradients
from peft_watch import VERSION, without_our_place_in_peft
from reference import assert_close, relative_error

OURS = "amx_sft_moe"


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every evaluation of W + BA, as PEFT and torch do it."""
    seen: list[str] = []
    original = nn.utils.parametrize.ParametrizationList.forward

    def counted(self: nn.Module) -> torch.Tensor:
        seen.append("parametrization")
        return original(self)

    monkeypatch.setattr(nn.utils.parametrize.ParametrizationList, "forward", counted)
    return seen


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The LoRA factors of every call that reached the operator."""
    seen: list[Any] = []
    original = experts_hook.sft_moe

    def counted(experts: Any, x: Any, ids: Any, weights: Any, lora: Any, *rest: Any) -> torch.Tensor:
        seen.append(lora)
        return original(experts, x, ids, weights, lora, *rest)

    monkeypatch.setattr(experts_hook, "sft_moe", counted)
    return seen


def results(model: nn.Module, **inputs: Any) -> dict[str, torch.Tensor]:
    loss, grads = loss_and_gradients(model, **inputs)
    return {"loss": loss} | grads


def test_loss_and_every_gradient(reached: list[Any], dense: list[str]) -> None:
    expected = results(add_lora(base_model("eager")))
    assert dense
    dense.clear()
    found = results(add_lora(base_model(OURS)))
    assert len(reached) == 3
    assert not dense, "W + BA was built"
    assert sum(".experts." in name for name in found) == 3 * 4
    assert_close(found, expected, 1e-5)


@pytest.mark.emulated
def test_bf16_model_with_fp32_factors(reached: list[Any]) -> None:
    # All experts take part: rounding then decides about no route.
    def model(kind: str) -> PeftModel:
        return add_lora(base_model(kind, torch.bfloat16, num_experts_per_tok=6))

    exact = results(model("eager").double())
    found = {kind: results(model(kind)) for kind in ("eager", OURS)}
    assert {factor.dtype for lora in reached for factor in lora.factors if factor is not None} == {
        torch.float32
    }
    for name, value in exact.items():
        ours, eager = (relative_error(found[kind][name], value) for kind in (OURS, "eager"))
        assert ours <= 1.5 * eager + 1e-3, name


def test_other_peft_versions(reached: list[Any], dense: list[str]) -> None:
    expected = results(add_lora(base_model(OURS)))
    assert not dense
    with without_our_place_in_peft():
        found = results(add_lora(base_model(OURS)))
    if VERSION >= (0, 21):
        assert len(reached) == 6
        assert len(dense) == 3 * 2, "PEFT evaluates each weight once; the hook does not"
        assert_close(found, expected, 1e-6)
    else:  # PEFT gives W + BA and nothing else, which the hook leaves to transformers
        assert len(reached) == 3
        assert_close(found, expected, 1e-4)


def test_untested_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with without_our_place_in_peft():
        monkeypatch.setattr(peft, "__version__", "0.99.1")
        for _ in range(2):
            assert not peft_lora.install(experts_hook.is_ours)
        assert len(caplog.records) == 1
        assert "0.18, 0.19, 0.20, 0.21" in caplog.text
        monkeypatch.setattr(peft, "__version__", "0.21.2.dev0")
        original = ParamWrapper._activate_lora
        assert peft_lora.install(experts_hook.is_ours)
        assert getattr(ParamWrapper._activate_lora, peft_lora._MARK) is original
        assert peft_lora.install(experts_hook.is_ours), "twice is once"
        assert getattr(ParamWrapper._activate_lora, peft_lora._MARK) is original


@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": EXPERTS[:1]},
        {"target_parameters": EXPERTS[1:]},
        {"target_modules": []},
        {"use_rslora": True},
        {"rank_pattern": {".*experts.down_proj": 2}, "alpha_pattern": {".*experts.down_proj": 5}},
        {"r": 1, "lora_alpha": 3},
    ],
    ids=str,
)
def test_kinds_of_adapters(options: dict[str, Any], reached: list[Any], dense: list[str]) -> None:
    expected = results(add_lora(base_model("eager"), **options))
    dense.clear()
    found = results(add_lora(base_model(OURS), **options))
    assert len(reached) == 3
    assert not dense
    # Two orders of summation in fp32, and gradients of the attention below that amplify the difference.
    assert_close(found, expected, 1e-4)


def test_several_adapters(reached: list[Any], dense: list[str]) -> None:
    if VERSION < (0, 20):
        pytest.skip("this PEFT takes one adapter with target_parameters")

    def two(implementation: str) -> PeftModel:
        model = add_lora(base_model(implementation))
        return add_lora(model, seed=5, name="second", r=3, lora_alpha=12)

    models = [two("eager"), two(OURS)]
    for active in (["default"], ["second"], ["default", "second"]):
        found = []
        for model in models:
            model.base_model.set_adapter(active)
            found.append(results(model))
            dense.clear() if model is models[0] else None
        assert not dense
        assert_close(found[1], found[0], 1e-5)
        assert any(name.endswith(f".{active[-1]}.weight") for name in found[1])
    assert {lora.factors[0].shape[1] for lora in reached} == {3, 4, 7}
    reached.clear()
    with without_our_place_in_peft():  # PEFT then gives a dense sum, which the hook leaves to transformers
        assert_close(results(models[1]), found[0], 1e-5)
    assert not reached


def test_disabled_merged_and_unmerged(reached: list[Any]) -> None:
    model, eager = add_lora(base_model(OURS)).eval(), add_lora(base_model("eager")).eval()
    inputs = batch()["input_ids"]
    with torch.no_grad():
        adapted = model(inputs).logits
        torch.testing.assert_close(adapted, eager(inputs).logits, rtol=1e-4, atol=1e-5)
        with model.disable_adapter():
            plain = model(inputs).logits
        assert all(factor is None for factor in reached[-1].factors)
        assert torch.equal(plain, base_model(OURS)(inputs).logits)
        model.merge_adapter()
        torch.testing.assert_close(model(inputs).logits, adapted, rtol=1e-4, atol=1e-4)
        assert all(factor is None for factor in reached[-1].factors)
        model.unmerge_adapter()
        torch.testing.assert_close(model(inputs).logits, adapted, rtol=1e-4, atol=1e-4)
        merged = copy.deepcopy(model).merge_and_unload()
        torch.testing.assert_close(merged(inputs).logits, adapted, rtol=1e-4, atol=1e-4)
        unloaded = copy.deepcopy(model).unload()
        torch.testing.assert_close(unloaded(inputs).logits, plain, rtol=1e-4, atol=1e-4)


def without_and_with_checkpointing(reentrant: bool) -> list[dict[str, torch.Tensor]]:
    found = []
    for checkpointing in (False, True):
        model = add_lora(base_model(OURS)).train()
        if checkpointing:
            model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        found.append(results(model))
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, reached: list[Any], dense: list[str]) -> None:
    plain, checkpointed = without_and_with_checkpointing(reentrant)
    assert len(reached) == 3 + 6
    assert not dense
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


@pytest.mark.skipif(VERSION < (0, 21), reason="older PEFT gives W + BA, which is left to transformers")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_with_peft_left_alone(reentrant: bool, reached: list[Any]) -> None:
    """PEFT's own parametrizations come and go with each forward, the second one of checkpointing too."""
    with without_our_place_in_peft():
        plain, checkpointed = without_and_with_checkpointing(reentrant)
    assert len(reached) == 3 + 6
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_autocast(reached: list[Any]) -> None:
    losses = []
    for implementation in ("grouped_mm", OURS):
        model = add_lora(base_model(implementation, torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            found = results(model)
        assert all(torch.isfinite(value).all() for value in found.values())
        losses.append(found["loss"])
    assert len(reached) == 3
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-2)


def test_first_layer_needs_no_gradient_of_x() -> None:
    """Only the last layer's experts are adapted: x and routing weights of the layer below require none."""
    options = {"target_modules": [], "layers_to_transform": None}
    target = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    expected = results(add_lora(base_model("eager"), target_parameters=target, **options))
    found = results(add_lora(base_model(OURS), target_parameters=target, **options))
    assert sum("lora" in name for name in found) == 4
    assert_close(found, expected, 1e-5)


def test_training_through_the_trainer(tmp_path: Any, reached: list[Any], dense: list[str]) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{key: value[0] for key, value in batch(1, 16, seed).items()} for seed in range(4)]
    losses = {}
    for implementation in ("grouped_mm", OURS):
        dense.clear()
        model = add_lora(base_model(implementation))
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            max_grad_norm=0.5,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses[implementation] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert not dense
    assert len(reached) == 3 * 12
    assert losses[OURS] == pytest.approx(losses["grouped_mm"], rel=1e-3)
    assert losses[OURS][-1] < losses[OURS][0]


def test_experts_that_the_hook_cannot_take(reached: list[Any]) -> None:
    """The default implementation runs, with the adapters in their place."""
    models = [add_lora(base_model(kind)) for kind in ("grouped_mm", OURS)]
    for model in models:
        model.base_model.model.model.layers[0].mlp.experts.get_base_layer().act_fn = nn.ReLU()
    found = [results(model) for model in models]
    assert len(reached) == 2
    assert_close(found[1], found[0], 1e-5)


def test_lora_is_never_silently_left_out() -> None:
    model = add_lora(base_model(OURS)).eval()
    experts = model.base_model.model.model.layers[1].mlp.experts.get_base_layer()
    experts._hf_hook = None  # says: accelerate's wrapper, which calls the class's forward
    experts.forward = lambda x, ids, weights: torch.zeros_like(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="without their LoRA adapters"):
        model(**batch())
    del experts._hf_hook, experts.forward
    with torch.no_grad():
        model(**batch())


def test_forward_of_an_instance_is_respected(dense: list[str]) -> None:
    model = add_lora(base_model(OURS)).eval()
    experts = model.base_model.model.model.layers[1].mlp.experts.get_base_layer()
    seen: list[torch.Tensor] = []
    experts.forward = lambda x, ids, weights: seen.append(experts.down_proj) or torch.zeros_like(x)
    with torch.no_grad():
        model(**batch())
    assert not torch.equal(seen[0], experts.down_proj), "PEFT's own W + BA, as this forward expects it"


def test_generation(reached: list[Any]) -> None:
    texts = []
    for implementation in ("eager", OURS):
        model = add_lora(base_model(implementation)).eval()
        texts.append(
            model.generate(
                input_ids=batch()["input_ids"][:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(texts[0], texts[1])
    assert len(reached) == 3 * 6


def test_register_without_peft() -> None:
    amx_sft_moe.register("without_peft", peft=False)
    assert hasattr(ParamWrapper._activate_lora, peft_lora._MARK), "nothing was taken back"
    found = results(add_lora(base_model("without_peft")))
    assert_close(found, results(add_lora(base_model("eager"))), 1e-5)
