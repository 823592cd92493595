"""What `prepare` says of a model: what trains, the traps of naming targets, and its estimates against what the
operator and autograd do hold."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import amx_sft_moe
from amx_sft_moe.autograd import LoraFactors, sft_moe
from amx_sft_moe.integrations import trained_parts, training_memory
from amx_sft_moe.integrations.preparation import Preparation
from amx_sft_moe.layer import ExpertWeights, thread_scratch
from amx_sft_moe.nn import SftMoeExperts
from models import EXPERTS, SIZES, add_lora, base_model
from peft_watch import VERSION

OURS = "amx_sft_moe"
E, H, INNER, LAYERS = (
    SIZES[name] for name in ("num_experts", "hidden_size", "moe_intermediate_size", "num_hidden_layers")
)
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
SHARED = {
    name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
}


def prepare(model: nn.Module, **options: Any) -> Preparation:
    return amx_sft_moe.prepare(model, quiet=True, **options)


def trained(found: Preparation) -> dict[str, str]:
    return {f"{part.key.group}: {part.key.target}": part.key.how for part in found.trained}


def memory(found: Preparation) -> dict[str, int]:
    return {item.name: item.bytes for item in found.memory}


def deepseek() -> PreTrainedModel:
    """A dense layer, then one with routed and shared experts."""
    config = DeepseekV3Config(
        **SHARED,
        moe_intermediate_size=INNER,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=E,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    )
    return DeepseekV3ForCausalLM(config)


def qwen2() -> PreTrainedModel:
    config = Qwen2MoeConfig(
        **SHARED, moe_intermediate_size=INNER, num_hidden_layers=2, num_experts=E, num_key_value_heads=2
    )
    return Qwen2MoeForCausalLM(config)


def gpt_oss() -> PreTrainedModel:
    """Gate and up alternate."""
    sizes = SHARED | {"intermediate_size": INNER, "num_hidden_layers": 1, "num_local_experts": E}
    config = GptOssConfig(**sizes, num_key_value_heads=2, num_experts_per_tok=2, layer_types=["full_attention"])
    model = GptOssForCausalLM(config)
    model.set_experts_implementation(OURS)
    return model


# --- what trains ---


def test_ranks_scalings_and_counts_by_projection() -> None:
    options = {"rank_pattern": {".*down_proj": 3}, "alpha_pattern": {".*down_proj": 12}, "use_rslora": False}
    model = add_lora(base_model(OURS), **options)
    found = prepare(model)
    assert trained(found) == {
        "routed experts: gate_up_proj": "LoRA r=4, scaling 2",
        "routed experts: down_proj": "LoRA r=3, scaling 4",
        "attention: q_proj": "LoRA r=4, scaling 2",
        "attention: v_proj": "LoRA r=4, scaling 2",
    }
    assert all(len(part.modules) == LAYERS for part in found.trained)
    assert found.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(part.parameters for part in found.parts) == sum(p.numel() for p in model.parameters())
    assert found.notes == ()


def test_every_part_is_named() -> None:
    model = deepseek()
    groups: dict[str, set[str]] = {}
    for part in prepare(model.requires_grad_(True)).parts:
        groups.setdefault(part.key.group, set()).add(part.key.target)
        assert part.key.how == "full"
    assert groups["routed experts"] == {"gate_up_proj", "down_proj"}
    assert groups["router"] == {"gate"}
    assert groups["shared experts"] == groups["dense MLP"] == set(PROJECTIONS)
    assert groups["embeddings and head"] == {"embed_tokens", "lm_head"}
    assert {"o_proj", "q_b_proj"} < groups["attention"]
    assert groups["other"] == {"input_layernorm", "post_attention_layernorm", "norm"}


@pytest.mark.parametrize("implementation", [OURS, "eager"])
def test_experts_elsewhere_are_told(implementation: str) -> None:
    notes = prepare(add_lora(base_model(implementation))).notes
    assert [("do not run on this library" in note) for note in notes] == (
        [] if implementation == OURS else [True]
    )


def test_all_linear_trains_the_router() -> None:
    if VERSION < (0, 20):
        pytest.skip("this PEFT leaves experts out of all-linear")
    model = get_peft_model(base_model(OURS), LoraConfig(r=4, target_modules="all-linear"))
    found = prepare(model)
    assert any(name.startswith("router") for name in trained(found))
    assert any("the router trains" in note for note in found.notes)


def test_parts_left_out_are_told() -> None:
    model = deepseek()
    model.set_experts_implementation(OURS)
    notes = prepare(get_peft_model(model, LoraConfig(target_parameters=EXPERTS[:1], target_modules=[]))).notes
    assert [note.split(":")[0] for note in notes[1:]] == ["shared experts", "dense MLP"]
    assert notes[0] == "of the routed experts down_proj does not train"
    model = add_lora(base_model(OURS), target_parameters=["layers.1." + name for name in EXPERTS])
    assert prepare(model).notes == ("routed experts train in 1 of 3 layers",)


def test_modules_to_save_and_plain_requires_grad() -> None:
    found = prepare(add_lora(base_model(OURS), modules_to_save=["lm_head"]))
    assert trained(found)["embeddings and head: lm_head"] == "full (a copy)"
    model = base_model(OURS).requires_grad_(False)
    model.model.layers[1].mlp.experts.requires_grad_(True)
    assert trained(prepare(model)) == {
        "routed experts: down_proj": "full",
        "routed experts: gate_up_proj": "full",
    }


def test_our_own_module() -> None:
    experts = SftMoeExperts(
        2,
        gate_up_proj=torch.zeros(E, 2 * INNER, H),
        down_proj=torch.zeros(E, H, INNER),
        lora_rank=4,
        lora_alpha=2,
    )
    model = nn.ModuleDict({"experts": experts, "gate": nn.Linear(H, E).requires_grad_(False)})
    found = prepare(model)
    assert trained(found) == dict.fromkeys(
        ["routed experts: down_proj", "routed experts: gate_proj", "routed experts: up_proj"],
        "LoRA r=4, scaling 0.5",
    )
    assert {part.key.group for part in found.parts} == {"routed experts", "router"}
    assert found.notes == ()


def test_our_own_module_alone() -> None:
    weights = {"gate_up_proj": torch.zeros(E, 2 * INNER, H), "down_proj": torch.zeros(E, H, INNER)}
    found = prepare(SftMoeExperts(2, **weights, lora_rank=4))
    assert {part.key.group for part in found.parts} == {"routed experts"}
    assert len(trained(found)) == 3
    assert found.notes == ()
    with pytest.raises(amx_sft_moe.ArgumentError, match=r'target_parameters=\["gate_up_proj", "down_proj"\]'):
        prepare(SftMoeExperts(2, **weights))


# --- refusals ---


def test_nothing_trains_but_the_shared_expert() -> None:
    """The trap of qwen2_moe: gate_proj and its like are modules of the shared expert only."""
    model = get_peft_model(qwen2(), LoraConfig(target_modules=r".*shared_expert\.(gate|up|down)_proj"))
    with pytest.raises(
        amx_sft_moe.ArgumentError, match=r"trains: shared experts .*experts\.gate_up_proj"
    ) as error:
        prepare(model)
    assert "of 2 layers frozen" in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: add_lora(base_model(OURS), target_parameters=None),
            r"attention \(q_proj\), attention \(v_proj\)",
        ),
        (lambda: base_model(OURS).requires_grad_(False), "what trains: nothing"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), "got Sequential without any"),
        (lambda: add_lora(base_model(OURS), inference_mode=True), "what trains: nothing"),
    ],
)
def test_no_routed_expert_trains(make: Any, message: str) -> None:
    with pytest.raises(amx_sft_moe.ArgumentError, match=message):
        prepare(make())


def test_arguments() -> None:
    model = add_lora(base_model(OURS))
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        prepare("model")
    for options, message in (
        ({"optimizer": "lion"}, "optimizer: expected one of adamw, .* got 'lion'"),
        ({"optimizer": -1}, "optimizer: expected a finite number of at least 0 .*, got -1"),
        ({"optimizer": float("inf")}, "optimizer: expected a finite number of at least 0 .*, got inf"),
        ({"optimizer": float("nan")}, "optimizer: expected a finite number of at least 0 .*, got nan"),
        ({"batch_size": 0}, "batch_size"),
        ({"sequence_length": -1}, "sequence_length"),
        ({"top_k": 0}, "top_k"),
    ):
        with pytest.raises(amx_sft_moe.ArgumentError, match=message):
            prepare(model, **options)


def test_top_k_that_nothing_tells() -> None:
    experts = base_model("eager").model.layers[0].mlp.experts
    del experts.config
    model = nn.ModuleDict({"experts": experts})
    with pytest.raises(amx_sft_moe.ArgumentError, match="top_k: expected routes per token"):
        prepare(model)
    assert memory(prepare(model, top_k=3))["workspace of the experts"] > 0


# --- output ---


def test_prints_to_where_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = add_lora(base_model(OURS))
    found = amx_sft_moe.prepare(model)
    assert capsys.readouterr().out == f"{found}\n"
    file = io.StringIO()
    amx_sft_moe.prepare(model, file=file)
    amx_sft_moe.prepare(model, quiet=True)
    assert file.getvalue() == f"{found}\n"
    assert capsys.readouterr().out == ""
    lines = str(found).splitlines()
    assert lines[0].startswith("Qwen3MoeForCausalLM: 11,136 of 66,768 parameters train")
    assert max(map(len, lines)) < 112


# --- memory ---


def test_all_but_the_experts_is_what_goes_elsewhere() -> None:
    model = add_lora(base_model(OURS, torch.bfloat16), modules_to_save=["lm_head"])
    found = memory(prepare(model))["all but the experts"]
    amx_sft_moe.keep_experts_on_cpu(model)
    model.to("meta")
    moved = [p for p in model.parameters() if p.device.type == "meta"]
    trained = sum(p.nbytes for p in moved if p.requires_grad)  # weights, gradients, two of AdamW's
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert found == sum(p.nbytes for p in moved) + 3 * trained + buffers
    plan = prepare(model)
    assert 0 < trained < found < plan.total_bytes
    beside = ("all but the experts", "logits and their gradient")
    assert plan.total_bytes == sum(size for name, size in memory(plan).items() if name not in beside)


def test_weights_gradients_and_optimizer_are_what_torch_holds() -> None:
    model = add_lora(base_model(OURS, torch.bfloat16), modules_to_save=["lm_head"])
    found = memory(prepare(model))
    of_trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in of_trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(of_trained)
    optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if t.dim() > 0]
    every = {p.data_ptr(): p.nbytes for p in model.parameters()} | {
        b.data_ptr(): b.nbytes for b in model.buffers()
    }
    assert found["weights, frozen"] + found["weights, trained"] == sum(every.values())
    assert found["gradients"] == sum(p.grad.nbytes for p in of_trained)
    assert found["optimizer state"] == sum(t.nbytes for t in states)
    assert memory(prepare(model, optimizer=6))["optimizer state"] == 6 * sum(p.numel() for p in of_trained)


class SavedBytes:
    """Bytes of distinct memory that autograd keeps for backward, but for a model's own."""

    def __init__(self, *own: torch.Tensor) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._kept: dict[int, torch.Tensor] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in self._own:
            self._kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 97])
def test_saved_activations_are_what_autograd_keeps(tokens: int, dtype: torch.dtype) -> None:
    k, r = 3, 5
    gate_up, down = torch.zeros(E, 2 * INNER, H, dtype=dtype), torch.zeros(E, H, INNER, dtype=dtype)
    factors = [
        torch.ones(s, requires_grad=True) for s in ((E, r, H), (E, 2 * INNER, r), (E, 2, INNER), (E, H, 2))
    ]
    lora = LoraFactors((*factors[:2], None, None, *factors[2:]), shared_a=True)
    experts = ExpertWeights(top_k=k, gate_up_proj=gate_up, down_proj=down)
    kept = SavedBytes(gate_up, down, *factors)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        ids = torch.randint(0, E, (tokens, k))
        sft_moe(experts, torch.ones(tokens, H, dtype=dtype), ids, torch.ones(tokens, k), lora)
    ranks = trained_parts.LoraOfExperts(gate=r, up=r, down=2)
    layer = training_memory.LayerShape(E, k, H, INNER, ranks, dtype)
    estimate = training_memory.saved_by_operator(layer, tokens)
    estimate += training_memory.inputs_kept(layer, tokens, dtype.itemsize)
    changes = 2 * 8  # how often each weight was changed
    assert kept.bytes == estimate + changes


@pytest.mark.parametrize("interleaved", [False, True])
def test_shapes_of_a_model_arrive_in_the_estimate(interleaved: bool) -> None:
    options = {"r": 5, "rank_pattern": {".*down_proj": 2}}
    model = add_lora(base_model(OURS), **options)
    layers = LAYERS
    if interleaved:
        model, layers = add_lora(gpt_oss(), **options), 1
    rows = 2 * 7 * 2
    widths = 2 * INNER + 2 * 5 + 2
    expected = layers * (rows * widths * 4 + 14 * (4 * H + 2 * 12))
    found = memory(prepare(model, batch_size=2, sequence_length=7))["saved activations of the experts"]
    assert expected <= found <= expected + layers * 5 * 31 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_workspace(dtype: torch.dtype) -> None:
    """What an operator holds after a forward and a backward."""
    experts, hidden, inner, tokens, k, r = 32, 251, 199, 503, 8, 8
    op = amx_sft_moe.SftMoe(
        num_experts=experts, top_k=k, hidden_size=hidden, intermediate_size=inner, lora_alpha=8, num_threads=1
    )
    op.set_base(
        gate_up_proj=torch.zeros(experts, 2 * inner, hidden, dtype=dtype),
        down_proj=torch.zeros(experts, hidden, inner, dtype=dtype),
    )
    op.set_lora(
        gate_up_lora_a=torch.ones(experts, r, hidden),
        gate_up_lora_b=torch.ones(experts, 2 * inner, r),
        down_lora_a=torch.ones(experts, r, inner),
        down_lora_b=torch.ones(experts, hidden, r),
    )
    x = torch.ones(tokens, hidden, dtype=dtype)
    op.forward_sft(x, torch.rand(tokens, experts).argsort(1)[:, :k].contiguous(), torch.ones(tokens, k))
    op.backward(x)
    ranks = trained_parts.LoraOfExperts(gate=r, up=r, down=r)
    layer = training_memory.LayerShape(experts, k, hidden, inner, ranks, dtype)
    assert op.memory()["workspace_bytes"] == pytest.approx(training_memory.workspace(layer, tokens), rel=0.2)


def bytes_kept_after(step: Callable[[], None]) -> int:
    step()
    with thread_scratch() as scratch:
        return sum(memory.nbytes for memory in scratch._memory.values())


@pytest.mark.parametrize("make", [lambda: base_model(OURS), gpt_oss], ids=["qwen3", "gpt_oss"])
def test_turned_factors_are_what_a_thread_keeps(make: Any) -> None:
    """PEFT's B with the expert last, and its gradients, of the largest layer."""
    model = add_lora(make(), r=5, rank_pattern={".*down_proj": 2}).train()
    ids = torch.arange(6)[None] % SHARED["vocab_size"]
    with ThreadPoolExecutor(1) as new_thread:
        kept = new_thread.submit(bytes_kept_after, lambda: model(ids).logits.sum().backward()).result()
    assert memory(prepare(model))["adapters' factors, turned"] == kept > 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" not in name)
    assert memory(prepare(model))["adapters' factors, turned"] == kept // 2, "no gradients of B"


@pytest.mark.skipif(VERSION < (0, 20), reason="this PEFT takes one adapter with target_parameters")
def test_factors_that_are_not_turned_are_not_counted() -> None:
    model = add_lora(base_model(OURS))
    assert "adapters' factors, turned" in memory(prepare(model))
    model.add_adapter("second", LoraConfig(r=3, target_parameters=EXPERTS))
    model.base_model.set_adapter(["default", "second"])
    assert "adapters' factors, turned" not in memory(prepare(model))


def test_gradient_checkpointing_keeps_one_layer() -> None:
    model = add_lora(base_model(OURS)).train()
    name = "saved activations of the experts"
    plain = memory(prepare(model))
    assert memory(prepare(model, gradient_checkpointing=True))[name] == plain[name] // LAYERS
    model.base_model.model.gradient_checkpointing_enable()
    found = memory(prepare(model))
    assert found[name] == plain[name] // LAYERS
    assert found["inputs of the checkpointed layers"] == LAYERS * 2048 * H * 4
    for layer in model.base_model.model.model.layers[1:]:  # as every_n_layers=LAYERS does
        layer.gradient_checkpointing = False
    found = memory(prepare(model))
    assert found[name] == plain[name]
    assert found["inputs of the checkpointed layers"] == 2048 * H * 4


class Own(nn.Module):
    """A module of one's own around the function, with names of one's own."""

    def __init__(self, *further: str) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 2 * INNER, H), requires_grad=False)
        self.down_proj = nn.Parameter(torch.zeros(4, H, INNER), requires_grad=False)
        for name, shape in (("gate_lora_a", (4, 3, H)), ("gate_lora_b", (4, INNER, 3))):
            setattr(self, name, nn.Parameter(torch.zeros(shape)))
        for name in further:
            setattr(self, name, nn.Parameter(torch.zeros(4, 3, H)))


def test_factors_of_a_module_of_one_s_own() -> None:
    found = prepare(nn.Sequential(Own("w1_lora_a")), top_k=2)
    names = ("gate_lora_a", "gate_lora_b", "w1_lora_a")
    assert trained(found) == {f"routed experts: {name}": "full" for name in names}


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = deepseek().to(torch.bfloat16)
        model.set_experts_implementation(OURS)
        model = get_peft_model(model, LoraConfig(r=4, target_parameters=EXPERTS, target_modules=["o_proj"]))
    found = prepare(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert found.total_bytes > sum(p.nbytes for p in model.parameters())
