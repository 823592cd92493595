"""The autograd function and the module: gradients, what is computed and saved, hooks, copies, moved
parameters."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import amx_sft_moe
from amx_sft_moe import ArgumentError
from amx_sft_moe.nn import ExpertWeights, LoraFactors, SftMoeExperts, sft_moe
from cases import SHAPES, Sizes
from reference import FACTORS, Layer, assert_close, forward, gradients, make_layer

SIZES = Sizes(tokens=12)


def frozen(layer: Layer, **options: Any) -> ExpertWeights:
    return ExpertWeights(
        top_k=layer.expert_ids.shape[1],
        gate_proj=layer.gate_proj,
        up_proj=layer.up_proj,
        down_proj=layer.down_proj,
        **options,
    )


def leaves_of(layer: Layer) -> dict[str, Tensor]:
    found = {"grad_x": layer.x, "grad_routing_weights": layer.routing_weights}
    found |= {name: factor for name, factor in layer.factors.items() if factor is not None}
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in found.items()}


def call(experts: ExpertWeights, layer: Layer, leaves: dict[str, Tensor]) -> Tensor:
    lora = LoraFactors(tuple(leaves.get(name) for name in FACTORS))
    return sft_moe(experts, leaves["grad_x"], layer.expert_ids, leaves["grad_routing_weights"], lora)


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_gradients(bf16_kernel: str, sizes: Sizes) -> None:
    layer = make_layer(sizes)
    leaves = leaves_of(layer)
    y = call(frozen(layer, kernel=bf16_kernel), layer, leaves)
    y.backward(layer.grad_y)
    found = {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
    assert_close(found, gradients(layer.to(torch.float64)), 2e-2)


@pytest.mark.filterwarnings("ignore:.*double precision")
def test_gradcheck() -> None:
    layer = make_layer(
        Sizes(experts=3, hidden=5, intermediate=4, ranks=(2, 1, 2), tokens=3), dtype=torch.float32
    )
    experts = frozen(layer, num_threads=1)
    leaves = leaves_of(layer)

    def function(*values: Tensor) -> Tensor:
        return call(experts, layer, dict(zip(leaves, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()), eps=1e-2, atol=5e-3, rtol=2e-2)


def test_only_what_is_needed() -> None:
    layer = make_layer(SIZES)
    experts = frozen(layer)
    all_leaves = leaves_of(layer)
    expected = dict(
        zip(
            all_leaves,
            torch.autograd.grad(call(experts, layer, all_leaves).sum(), all_leaves.values()),
            strict=True,
        )
    )
    for name in all_leaves:
        leaves = {other: leaf.detach().clone() for other, leaf in all_leaves.items()}
        leaves[name].requires_grad_()
        call(experts, layer, leaves).sum().backward()
        assert all((leaf.grad is not None) == (other == name) for other, leaf in leaves.items())
        assert torch.equal(leaves[name].grad, expected[name]), name


def test_expanded_and_transposed_tensors() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts, leaves = frozen(layer), leaves_of(layer)
    y = call(experts, layer, leaves)
    (expected,) = torch.autograd.grad(y, leaves["grad_x"], torch.ones_like(y), retain_graph=True)
    assert torch.equal(torch.autograd.grad(y.sum(), leaves["grad_x"])[0], expected)
    transposed = leaves["grad_x"].detach().t().contiguous().t().requires_grad_()
    other = call(experts, layer, leaves | {"grad_x": transposed})
    assert torch.equal(other, y)
    (grad,) = torch.autograd.grad(other.t().contiguous().t().sum(), transposed)
    assert torch.equal(grad, expected)


def test_factors_with_the_expert_last() -> None:
    """PEFT's layout of B; the copies on the way there and back change nothing, and the gradient needs no
    other."""
    layer = make_layer(Sizes(experts=5, ranks=(3, 3, 1), tokens=12))
    experts, leaves = frozen(layer), leaves_of(layer)
    expected = torch.autograd.grad(call(experts, layer, leaves), leaves.values(), layer.grad_y)
    stored = {
        name: leaf.detach().permute(1, 2, 0).contiguous().requires_grad_() if name in FACTORS else leaf
        for name, leaf in leaves.items()
    }
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        seen = {name: leaf.permute(2, 0, 1) if name in FACTORS else leaf for name, leaf in stored.items()}
        y = call(experts, layer, seen)
    assert {leaf.data_ptr() for leaf in stored.values()} <= set(saved), "parameters are saved, not copies"
    with torch.no_grad():
        assert torch.equal(call(experts, layer, seen), y)
    y.backward(layer.grad_y)
    for (name, leaf), grad in zip(stored.items(), expected, strict=True):
        assert leaf.grad.is_contiguous()
        assert torch.equal(leaf.grad.permute(2, 0, 1) if name in FACTORS else leaf.grad, grad), name


def test_no_tokens() -> None:
    layer = make_layer(Sizes(tokens=0))
    leaves = leaves_of(layer)
    call(frozen(layer), layer, leaves).sum().backward()  # an expanded gradient without elements
    assert leaves["grad_x"].grad.shape == (0, 32)
    assert not any(leaves[name].grad.any() for name in FACTORS)


def test_one_tensor_twice() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    leaves = leaves_of(layer)
    leaves["up_lora_a"] = leaves["gate_lora_a"]  # a shared A given as two inputs
    call(frozen(layer), layer, leaves).backward(layer.grad_y)
    layer.factors["up_lora_a"] = layer.factors["gate_lora_a"]
    exact = gradients(layer.to(torch.float64))
    assert_close(
        {"gate_lora_a": leaves["gate_lora_a"].grad},
        {"gate_lora_a": exact["gate_lora_a"] + exact["up_lora_a"]},
        2e-5,
    )
    # Turned on its way it is still one: a sum of two gradients would be rounded in another place.
    last = leaves["gate_lora_a"].detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
    call(frozen(layer), layer, leaves | {"gate_lora_a": last, "up_lora_a": last}).backward(layer.grad_y)
    assert torch.equal(last.grad, leaves["gate_lora_a"].grad)


def test_a_layer_used_twice() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts, leaves = frozen(layer), leaves_of(layer)
    once = call(experts, layer, leaves)
    twice = call(experts, layer, leaves | {"grad_x": torch.tanh(once)})
    twice.backward(layer.grad_y)

    wide = layer.to(torch.float64)
    wide_leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}

    def exact(x: Tensor) -> Tensor:
        wide.x, wide.routing_weights = x, wide_leaves["grad_routing_weights"]
        wide.factors = {name: wide_leaves[name] for name in FACTORS}
        return forward(wide)

    exact(torch.tanh(exact(wide_leaves["grad_x"]))).backward(layer.grad_y.double())
    assert_close(
        {name: leaf.grad for name, leaf in leaves.items()},
        {name: leaf.grad for name, leaf in wide_leaves.items()},
        5e-5,
    )


def test_retained_graph_and_second_derivative() -> None:
    layer = make_layer(SIZES)
    experts, leaves = frozen(layer), leaves_of(layer)
    loss = call(experts, layer, leaves).float().sum()
    first = torch.autograd.grad(loss, leaves.values(), retain_graph=True)
    second = torch.autograd.grad(loss, leaves.values())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    (grad,) = torch.autograd.grad(
        call(experts, layer, leaves).float().square().sum(), leaves["grad_x"], create_graph=True
    )
    with pytest.raises(RuntimeError, match="expected one derivative"):
        grad.sum().backward()


def test_gradient_penalty_is_refused() -> None:
    """There grad_y requires no gradient, but what the first derivative depends on does."""
    layer = make_layer(SIZES)
    experts, leaves = frozen(layer), leaves_of(layer)
    y = call(experts, layer, leaves)
    grads = torch.autograd.grad(y.sum(), leaves.values(), create_graph=True)
    expected = torch.autograd.grad(call(experts, layer, leaves).sum(), leaves.values())
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    for grad in grads:
        with pytest.raises(RuntimeError, match="expected one derivative"):
            (y.sum() + grad.pow(2).sum()).backward(retain_graph=True)


def test_forward_mode_is_refused() -> None:
    layer = make_layer(SIZES)
    experts = frozen(layer)
    with forward_ad.dual_level():
        assert sft_moe(experts, layer.x, layer.expert_ids, layer.routing_weights).shape == layer.x.shape
        x = forward_ad.make_dual(layer.x, torch.ones_like(layer.x))
        with pytest.raises(ArgumentError, match=r"expected inputs without tangents.*\[12, "):
            sft_moe(experts, x, layer.expert_ids, layer.routing_weights)


def test_change_between_forward_and_backward_is_noticed() -> None:
    layer = make_layer(SIZES)
    leaves = leaves_of(layer)
    y = call(frozen(layer), layer, leaves)
    with torch.no_grad():
        leaves["gate_lora_a"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.grad_y)


def test_no_grad_saves_nothing() -> None:
    layer = make_layer(SIZES)
    experts, leaves = frozen(layer), leaves_of(layer)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            quiet = call(experts, layer, leaves)
        assert not saved
        assert not quiet.requires_grad
        detached = call(experts, layer, {name: leaf.detach() for name, leaf in leaves.items()})
        assert not saved
        assert not detached.requires_grad
        y = call(experts, layer, leaves)
        assert saved
    assert torch.equal(y, quiet)
    assert torch.equal(y, detached)
    with torch.inference_mode():
        assert torch.equal(call(experts, layer, leaves), y)


def test_saved_tensors_can_leave_memory() -> None:
    layer = make_layer(SIZES)
    experts, leaves = frozen(layer), leaves_of(layer)
    expected = torch.autograd.grad(call(experts, layer, leaves), leaves.values(), layer.grad_y)

    def unpack(file: io.BytesIO) -> Tensor:
        file.seek(0)
        return torch.load(file)

    def pack(tensor: Tensor) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(tensor, file)
        return file

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = call(experts, layer, leaves)
    found = torch.autograd.grad(y, leaves.values(), layer.grad_y)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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


def test_an_input_without_dimensions() -> None:
    layer = make_layer(SIZES)
    with pytest.raises(ArgumentError, match=r"x: expected \[\.\.\., \d+\], got shape \[\]"):
        module(layer)(torch.tensor(1.0), layer.expert_ids, layer.routing_weights)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lora_dtype": torch.float16}, TypeError, "lora_dtype.*float16"),
        ({"lora_rank": -1}, ArgumentError, "lora_rank"),
        ({"lora_alpha": float("nan")}, ArgumentError, "lora_alpha: expected a finite number, got nan"),
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
