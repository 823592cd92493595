"""The torch module: parameters, hooks, copies, parameters that move or are replaced, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import amx_sft_moe
from amx_sft_moe import ArgumentError
from amx_sft_moe.nn import ExpertWeights, LoraFactors, SftMoeExperts, sft_moe
from cases import Sizes
from reference import FACTORS, Layer, assert_close, gradients, make_layer

SIZES = Sizes(tokens=12)


def module(layer: Layer, **options: Any) -> SftMoeExperts:
    made = SftMoeExperts(
        layer.expert_ids.shape[1],
        gate_up_proj=torch.cat([layer.gate_proj, layer.up_proj], 1),
        down_proj=layer.down_proj,
        lora_rank=4,
        lora_alpha=8,
        **options,
    )
    random = torch.Generator().manual_seed(5)
    for name in made.lora_names():
        getattr(made, name).data.normal_(generator=random, std=0.2)
    return made


def test_another_default_device() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    with torch.device("meta"):
        experts = module(layer)
    assert {parameter.device.type for parameter in experts.parameters()} == {"cpu"}
    x = layer.x.clone().requires_grad_()
    with torch.device("meta"):
        experts(x, layer.expert_ids, layer.routing_weights).backward(layer.grad_y)
    assert x.grad.isfinite().all()
    assert x.grad.any()


@pytest.mark.parametrize("shared", [False, True])
def test_module(shared: bool) -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts = module(layer, shared_lora_a=shared)
    assert {name for name, p in experts.named_parameters() if p.requires_grad} == set(experts.lora_names())
    assert len(experts.lora_names()) == (4 if shared else 6)
    x = layer.x.view(3, 4, 32).requires_grad_()
    y = experts(x, layer.expert_ids, layer.routing_weights)
    assert y.shape == x.shape
    y.backward(layer.grad_y.view(3, 4, 32))
    if shared:
        gate_b, up_b = experts.gate_up_lora_b.chunk(2, dim=1)
        a = experts.gate_up_lora_a
        factors = (a, gate_b, a, up_b, experts.down_lora_a, experts.down_lora_b)
    else:
        factors = tuple(getattr(experts, name) for name in FACTORS)
    layer.x = layer.x.detach()
    layer.factors = {name: f.detach() for name, f in zip(FACTORS, factors, strict=True)}
    exact = gradients(layer.to(torch.float64), scaling=(2.0, 2.0, 2.0))
    found = {"y": y.detach().view(12, 32), "grad_x": x.grad.view(12, 32)}
    found |= {name: getattr(experts, name).grad for name in experts.lora_names()}
    del exact["grad_routing_weights"]
    if shared:
        exact["gate_up_lora_a"] = exact.pop("gate_lora_a") + exact.pop("up_lora_a")
        exact["gate_up_lora_b"] = torch.cat([exact.pop("gate_lora_b"), exact.pop("up_lora_b")], 1)
    assert_close(found, exact, 2e-5)


def test_module_without_lora() -> None:
    layer = make_layer(SIZES)
    experts = SftMoeExperts(2, gate_proj=layer.gate_proj, up_proj=layer.up_proj, down_proj=layer.down_proj)
    assert experts.lora_names() == []
    assert experts.gate_proj.data_ptr() == layer.gate_proj.data_ptr(), "base weights are not copied"
    x = layer.x.requires_grad_()
    experts(x, layer.expert_ids, layer.routing_weights).sum().backward()
    assert x.grad is not None
    assert "lora_rank=0" in repr(experts)


def test_fresh_adapter_is_the_identity() -> None:
    layer = make_layer(SIZES)
    fused = torch.cat([layer.gate_proj, layer.up_proj], 1)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    plain = SftMoeExperts(2, gate_up_proj=fused, down_proj=layer.down_proj)(*inputs)
    for shared in (False, True):
        adapted = SftMoeExperts(
            2, gate_up_proj=fused, down_proj=layer.down_proj, lora_rank=4, shared_lora_a=shared
        )
        assert torch.equal(adapted(*inputs), plain)
        assert all(getattr(adapted, name).any() == name.endswith("_a") for name in adapted.lora_names())


def test_training_step_hooks_and_clipping() -> None:
    layer = make_layer(SIZES)
    experts = module(layer)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2)
    seen: list[str] = []
    for name in experts.lora_names():
        getattr(experts, name).register_hook(lambda grad, name=name: seen.append(name))
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    losses = []
    for _ in range(8):
        loss = (experts(*inputs).float() - layer.grad_y.float()).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(experts.parameters(), 1e9)
        assert torch.isfinite(norm)
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sorted(seen) == sorted(experts.lora_names() * 8)
    assert losses[-1] < 0.9 * losses[0]


def test_copies_and_pickles() -> None:
    layer = make_layer(SIZES)
    experts = module(layer)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    y = experts(*inputs)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(other(*inputs), y)
        other.down_proj.data.zero_()
        assert not torch.equal(other(*inputs), y), "a copy has weights of its own"
    assert torch.equal(experts(*inputs), y)
    weights = experts.experts()
    for other in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert torch.equal(sft_moe(other, *inputs), sft_moe(weights, *inputs))
    fresh = SftMoeExperts(
        2,
        gate_up_proj=torch.zeros(4, 48, 32, dtype=torch.bfloat16),
        down_proj=torch.zeros(4, 32, 24, dtype=torch.bfloat16),
        lora_rank=4,
        lora_alpha=8,
    )
    fresh.load_state_dict(experts.state_dict())
    assert torch.equal(fresh(*inputs), y)


def test_parameters_may_move() -> None:
    layer = make_layer(SIZES)
    experts = module(layer)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    y = experts(*inputs)
    for parameter in experts.parameters():  # as FSDP and .to() do it
        old = parameter.data
        parameter.data = old.clone()
        old.zero_()
    assert torch.equal(experts(*inputs), y)
    experts.down_proj = nn.Parameter(experts.down_proj.detach().clone(), requires_grad=False)
    assert torch.equal(experts(*inputs), y)
    between = experts(*inputs)
    experts.down_proj.data = experts.down_proj.data.clone()
    between.sum().backward()  # base weights may move before backward too
    experts.float()
    wide = experts(layer.x.float(), *inputs[1:])
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, y.float(), rtol=3e-2, atol=3e-2)


def test_data_of_another_kind_at_the_same_address() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts = module(layer)
    experts.reset_lora_parameters()
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    y = experts(*inputs)
    whole = experts.gate_up_proj.data
    halved = whole.view(torch.bfloat16)[..., : whole.shape[2]]
    for other in (whole[:2], halved):
        experts.gate_up_proj.data = other
        with pytest.raises((ArgumentError, TypeError), match=r"gate_up_proj|down_proj"):
            experts(*inputs)
    experts.gate_up_proj.data = whole
    assert torch.equal(experts(*inputs), y)
    experts.gate_up_proj.data = whole.as_strided(whole.shape, (0, *whole.stride()[1:]))
    expected = SftMoeExperts(
        experts.top_k, gate_up_proj=whole[:1].expand_as(whole).clone(), down_proj=experts.down_proj
    )
    assert torch.equal(experts(*inputs), expected(*inputs))


def test_replaced_parameters_are_let_go() -> None:
    layer = make_layer(SIZES)
    experts = module(layer)
    experts.reset_lora_parameters()
    experts(layer.x, layer.expert_ids, layer.routing_weights)
    old = weakref.ref(experts.down_proj)
    experts.down_proj = nn.Parameter(torch.zeros_like(experts.down_proj), requires_grad=False)
    gc.collect()
    assert old() is None, "at once, not at the next forward"
    assert not experts(layer.x, layer.expert_ids, layer.routing_weights).any()


def test_top_k_may_be_set() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts = module(layer)
    inputs = layer.x, layer.expert_ids, layer.routing_weights
    first = layer.x, layer.expert_ids[:, :1], layer.routing_weights[:, :1]
    fewer = layer.routing_weights.clone()
    fewer[:, 1:] = 0
    expected = experts(layer.x, layer.expert_ids, fewer)
    graph = torch.compile(experts, backend="aot_eager")
    graph(*inputs).backward(layer.grad_y)
    gradients = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    experts.zero_grad(set_to_none=True)
    before, in_graph = experts(*inputs), graph(*inputs)
    experts.top_k = 1
    assert_close(dict.fromkeys("ab", expected), {"a": experts(*first), "b": graph(*first)}, 1e-5)
    before.backward(layer.grad_y)  # with the routes that it was made of
    assert_close({name: experts.get_parameter(name).grad for name in gradients}, gradients, 1e-5)
    with pytest.raises(ArgumentError, match=r"^expert_ids: expected shape \[12, 1\]"):
        in_graph.backward(layer.grad_y)
    for wrong, error in ((0, ArgumentError), (1.5, TypeError)):
        with pytest.raises(error, match=r"^top_k: expected"):
            experts.top_k = wrong
    assert experts.top_k == 1


def test_an_input_without_numbers() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts = module(layer)
    inputs = {"x": layer.x, "expert_ids": layer.expert_ids, "routing_weights": layer.routing_weights}
    for name, tensor in inputs.items():
        with pytest.raises(
            ArgumentError, match=f"^{name}: expected a tensor with numbers, got one on the meta"
        ):
            experts(**(inputs | {name: tensor.to("meta")}))


def test_an_input_without_dimensions() -> None:
    layer = make_layer(SIZES)
    with pytest.raises(ArgumentError, match=r"x: expected \[\.\.\., \d+\], got shape \[\]"):
        module(layer)(torch.tensor(1.0), layer.expert_ids, layer.routing_weights)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(12, 0), ArgumentError, r"x: expected \[\.\.\., 32\], got shape \[12, 0\]"),
        (torch.zeros(24, 16), ArgumentError, r"x: expected \[\.\.\., 32\], got shape \[24, 16\]"),
        (torch.zeros(12, 32).numpy(), TypeError, r"x: expected a torch\.Tensor, got ndarray"),
        (None, TypeError, r"x: expected a torch\.Tensor, got NoneType"),
    ],
)
def test_x_that_does_not_fit(x: Any, error: type[Exception], words: str) -> None:
    layer = make_layer(SIZES)
    with pytest.raises(error, match=words):
        module(layer)(x, layer.expert_ids, layer.routing_weights)


def test_a_base_weight_that_is_gone() -> None:
    layer = make_layer(SIZES)
    experts = module(layer)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    y, down = experts(*inputs), experts.down_proj
    experts.down_proj = None
    with pytest.raises(TypeError, match=r"down_proj: expected a torch\.Tensor, got None"):
        experts(*inputs)
    experts.down_proj = down
    assert torch.equal(experts(*inputs), y)


def test_two_parameters_of_one_memory() -> None:
    """Each has its gradient, as if the other had memory of its own."""
    layer = make_layer(SIZES)
    experts = module(layer)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    found = []
    for data in (experts.gate_lora_a.data, experts.gate_lora_a.data.clone()):
        experts.zero_grad()
        experts.up_lora_a.data = data
        experts(*inputs).backward(layer.grad_y)
        found.append((experts.gate_lora_a.grad, experts.up_lora_a.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_names() -> None:
    experts = module(make_layer(SIZES), name="layers.0")
    for value, error in ((3, TypeError), (None, TypeError), ("\ud800", ArgumentError)):
        with pytest.raises(error, match="layer_name: expected"):
            experts.layer_name = value
        with pytest.raises(error, match="name: expected"):
            experts.experts().name = value
    assert experts.layer_name == experts.experts().name == "layers.0"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lora_dtype": torch.float16}, TypeError, "lora_dtype.*float16"),
        ({"lora_rank": -1}, ArgumentError, "lora_rank"),
        ({"lora_alpha": float("nan")}, ArgumentError, "lora_alpha: expected a finite number, got nan"),
        ({"lora_alpha": 1e300}, ArgumentError, r"lora_alpha: expected a finite number in float32, got 1e\+300"),
        ({"name": 3}, TypeError, "name: expected a str, got int"),
        ({"name": "\ud800"}, ArgumentError, "name: expected text that UTF-8 can encode, got '.ud800'"),
        ({"down_proj": None}, TypeError, r"down_proj: expected a torch\.Tensor, got None"),
        ({"num_threads": 4097}, ArgumentError, "num_threads: expected at most 4096, got 4097"),
        ({"top_k": 0}, ArgumentError, "top_k"),
        ({"down_proj": torch.zeros(4, 32, 23)}, ArgumentError, "gate_up_proj.*46, 32.*48, 32"),
        ({"down_proj": torch.zeros(32, 24)}, ArgumentError, "down_proj.*3 dimensions"),
        ({"gate_up_proj": None}, TypeError, "gate_proj"),
        ({"activation": "relu"}, ArgumentError, "activation"),
    ],
)
def test_module_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"top_k": 2, "gate_up_proj": torch.zeros(4, 48, 32), "down_proj": torch.zeros(4, 32, 24)}
    with pytest.raises(error, match=words):
        SftMoeExperts(**(good | options))


def test_threads_run_one_module() -> None:
    layer = make_layer(SIZES)
    experts = module(layer, num_threads=1)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    y = experts(*inputs)
    expected = torch.autograd.grad(y, list(experts.parameters())[2:], layer.grad_y)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            mine = experts(*inputs)
            grads = torch.autograd.grad(mine, list(experts.parameters())[2:], layer.grad_y)
            if not torch.equal(mine, y) or not all(map(torch.equal, grads, expected)):
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.emulated
def test_every_thread_has_the_kernel_of_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, say, amx_bf16 for bf16 and avx512 for fp32, whatever the environment says by then."""
    of = amx_sft_moe.info()["auto_kernel"]
    experts = module(make_layer(SIZES), num_threads=1)
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "abacus")

    def kernel() -> str:
        return experts.experts().operator().kernel

    for dtype in ("bfloat16", "float32", "bfloat16"):
        experts.to(getattr(torch, dtype))
        with ThreadPoolExecutor(1) as another:
            assert another.submit(kernel).result() == kernel() == of[dtype]


def test_nothing_outlives_a_module() -> None:
    layer = make_layer(SIZES)
    experts = module(layer)
    experts(layer.x, layer.expert_ids, layer.routing_weights).sum().backward()
    alive = [weakref.ref(experts), weakref.ref(experts.gate_up_proj), weakref.ref(experts.experts())]
    del experts
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs_are_refused_by_name(layout: torch.layout) -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts = module(layer)
    x = torch.nested.nested_tensor([layer.x], layout=layout)
    for call in (experts, lambda *inputs: sft_moe(experts.experts(), *inputs)):
        with pytest.raises(ArgumentError, match=r"^x: expected one tensor, got a nested one"):
            call(x, layer.expert_ids, layer.routing_weights)


def test_scalings_are_those_of_the_call() -> None:
    """A list that changes between forward and backward."""
    layer = make_layer(SIZES, dtype=torch.float32)
    weights = {name: getattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj")}
    experts = ExpertWeights(top_k=layer.expert_ids.shape[1], **weights)
    found = []
    for later in (2.0, 0.5):
        x = layer.x.clone().requires_grad_()
        scaling: Any = [1.0, 1.0, 2.0]
        lora = LoraFactors(tuple(layer.factors[name] for name in FACTORS), scaling=scaling)
        y = sft_moe(experts, x, layer.expert_ids, layer.routing_weights, lora)
        scaling[2] = later
        y.backward(layer.grad_y)
        found.append(x.grad)
    assert torch.equal(*found)
    with pytest.raises(TypeError, match=r"^LoraFactors: scaling\[2\]: expected a number, got a Tensor$"):
        LoraFactors(scaling=(1.0, 1.0, torch.tensor(2.0, requires_grad=True)))  # type: ignore[arg-type]
