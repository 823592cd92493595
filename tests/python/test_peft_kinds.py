"""Every way PEFT stores and switches LoRA on fused experts: against PEFT's own W + BA and transformers' eager
experts.

Runs with every PEFT from 0.18 on: what a version cannot do is skipped, by what it says itself.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.integrations import peft as transformers_peft

from amx_sft_moe.autograd import LoraFactors, sft_moe
from amx_sft_moe.integrations import adapters_in_use
from amx_sft_moe.integrations.adapters_in_use import ActiveAdapters, NotUnderstoodError
from amx_sft_moe.layer import ExpertWeights
from models import EXPERTS, SIZES, add_lora, base_model, batch, loss_and_gradients
from peft_watch import (
    EXPECTED_VERSION,
    VERSION,
    LargeTensors,
    experts_of,
    factors_in_proxies,
    factors_in_use,
    wrappers_of,
)
from reference import assert_close

OURS = "amx_sft_moe"
E, H, INNER = SIZES["num_experts"], SIZES["hidden_size"], SIZES["moe_intermediate_size"]
BY_MODULES = {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "target_parameters": None}


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    loss, grads = loss_and_gradients(model)
    return {"loss": loss} | grads


def two_adapters(implementation: str) -> PeftModel:
    if VERSION < (0, 20):
        pytest.skip("this PEFT takes one adapter with target_parameters")
    return add_lora(add_lora(base_model(implementation)), seed=5, name="second", r=3, lora_alpha=12)


def gpt_oss(intermediate_size: int = INNER, num_experts: int = E) -> PreTrainedModel:
    """Parameters [E, in, out], gate and up interleaved."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")}
    torch.manual_seed(0)
    config = GptOssConfig(
        **sizes,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_key_value_heads=2,
        num_local_experts=num_experts,
        num_experts_per_tok=min(2, num_experts),
        layer_types=["full_attention"],
    )
    return GptOssForCausalLM(config)


def test_this_is_the_version_that_was_asked_for() -> None:
    assert peft.__version__ == EXPECTED_VERSION


# --- the factors as they are read ---


def weights_of(experts: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [E, I, H] and down [E, H, I] from whatever the module's layout is."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if experts.is_concatenated:
        return (*gate_up.chunk(2, dim=1), down)
    return gate_up[:, 0::2], gate_up[:, 1::2], down


def reference(experts: nn.Module, outermost: nn.Module, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """SiLU experts on W + BA as PEFT itself computes BA, each token's routes weighted 1."""
    changed = {}
    for wrapper in wrappers_of(outermost):
        deltas = [wrapper.get_delta_weight(a) for a in wrapper.active_adapters if a in wrapper.lora_A]
        changed[wrapper.parameter_name] = wrapper.get_param().detach() + sum(deltas)
    whole = nn.Module()
    whole.is_transposed, whole.is_concatenated = experts.is_transposed, experts.is_concatenated
    whole.gate_up_proj = changed.get("gate_up_proj", experts.gate_up_proj.detach())
    whole.down_proj = changed.get("down_proj", experts.down_proj.detach())
    gate, up, down = (weight[ids] for weight in weights_of(whole))  # [T, k, rows, cols]
    h = nn.functional.silu(torch.einsum("tkih,th->tki", gate, x)) * torch.einsum("tkih,th->tki", up, x)
    return torch.einsum("tkhi,tki->th", down, h)


def ours(experts: nn.Module, lora: LoraFactors, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    gate, up, down = (weight.detach().contiguous() for weight in weights_of(experts))
    frozen = ExpertWeights(top_k=ids.shape[1], gate_proj=gate, up_proj=up, down_proj=down)
    return sft_moe(frozen, x, ids, torch.ones(ids.shape), lora)


KINDS = {
    "experts [E, out, in]": lambda: add_lora(base_model("eager")),
    "rank 1": lambda: add_lora(base_model("eager"), r=1),
    "rank pattern": lambda: add_lora(
        base_model("eager"), rank_pattern={".*gate_up_proj": 7}, alpha_pattern={".*down_proj": 3}
    ),
    "rslora": lambda: add_lora(base_model("eager"), use_rslora=True),
    "H equals I": lambda: add_lora(base_model("eager", moe_intermediate_size=H)),
    "gate_up only": lambda: add_lora(base_model("eager"), target_parameters=EXPERTS[:1]),
    "transposed, interleaved": lambda: add_lora(gpt_oss()),
    "transposed, H equals I": lambda: add_lora(gpt_oss(H)),
    "transposed, rank 1": lambda: add_lora(gpt_oss(), r=1),
    "transposed, one expert": lambda: add_lora(gpt_oss(H, num_experts=1), target_parameters=EXPERTS[1:]),
    "two adapters": lambda: two_adapters("eager"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_factors_are_what_peft_adds(kind: str) -> None:
    model = KINDS[kind]()
    if kind == "two adapters":
        model.base_model.set_adapter(["default", "second"])
    outermost = experts_of(model)
    experts = outermost.get_base_layer()
    random = torch.Generator().manual_seed(3)
    x = torch.randn(11, H, generator=random)
    ids = torch.rand(11, experts.down_proj.shape[0], generator=random).argsort(1)[:, :2].contiguous()
    grad_y = torch.randn(11, H, generator=random)
    found = []
    ways = [
        lambda: reference(experts, outermost, x, ids),
        lambda: ours(experts, factors_in_use(outermost), x, ids),
    ]
    if VERSION >= (0, 21) and kind not in ("two adapters", "transposed, one expert"):
        ways.append(lambda: ours(experts, factors_in_proxies(outermost), x, ids))
    for run in ways:
        model.zero_grad()
        y = run()
        y.backward(grad_y)
        found.append({"y": y} | {n: p.grad.clone() for n, p in outermost.named_parameters() if "lora_" in n})
    assert len(found[0]) == 1 + 2 * len(wrappers_of(outermost)) * (2 if kind == "two adapters" else 1)
    for other in found[1:]:
        assert_close(other, found[0], 1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two adapters"])
def test_one_adapter_is_read_in_place(kind: str) -> None:
    outermost = experts_of(KINDS[kind]())
    parameters = {p.untyped_storage().data_ptr() for n, p in outermost.named_parameters() if "lora_" in n}
    factors = [factor for factor in factors_in_use(outermost).factors if factor is not None]
    assert {factor.untyped_storage().data_ptr() for factor in factors} == parameters


@pytest.mark.parametrize("order", ["erc", "rce", "cre", "ecr", "rec", "cer"])
@pytest.mark.parametrize("rank", [1, 3])
def test_factors_in_any_order_of_memory(order: str, rank: int) -> None:
    """Gradients arrive in the parameter's own order, which torch then need not copy."""
    random = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(E, 2 * INNER, H, generator=random), torch.randn(E, H, INNER, generator=random)
    experts = ExpertWeights(top_k=2, gate_up_proj=gate_up, down_proj=down)
    shapes = [(E, rank, H), (E, 2 * INNER, rank), (E, rank, INNER), (E, H, rank)]
    factors = [torch.randn(shape, generator=random) for shape in shapes]
    x, ids = torch.randn(7, H, generator=random), torch.randint(0, E, (7, 2), generator=random)
    to, back = (tuple(a.index(c) for c in b) for a, b in (("erc", order), (order, "erc")))
    found = []
    for axes, inverse in (((0, 1, 2), (0, 1, 2)), (to, back)):
        stored = [factor.permute(axes).contiguous().requires_grad_() for factor in factors]
        seen = [parameter.permute(inverse) for parameter in stored]
        lora = LoraFactors((*seen[:2], None, None, *seen[2:]), shared_a=True)
        sft_moe(experts, x, ids, torch.ones(7, 2), lora).square().sum().backward()
        assert all(parameter.grad.is_contiguous() for parameter in stored)
        found.append([parameter.grad.permute(inverse) for parameter in stored])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_factors_of_another_model_do_not_fit() -> None:
    model = add_lora(base_model("eager"))
    wrapper = experts_of(model)
    wrapper.lora_A["default"].weight = nn.Parameter(torch.zeros(4 * E, INNER + 1))
    with pytest.raises(NotUnderstoodError, match=r"down_proj \[6, 32, 24\]"):
        factors_in_use(wrapper)


# --- whole models ---


@pytest.mark.parametrize("adapters", [1, 2])
def test_nothing_of_the_size_of_the_weights_is_made(adapters: int) -> None:
    seen = {}
    for implementation in ("grouped_mm", OURS):
        model = two_adapters(implementation) if adapters == 2 else add_lora(base_model(implementation))
        if adapters == 2:
            model.base_model.set_adapter(["default", "second"])
        with LargeTensors(E * H * INNER, model) as mode:
            loss_and_gradients(model)
        seen[implementation] = mode.seen
    assert seen[OURS] == []
    assert len(seen["grouped_mm"]) >= 3 * 4, "W + BA and its gradient, which stock PEFT does make"


def test_targets_by_module_names() -> None:
    if VERSION < (0, 19):
        pytest.skip("this PEFT does not know that experts became fused parameters")
    expected, found = (add_lora(base_model(kind), **BY_MODULES) for kind in ("eager", OURS))
    factors = factors_in_use(experts_of(found))
    assert [factors.factors[i].shape[1] for i in (0, 4)] == [8, 4]
    assert factors.scaling == (2.0, 2.0, 2.0)
    assert_close(results(found), results(expected), 1e-4)


def test_one_expert() -> None:
    options = {"num_experts": 1, "num_experts_per_tok": 1}
    models = [add_lora(base_model(kind, **options)) for kind in ("eager", OURS)]
    if experts_of(models[0]).in_features != INNER:
        pytest.skip("this PEFT (0.18, 0.19.0) adds B A of one expert in the wrong orientation, and fails")
    expected, found = map(results, models)
    assert factors_in_use(experts_of(models[1])).factors[0].shape == (1, 4, H)
    assert sum(".experts." in name for name in found) == 3 * 4
    assert_close(found, expected, 1e-4)


@pytest.mark.emulated
def test_adapters_in_bf16(calls: list[Any]) -> None:
    models = [add_lora(base_model(kind, torch.bfloat16, num_experts_per_tok=E)) for kind in ("eager", OURS)]
    for model in models:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.bfloat16()
    exact = results(add_lora(base_model("eager", torch.bfloat16, num_experts_per_tok=E)).double())
    found = [results(model) for model in models]
    assert len(calls) == 3
    for name, value in exact.items():
        eager, own = ((one[name].double() - value).norm() / value.norm() for one in found)
        assert found[1][name].dtype == found[0][name].dtype
        assert own <= 1.5 * eager + 1e-3, name


def test_beside_modules_to_save(calls: list[Any]) -> None:
    expected, found = (add_lora(base_model(kind), modules_to_save=["lm_head"]) for kind in ("eager", OURS))
    found, expected = results(found), results(expected)
    assert len(calls) == 3
    assert any("modules_to_save" in name for name in found)
    assert_close(found, expected, 1e-4)


def test_adapters_of_transformers_itself(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """``model.add_adapter``: the same wrappers, no PeftModel around."""
    if VERSION < (0, 20):
        pytest.skip("transformers wants peft 0.20")
    # From 5.24 on it asks for 0.22, which is newer than what we allow; the adapters are the same.
    monkeypatch.setattr(transformers_peft, "MIN_PEFT_VERSION", "0.20.0")
    models = []
    for implementation in ("eager", OURS):
        model = base_model(implementation)
        torch.manual_seed(7)
        model.add_adapter(
            LoraConfig(r=4, init_lora_weights=False, target_parameters=EXPERTS, target_modules=[])
        )
        models.append(model)
    expected, found = map(results, models)
    assert len(calls) == 3
    assert sum("lora" in name for name in found) == 12
    assert_close(found, expected, 1e-4)


# --- adapters that change ---


@pytest.fixture
def pair() -> tuple[PeftModel, PeftModel]:
    """The same adapted model through transformers' loop and through ours."""
    return add_lora(base_model("eager")), add_lora(base_model(OURS))


def test_merging_moves_what_the_hook_reads(pair: tuple[PeftModel, PeftModel], calls: list[Any]) -> None:
    """Right after each change: merged in place, unmerged, merged into new memory, unmerged, merged away."""

    def same() -> None:
        before = len(calls)
        expected, found = map(results, pair) if grads else ({"y": logits(model)} for model in pair)
        assert len(calls) == before + 3
        assert_close(found, expected, 1e-4)

    def logits(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(batch()["input_ids"]).logits

    grads = True
    same()
    for options in ({}, {"safe_merge": True}):
        grads = False
        pointers = [p.data_ptr() for p in experts_of(pair[1]).get_base_layer()._parameters.values()]
        for model in pair:
            model.merge_adapter(**options)
        moved = [p.data_ptr() for p in experts_of(pair[1]).get_base_layer()._parameters.values()]
        assert (moved != pointers) == bool(options)
        same()
        for model in pair:
            model.unmerge_adapter()
        grads = True
        same()
    pair = tuple(model.merge_and_unload() for model in pair)
    grads = False
    same()


def test_disabling_scaling_and_base_weights_in_new_memory(
    pair: tuple[PeftModel, PeftModel], calls: list[Any]
) -> None:
    found = results(pair[1])
    for change in ("disabled", "scaled", "moved", "scaled back"):
        rows = []
        for model in pair:
            for layer in range(3):
                outermost = experts_of(model, layer)
                for wrapper in wrappers_of(outermost):
                    if change == "scaled":
                        wrapper.scale_layer(1.7)
                    elif change == "scaled back":
                        wrapper.unscale_layer()
                    elif change == "moved":
                        wrapper.get_param().data = wrapper.get_param().data * 1.25
            if change == "disabled":
                with torch.no_grad(), model.disable_adapter():
                    rows.append({"loss": model(**batch()).loss})
            else:
                rows.append(results(model))
        assert_close(rows[1], rows[0], 1e-4)
        assert rows[1]["loss"] != found["loss"]
        found = rows[1]
    assert len(calls) == 3 * 5


def test_adapters_come_and_go(calls: list[Any]) -> None:
    models = [two_adapters(kind) for kind in ("eager", OURS)]
    losses = []
    for change in ("add", "switch", "both", "delete", "add again"):
        rows = []
        for model in models:
            if change == "switch":
                model.set_adapter("second")
            elif change == "both":
                model.base_model.set_adapter(["default", "second"])
            elif change == "delete":
                model.delete_adapter("default")
            elif change == "add again":
                add_lora(model, seed=9, name="default", r=5)
                model.base_model.set_adapter(["second", "default"])
            rows.append(results(model))
        # Two orders of summation in fp32, and gradients of the attention below that amplify the difference.
        assert_close(rows[1], rows[0], 1e-4)
        losses.append(rows[1]["loss"].item())
    assert len(set(losses)) == 4, "after the deletion only the second is left"
    assert losses[1] == pytest.approx(losses[3], rel=1e-6)
    assert len(calls) == 3 * 5


def test_interrupted_on_the_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the call has begun: the module is as it was, and a graph may be traced of it."""

    class Interrupted:
        def get(self) -> tuple[()]:
            return ()

        def set(self, adapters: object) -> None:
            raise KeyboardInterrupt

    module = nn.Module()
    adapters = ActiveAdapters(module, "weight", list, nullcontext)
    monkeypatch.setattr(adapters_in_use, "active", Interrupted())
    with pytest.raises(KeyboardInterrupt), adapters_in_use.in_use(adapters):
        pytest.fail("not interrupted")
    monkeypatch.undo()
    assert adapters_in_use.traced_on(module) == []
    with adapters_in_use.in_use(adapters):
        assert adapters_in_use.active_on(module) == [adapters]
        assert adapters_in_use.traced_on(module) is None
    assert adapters_in_use.active_on(module) == adapters_in_use.traced_on(module) == []
