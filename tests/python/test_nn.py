"""The autograd function: gradients, what is computed and saved, what is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from amx_sft_moe import ArgumentError, StateError, autograd
from amx_sft_moe.nn import ExpertBiases, ExpertWeights, LoraFactors, sft_moe
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


def test_expanded_transposed_and_negated_tensors() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts, leaves = frozen(layer), leaves_of(layer)
    y = call(experts, layer, leaves)
    (expected,) = torch.autograd.grad(y, leaves["grad_x"], torch.ones_like(y), retain_graph=True)
    assert torch.equal(torch.autograd.grad(y.sum(), leaves["grad_x"], retain_graph=True)[0], expected)
    negated = torch._neg_view(-torch.ones_like(y))  # when it is read; within a graph nobody can resolve that
    assert torch.equal(torch.autograd.grad(y, leaves["grad_x"], negated)[0], expected)
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
    # Turned on its way, or as two views, it is still one: a sum of two gradients would be rounded elsewhere.
    last = leaves["gate_lora_a"].detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
    call(frozen(layer), layer, leaves | {"gate_lora_a": last, "up_lora_a": last}).backward(layer.grad_y)
    assert torch.equal(last.grad, leaves["gate_lora_a"].grad)
    seen = leaves["gate_lora_a"].detach().requires_grad_()
    views = {"gate_lora_a": seen[:], "up_lora_a": seen.view(seen.shape)}
    call(frozen(layer), layer, leaves | views).backward(layer.grad_y)
    assert torch.equal(seen.grad, leaves["gate_lora_a"].grad)


def another_of(a: Tensor, kind: str) -> Tensor:
    """The memory of ``a`` as a tensor that is another one to autograd."""
    if kind == "another storage":
        return torch.from_numpy(a.detach().numpy()).requires_grad_()
    return a.detach().requires_grad_(kind != "up detached")


@pytest.mark.parametrize("expert_last", [False, True])
@pytest.mark.parametrize("kind", ["gate detached", "up detached", "two leaves", "another storage"])
def test_two_tensors_of_one_memory(kind: str, expert_last: bool) -> None:
    """Each has its gradient, as if the other had memory of its own."""
    layer = make_layer(SIZES, dtype=torch.float32)
    experts, leaves = frozen(layer), leaves_of(layer)
    gate = leaves["gate_lora_a"].detach()
    if expert_last:
        gate = gate.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    gate.requires_grad_(kind != "gate detached")
    up = another_of(gate, kind)
    copied = up.detach().clone().requires_grad_(up.requires_grad)
    found = []
    for second in (up, copied):
        call(experts, layer, leaves | {"gate_lora_a": gate, "up_lora_a": second}).backward(layer.grad_y)
        found.append((gate.grad, second.grad))
        gate.grad = None
    for tensor, grad, expected in zip((gate, up), *found, strict=True):
        assert (grad is not None) == tensor.requires_grad
        assert grad is None or torch.equal(grad, expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["x", "expert_ids", "routing_weights"])
def test_inputs_that_are_no_tensors(name: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    experts = frozen(layer)
    ran: list[Any] = []
    monkeypatch.setattr(autograd, "run_forward", lambda *call, **options: ran.append(call))
    inputs = {"x": layer.x, "expert_ids": layer.expert_ids, "routing_weights": layer.routing_weights}
    for value, kind in ((inputs[name].numpy(), "ndarray"), (None, "NoneType")):
        with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=rf"{name}: .*Tensor, got {kind}"):
            sft_moe(experts, **(inputs | {name: value}))
    assert not ran, "refused before anything is computed"


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
    # Autograd goes no other way then than to what is named.
    for leaf in leaves.values():
        with pytest.raises(RuntimeError, match="expected one derivative"):
            torch.autograd.grad(y.sum() + grads[0].pow(2).sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one derivative"):
        torch.autograd.functional.hessian(
            lambda x: sft_moe(experts, x, layer.expert_ids, layer.routing_weights).float().sum(),
            layer.x.detach(),
        )


def test_gradient_penalty_is_refused_behind_a_checkpoint() -> None:
    """Which lets nobody ask for saved tensors twice."""
    layer = make_layer(SIZES)
    experts, leaves = frozen(layer), leaves_of(layer)

    def block(x: Tensor) -> Tensor:
        return call(experts, layer, {**leaves, "grad_x": x})

    x = leaves["grad_x"]
    (grad,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(grad, expected)
    with pytest.raises(RuntimeError, match="expected one derivative"):
        torch.autograd.grad(grad.pow(2).sum(), leaves["gate_lora_a"])


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


def test_saved_activations_that_a_hook_spreads_are_refused() -> None:
    layer = make_layer(SIZES)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: torch.stack([t, t], 1)[:, 0] if t.dim() == 1 else t
    ):
        y = call(frozen(layer), layer, leaves_of(layer))
    with pytest.raises(ArgumentError, match=r"saved activations: expected adjacent elements .* got stride 2"):
        y.backward(layer.grad_y)


@pytest.mark.parametrize("trained", [False, True])
def test_changed_weights_are_noticed_where_hooks_keep_copies(trained: bool) -> None:
    """The operator reads the weights where they are, not what a hook on saved tensors kept of them."""
    layer = make_layer(SIZES)
    experts, leaves = frozen(layer), leaves_of(layer)
    layer.down_proj.requires_grad_(trained)
    for change in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            y = call(experts, layer, leaves)
        if not change:
            y.backward(layer.grad_y)
            continue
        with torch.no_grad():
            layer.down_proj.mul_(2)
        with pytest.raises(StateError, match="backward: expected base weights as they were in the forward"):
            y.backward(layer.grad_y)


def test_changed_matrices_are_noticed() -> None:
    """Of weights as one matrix per expert autograd knows nothing."""
    layer = make_layer(SIZES)
    experts = ExpertWeights(
        top_k=layer.expert_ids.shape[1],
        gate_proj=layer.gate_proj,
        up_proj=layer.up_proj,
        down_proj=[matrix.clone() for matrix in layer.down_proj],
    )
    call(experts, layer, leaves_of(layer)).backward(layer.grad_y)
    y = call(experts, layer, leaves_of(layer))
    experts.weights["down_proj"][-1].mul_(2)
    with pytest.raises(StateError, match="backward: expected base weights as they were in the forward"):
        y.backward(layer.grad_y)


def misused(layer: Layer, **arguments: Any) -> Tensor:
    given = {"experts": frozen(layer), "lora": LoraFactors(), "biases": None, "weights": None} | arguments
    experts = given.pop("experts")
    return sft_moe(experts, layer.x, layer.expert_ids, layer.routing_weights, **given)


def test_factors_that_would_be_taken_for_others_are_refused() -> None:
    layer = make_layer(SIZES)
    six = tuple(layer.factors[name] for name in FACTORS)
    for wrong, error, message in (
        (lambda: LoraFactors(six[:4], shared_a=True), ArgumentError, r"factors: expected 6, got 4"),
        (lambda: LoraFactors((*six, six[0])), ArgumentError, r"factors: expected 6, got 7"),
        (lambda: LoraFactors(six, shared_a=True), ArgumentError, r"factors\[2\], factors\[3\]: expected None"),
        (lambda: LoraFactors((*six[:2], None, six[3], *six[4:]), True), ArgumentError, r"factors\[3\]"),
        (lambda: LoraFactors((six[0].float().numpy(), *six[1:])), TypeError, r"factors\[0\]: .* got ndarray"),
        (lambda: LoraFactors(six[0]), TypeError, r"factors: expected 6 in a tuple, got Tensor"),
        (lambda: LoraFactors(six, scaling=(2.0, 2.0)), ArgumentError, r"scaling: expected 3, got 2"),
        (
            lambda: LoraFactors(six, scaling=(1.0, "a", 1.0)),
            TypeError,
            r"scaling\[1\]: expected a number, got str 'a'",
        ),
        (
            lambda: LoraFactors(six, scaling=(1.0, 1.0, float("nan"))),
            ArgumentError,
            r"scaling\[2\]: .* got nan",
        ),
        (lambda: LoraFactors(six, scaling=2.0), TypeError, r"scaling: expected 3 in a tuple, got float"),
        (lambda: ExpertBiases(up_bias=layer.x.float().numpy()), TypeError, r"up_bias: .* got ndarray"),
        (lambda: misused(layer, lora=six), TypeError, r"lora: expected LoraFactors, got tuple"),
        (lambda: misused(layer, biases=(None,) * 4), TypeError, r"biases: expected ExpertBiases, got tuple"),
        (lambda: misused(layer, experts=layer.down_proj), TypeError, r"experts: .* got Tensor"),
    ):
        with pytest.raises(error, match=message):
            wrong()


def test_sparse_inputs_are_refused_by_name() -> None:
    layer = make_layer(SIZES, dtype=torch.float32)
    with pytest.raises(ArgumentError, match=r"^x: .*strided.*sparse"):
        sft_moe(frozen(layer), layer.x.to_sparse(), layer.expert_ids, layer.routing_weights)


def test_weights_of_a_call_that_are_no_tensors() -> None:
    layer = make_layer(SIZES)
    experts = frozen(layer)
    weights = experts.weights | {"down_proj": layer.down_proj.float().numpy()}
    with pytest.raises(TypeError, match=r"weights\['down_proj'\]: expected a torch.Tensor .* got ndarray"):
        misused(layer, experts=experts, weights=weights)


def test_transforms_of_functions_are_refused() -> None:
    layer = make_layer(SIZES)
    experts, leaves = frozen(layer), leaves_of(layer)
    weights = layer.routing_weights

    def loss(x: Tensor) -> Tensor:
        return sft_moe(experts, x, layer.expert_ids, weights).sum()

    y = call(experts, layer, leaves)
    grads = torch.stack([layer.grad_y] * 2)
    for transformed in (
        lambda: torch.func.grad(loss)(layer.x),
        lambda: torch.func.vjp(loss, layer.x),
        lambda: torch.func.vmap(lambda x: sft_moe(experts, x, layer.expert_ids, weights))(layer.x[None]),
        lambda: torch.autograd.grad(y, next(iter(leaves.values())), grads, is_grads_batched=True),
    ):
        with pytest.raises(StateError, match=r"torch\.func: expected calls outside of its transforms"):
            transformed()


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
