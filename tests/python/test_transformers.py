"""The transformers hook: Qwen3-MoE against the eager experts, and what it leaves to the default
implementation."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import amx_sft_moe
from amx_sft_moe import ArgumentError, KernelError
from amx_sft_moe.integrations import experts_hook
from cases import kernels
from families import family_model, token_batch
from models import base_model, batch, loss_and_gradients
from reference import assert_close, relative_error

OURS = "amx_sft_moe"


@pytest.fixture
def warnings_of_hook(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    for hook in experts_hook._hooks.values():
        hook._warned.clear()
    caplog.set_level(logging.WARNING, logger="amx_sft_moe")
    return caplog


def freeze_experts(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_every_gradient(dtype: torch.dtype, calls: list[torch.Tensor]) -> None:
    # In bf16 all experts take part: rounding then decides about no route.
    changes = {} if dtype == torch.float32 else {"num_experts_per_tok": 6}
    found = {}
    for implementation in ("eager", "grouped_mm", OURS):
        model = freeze_experts(base_model(implementation, dtype, **changes))
        loss, grads = loss_and_gradients(model)
        found[implementation] = {"loss": loss} | grads
    assert len(calls) == 3
    assert all(x.dtype == dtype for x in calls)
    assert any("mlp.gate" in name for name in found[OURS]), "the router trains through its weights"
    if dtype == torch.float32:
        assert_close(found[OURS], found["eager"], 1e-5)
    else:
        exact_model = freeze_experts(base_model("eager", dtype, **changes)).double()
        exact_loss, exact = loss_and_gradients(exact_model)
        exact = {"loss": exact_loss} | exact
        for name, value in exact.items():  # as near to the truth as eager bf16, with room for chance
            ours, eager = (relative_error(found[kind][name], value) for kind in (OURS, "eager"))
            assert ours <= 1.5 * eager + 1e-3, name


def test_evaluation_and_generation(calls: list[torch.Tensor]) -> None:
    texts = []
    for implementation in ("eager", OURS):
        model = base_model(implementation).eval()
        with torch.no_grad():
            logits = model(batch()["input_ids"]).logits
            text = model.generate(
                batch()["input_ids"][:, :4], max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        texts.append((logits, text))
    assert len(calls) == 3 * 9
    torch.testing.assert_close(texts[1][0], texts[0][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(texts[1][1], texts[0][1])


def test_from_config(calls: list[torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    config = base_model("eager").config
    model = AutoModelForCausalLM.from_config(config, experts_implementation=OURS)
    with torch.no_grad():
        model(batch()["input_ids"])
    assert len(calls) == 3


def test_from_pretrained(calls: list[torch.Tensor], tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    saved = base_model(OURS, torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation=OURS)
    assert model.config._experts_implementation == OURS
    x, weights = torch.randn(9, 32, dtype=torch.bfloat16), torch.rand(9, 2)
    ids = torch.randint(0, 6, (9, 2))
    with torch.no_grad():
        for loaded, layer in zip(model.model.layers, saved.model.layers, strict=True):
            assert torch.equal(loaded.mlp.experts(x, ids, weights), layer.mlp.experts(x, ids, weights))
        assert torch.isfinite(model(**batch()).loss)
    assert len(calls) == 3 * 2 + 3


def test_autocast(calls: list[torch.Tensor]) -> None:
    """x arrives in fp32 while weights are bf16 (or fp32), and y goes back in fp32."""
    for dtype in (torch.float32, torch.bfloat16):
        losses = []
        for implementation in ("grouped_mm", OURS):
            model = freeze_experts(base_model(implementation, torch.float32))
            for layer in model.model.layers:
                layer.mlp.experts.to(dtype)
            with torch.autocast("cpu", torch.bfloat16):
                loss, grads = loss_and_gradients(model)
            assert all(torch.isfinite(grad).all() for grad in grads.values())
            losses.append(loss)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-2)
    assert len(calls) == 6
    assert all(x.dtype == torch.float32 for x in calls)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: list[torch.Tensor]) -> None:
    found = []
    for checkpointing in (False, True):
        model = freeze_experts(base_model(OURS)).train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss, grads = loss_and_gradients(model)
        found.append({"loss": loss} | grads)
    assert len(calls) == 3 + 6
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def relu(experts: nn.Module) -> None:
    experts.act_fn = nn.ReLU()


def subclass(experts: nn.Module) -> None:
    experts.act_fn = type("Doubled", (nn.SiLU,), {"forward": lambda self, x: 2 * nn.functional.silu(x)})()


def flag(name: str, value: bool) -> Any:
    return lambda experts: setattr(experts, name, value)


def half(experts: nn.Module) -> None:
    experts.half()


def mixed(experts: nn.Module) -> None:
    experts.down_proj.data = experts.down_proj.data.bfloat16()


def post_norm(experts: nn.Module) -> None:
    experts.has_post_expert_norm = True
    experts.post_expert_norm = nn.LayerNorm(32)


def other_gate(experts: nn.Module) -> None:
    base = type(experts)
    experts.__class__ = type("OtherGate", (base,), {"_apply_gate": lambda self, x: x.chunk(2, -1)[0].tanh()})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (relu, "with act_fn ReLU that computes something else"),
        (subclass, "with act_fn Doubled that computes something else"),
        (other_gate, "overridden _apply_gate"),
        (post_norm, "has_post_expert_norm=False, got True"),
        (half, "float16"),
    ],
)
def test_what_is_not_understood_falls_back(
    change: Any, words: str, calls: list[torch.Tensor], warnings_of_hook: pytest.LogCaptureFixture
) -> None:
    results = []
    for implementation in ("grouped_mm", OURS):
        model = base_model(implementation).eval()
        torch.manual_seed(3)
        change(model.model.layers[1].mlp.experts)
        with torch.no_grad():
            for _ in range(2):
                results.append(model(batch()["input_ids"]).logits)
    assert torch.allclose(results[0], results[2], rtol=1e-4, atol=1e-4)
    assert len(calls) == 4, "the other layers are not affected"
    assert len(warnings_of_hook.records) == 1, "one warning, not one a call"
    assert words in warnings_of_hook.records[0].getMessage()


class PassedOverError(Exception):
    pass


@pytest.mark.parametrize(
    "change",
    [
        flag("has_bias", True),  # and no biases
        flag("is_transposed", True),
        flag("is_concatenated", False),
        flag("has_gate", False),
        mixed,
    ],
)
def test_other_layouts_are_left_alone(
    change: Any, calls: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def default(*arguments: Any) -> torch.Tensor:
        raise PassedOverError

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", default)
    experts = base_model(OURS).model.layers[0].mlp.experts
    change(experts)
    inputs = torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    with torch.no_grad(), pytest.raises(PassedOverError):
        experts(*inputs)
    assert not calls


def test_expert_parallel_sentinels_are_skipped() -> None:
    experts = base_model(OURS).model.layers[0].mlp.experts
    x, weights = torch.randn(4, 32), torch.rand(4, 2)
    ids = torch.tensor([[0, 6], [6, 6], [5, 2], [1, 3]])
    with torch.no_grad():
        found = experts(x, ids, weights)
        masked = experts(x, ids.clamp(max=5), weights.masked_fill(ids == 6, 0))
    torch.testing.assert_close(found, masked)
    assert not found[1].any()


def test_options(calls: list[torch.Tensor]) -> None:
    with pytest.raises(KernelError, match="abacus"):
        amx_sft_moe.register(kernel="abacus")
    with pytest.raises(ArgumentError, match="num_threads"):
        amx_sft_moe.register(num_threads=0)
    for name, error, words in (
        (3, TypeError, "int"),
        (None, TypeError, "NoneType"),
        ("", ArgumentError, "empty"),
    ):
        with pytest.raises(error, match=f"^name: expected .* got .*{words}"):
            amx_sft_moe.register(name)
    logits = {}
    for kernel in kernels("float32"):
        name = f"ours_{kernel}"
        amx_sft_moe.register(name, kernel=kernel, num_threads=1)
        model = base_model(name)
        with torch.no_grad():
            logits[kernel] = model(batch()["input_ids"]).logits
        experts = model.model.layers[0].mlp.experts
        assert experts_hook._hooks[name]._layers[experts].experts.operator().kernel == kernel
    assert len(calls) == 3 * len(logits)
    for found in logits.values():
        torch.testing.assert_close(found, logits["portable"], rtol=1e-4, atol=1e-5)


def test_one_operator_per_layer_that_dies_with_the_model(calls: list[torch.Tensor]) -> None:
    model = base_model(OURS)
    hook = experts_hook._hooks[OURS]
    gc.collect()
    before = len(hook._layers)
    with torch.no_grad():
        model(**batch())
        operators = [hook._layers[layer.mlp.experts].experts.operator() for layer in model.model.layers]
        model(**batch(rows=1, length=30))
    assert [hook._layers[layer.mlp.experts].experts.operator() for layer in model.model.layers] == operators
    assert len(hook._layers) == before + 3
    assert len({op.memory()["workspace_bytes"] for op in operators}) == 1, "one workspace for all layers"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(**batch()).logits, model(**batch()).logits)
    weights = weakref.ref(model.model.layers[0].mlp.experts.gate_up_proj)
    calls.clear()
    del model, twin, operators
    gc.collect()
    assert len(hook._layers) == before
    assert weights() is None


def test_weights_may_be_replaced_and_moved() -> None:
    model = base_model(OURS)
    with torch.no_grad():
        first = model(**batch()).logits
        other = base_model(OURS, seed=7)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(**batch()).logits, other(**batch()).logits)
        model.load_state_dict(base_model(OURS).state_dict(), assign=True)
        assert torch.equal(model(**batch()).logits, first)
        model.bfloat16()
        torch.testing.assert_close(model(**batch()).logits.float(), first, rtol=0.1, atol=0.1)


def memory_held(model: nn.Module) -> int:
    """Bytes that the hook keeps for the model's experts beyond their parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    layers = experts_hook._hooks[OURS]._layers
    held = {}
    for module in model.modules():
        for weight in layers[module].experts.weights.values() if module in layers else ():
            held[weight.untyped_storage().data_ptr()] = weight.untyped_storage().nbytes()
    return sum(held[pointer] for pointer in held.keys() - own)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_memory_that_parameters_had_is_given_back(
    family: str, warnings_of_hook: pytest.LogCaptureFixture
) -> None:
    """Where the operator has views of them, and cannot take what they have become."""
    model = family_model(family, OURS)
    with torch.no_grad():
        model(**token_batch())
        model.bfloat16()(**token_batch())
        assert memory_held(model) == 0
        model.half()(**token_batch())
    assert memory_held(model) == 0
    assert "float16" in warnings_of_hook.text


def test_weights_that_accelerate_offloads_are_not_kept(tmp_path: Path) -> None:
    model = base_model(OURS).eval()
    with torch.no_grad():
        expected = model(**batch()).logits
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        for _ in range(2):
            assert torch.equal(model(**batch()).logits, expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert memory_held(model) == 0


def test_data_of_another_shape_at_the_same_address() -> None:
    model = base_model(OURS)
    with torch.no_grad():
        first = model(**batch()).logits
        down = model.model.layers[0].mlp.experts.down_proj
        data = down.data
        down.data = data[:1]
        with pytest.raises(Exception, match=r"down_proj|shape|size|index"):
            model(**batch())
        down.data = data
        assert torch.equal(model(**batch()).logits, first)


def test_two_models_in_two_threads() -> None:
    models = [base_model(OURS, seed=seed).eval() for seed in (0, 1)]
    with torch.no_grad():
        expected = [model(**batch()).logits for model in models]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(models[i](**batch()).logits, expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_threads_that_meet_after_weights_have_moved():
    """Both find what was made from the old ones; the slower one finds it gone."""
    model = family_model("qwen3_moe", "amx_sft_moe").eval()
    expected = model(**token_batch()).logits
    experts = model.model.layers[0].mlp.experts
    hook = experts_hook._hooks["amx_sft_moe"]

    class TakenByAnother(weakref.WeakKeyDictionary):
        def get(self, key, default=None):
            return self.pop(key, default)

    before = hook._layers
    experts.down_proj.data = experts.down_proj.data.clone()
    try:
        hook._layers = TakenByAnother(before)
        assert torch.equal(model(**token_batch()).logits, expected)
    finally:
        hook._layers = before
