"""torch.compile: one opaque operator a layer, and the results and gradients of eager mode. Other tracers are
refused."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from amx_sft_moe import StateError, compiled
from amx_sft_moe.nn import ExpertWeights, LoraFactors, SftMoeExperts, sft_moe
from cases import Sizes
from families import family_model, token_batch, with_lora
from models import loss_and_gradients
from reference import Layer, assert_close, make_layer, one_thread

OURS = "amx_sft_moe"
# Everything of torch.compile but the C++ compiler, which has nothing to add to an opaque operator.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    with one_thread():
        yield
    torch._dynamo.reset()


@pytest.fixture
def in_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The handle of every call from a graph."""
    seen: list[int] = []
    original = compiled._experts

    def counted(handle: int, *parameters: Any) -> Any:
        seen.append(handle)
        return original(handle, *parameters)

    monkeypatch.setattr(compiled, "_experts", counted)
    return seen


def small(family: str) -> nn.Module:
    changes = {"layer_types": ["full_attention"]} if family == "gpt_oss" else {}
    return family_model(family, OURS, num_hidden_layers=1, **changes)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_full_graph_with_lora(family: str, in_graphs: list[int]) -> None:
    model = with_lora(small(family))
    loss, grads = loss_and_gradients(model, **token_batch())
    with torch.no_grad(), model.disable_adapter():
        plain = model(**token_batch()).logits
    graph = torch.compile(model, fullgraph=True, backend=BACKEND)
    model.zero_grad()
    found = graph(**token_batch()).loss
    found.backward()
    found_grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_close({"loss": found.detach()} | found_grads, {"loss": loss} | grads, 1e-6)
    assert len(in_graphs) >= 2, "a forward and a backward from the graph"
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(graph(**token_batch()).logits, plain)


def experts_of(family: str) -> nn.Module:
    """The experts of one layer, alone."""
    model = small(family)
    return next(module for module in model.modules() if hasattr(module, "_apply_gate"))


def routed(tokens: int, experts: int = 5, hidden: int = 32) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=random).argsort(1)[:, :2]
    x, weights = torch.randn(tokens, hidden, generator=random), torch.rand(tokens, 2, generator=random)
    return [x.requires_grad_(), ids, weights.requires_grad_()]


def results(function: Any, inputs: list[torch.Tensor], *parameters: torch.Tensor) -> list[torch.Tensor]:
    y = function(*inputs)
    grads = torch.autograd.grad(y.square().sum(), (inputs[0], inputs[2], *parameters))
    return [y.detach(), *grads]


def test_token_counts_and_routes_without_expert(in_graphs: list[int]) -> None:
    """How much is saved is not known when the graph is made; nor need the number of tokens be."""
    experts = experts_of("gpt_oss")
    biases = experts.gate_up_proj_bias.requires_grad_(), experts.down_proj_bias.requires_grad_()
    graph = torch.compile(experts, fullgraph=True, backend=BACKEND)
    for tokens in (7, 3, 11):
        inputs = routed(tokens)
        inputs[1][0] = 5  # as expert parallelism marks another rank's routes
        expected = results(experts, inputs, *biases)
        found = results(graph, inputs, *biases)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert in_graphs


def test_weights_that_change_after_compilation(in_graphs: list[int]) -> None:
    experts = experts_of("gpt_oss")
    graph = torch.compile(experts, fullgraph=True, backend=BACKEND)
    inputs = routed(7)
    first = results(graph, inputs)[0]
    other = copy.deepcopy(experts)
    with torch.no_grad():
        other.down_proj.mul_(2)
    experts.load_state_dict(other.state_dict())
    second = results(graph, inputs)[0]
    assert not torch.equal(first, second)
    experts.gate_up_proj.data = experts.gate_up_proj.data.contiguous()
    assert torch.equal(results(graph, inputs)[0], second)
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data.clone(), requires_grad=False)
    assert torch.equal(results(graph, inputs)[0], second)
    experts.limit = 1.5
    assert torch.equal(results(graph, inputs)[0], results(experts, inputs)[0])
    assert in_graphs


@pytest.mark.parametrize("copied", [False, True])
def test_weights_that_change_before_the_backward(copied: bool) -> None:
    """Noticed as in eager mode, but where a hook has copied what was saved."""
    experts = experts_of("qwen3_moe")
    x = torch.randn(6, experts.gate_up_proj.shape[2], requires_grad=True)
    ids, weights = torch.zeros(6, 2, dtype=torch.int64), torch.ones(6, 2)
    graph = torch.compile(experts, fullgraph=True, backend=BACKEND)
    keep = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t) if copied else nullcontext()
    graph(x, ids, weights).sum().backward()
    with keep:
        y = graph(x, ids, weights)
    with torch.no_grad():
        experts.down_proj.mul_(2)
    if copied:
        y.sum().backward()
        return
    with pytest.raises(StateError, match="expected base weights as they were in the forward, got changed ones"):
        y.sum().backward()
    graph(x, ids, weights).sum().backward()  # of the next forward, with the weights that it had


def test_experts_that_are_not_taken(in_graphs: list[int]) -> None:
    experts = experts_of("qwen3_moe")
    experts.act_fn = nn.ReLU()
    graph = torch.compile(experts, fullgraph=True, backend=BACKEND)
    found, expected = results(graph, routed(7)), results(experts, routed(7))
    assert not in_graphs
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_weights_that_train_after_compilation(family: str, in_graphs: list[int]) -> None:
    experts = experts_of(family)
    graph = torch.compile(experts, fullgraph=True, backend=BACKEND)
    results(graph, routed(7))
    in_graphs.clear()
    weights = experts.gate_up_proj.requires_grad_(), experts.down_proj.requires_grad_()
    for found, expected in zip(
        results(graph, routed(7), *weights), results(experts, routed(7), *weights), strict=True
    ):
        assert torch.equal(found, expected)
    assert len(in_graphs) >= 2, "a forward and a backward"


def test_a_layer_that_is_not_taken_any_more() -> None:
    experts = experts_of("qwen3_moe")
    handle, _ = compiled.handle_of(_layer_in_graph(experts))
    experts.act_fn = nn.ReLU()
    with pytest.raises(StateError, match="changed since it was compiled: expected a gate"):
        compiled._experts(handle)
    with pytest.raises(StateError, match="gone"):
        compiled._experts(-1)


def _layer_in_graph(experts: nn.Module) -> Any:
    from amx_sft_moe.integrations import experts_hook

    return experts_hook._hooks[OURS].in_graph(experts, 32, 2)


def module_of(layer: Layer, **options: Any) -> SftMoeExperts:
    experts = SftMoeExperts(
        2,
        gate_proj=layer.gate_proj,
        up_proj=layer.up_proj,
        down_proj=layer.down_proj,
        lora_rank=4,
        **options,
    )
    with torch.no_grad():
        for name in experts.lora_names():
            getattr(experts, name).normal_(std=0.2)
    return experts


@pytest.mark.parametrize("shared", [False, True])
def test_module_of_this_package(shared: bool, in_graphs: list[int]) -> None:
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    experts = module_of(layer, shared_lora_a=shared)
    experts.down_proj.requires_grad_(shared)
    factors = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    inputs = [layer.x.requires_grad_(), layer.expert_ids, layer.routing_weights.requires_grad_()]
    expected = results(experts, inputs, *factors)
    found = results(torch.compile(experts, fullgraph=True, backend=BACKEND), inputs, *factors)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(in_graphs) == 3, "asked for the handle, a forward and a backward"


def test_one_weight_trains_beside_matrices_of_experts(in_graphs: list[int]) -> None:
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    down = layer.down_proj.requires_grad_()
    experts = ExpertWeights(
        top_k=2, gate_proj=list(layer.gate_proj), up_proj=list(layer.up_proj), down_proj=down
    )
    inputs = [layer.x.requires_grad_(), layer.expert_ids, layer.routing_weights.requires_grad_()]

    def call(*given: torch.Tensor) -> torch.Tensor:
        return sft_moe(experts, *given)

    expected = results(call, inputs, down)
    found = results(torch.compile(call, fullgraph=True, backend=BACKEND), inputs, down)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(in_graphs) == 3, "asked for the handle, a forward and a backward"


def test_operators_are_what_torch_expects() -> None:
    experts = experts_of("qwen3_moe")
    handle, saved = compiled.handle_of(_layer_in_graph(experts))
    x, ids, weights = routed(7)
    call = (handle, x, ids, weights, False, False, [1.0] * 3, saved, *[None] * compiled._NUM_PARAMETERS)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.amx_sft_moe.forward, call, test_utils=checks)
    torch.library.opcheck(torch.ops.amx_sft_moe.forward_saved, call, test_utils=checks)
    y, activations = torch.ops.amx_sft_moe.forward_saved(*call)
    form = (False, False, [1.0] * 3)
    wanted = [True, True] + [False] * compiled._NUM_PARAMETERS
    inputs = (handle, x, ids, weights, activations, y, *form, wanted, *[None] * compiled._NUM_PARAMETERS)
    torch.library.opcheck(torch.ops.amx_sft_moe.backward, inputs, test_utils=checks)


@pytest.mark.parametrize("kind", ["gate detached", "up detached", "two leaves"])
def test_two_factors_of_one_memory(kind: str, in_graphs: list[int]) -> None:
    """Each has its gradient, as if the other had memory of its own."""
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    experts = module_of(layer).experts()
    a, gate_b, _, up_b, *down = [factor.requires_grad_() for factor in layer.factors.values()]
    other = a.detach().requires_grad_()
    inputs = [layer.x.requires_grad_(), layer.expert_ids, layer.routing_weights.requires_grad_()]
    factors = [a, other, gate_b, up_b, *down] if kind == "two leaves" else [a, gate_b, up_b, *down]

    def call(*given: torch.Tensor, one_memory: bool = True) -> torch.Tensor:
        def detached(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach() if one_memory else tensor.detach().clone()

        gate, up = a, other if one_memory else other * 1
        if kind != "two leaves":
            gate, up = (detached(a), a) if kind == "gate detached" else (a, detached(a))
        return sft_moe(experts, *given, LoraFactors((gate, gate_b, up, up_b, *down)))

    expected = results(lambda *given: call(*given, one_memory=False), inputs, *factors)
    assert all(torch.equal(x, y) for x, y in zip(results(call, inputs, *factors), expected, strict=True))
    assert not in_graphs
    found = results(torch.compile(call, fullgraph=True, backend=BACKEND), inputs, *factors)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert in_graphs


def test_parameters_that_come_to_have_one_memory() -> None:
    """No guard of the graph sees that."""
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    experts = module_of(layer)
    graph = torch.compile(experts, fullgraph=True, backend=BACKEND)
    inputs = [layer.x.requires_grad_(), layer.expert_ids, layer.routing_weights.requires_grad_()]
    factors = [getattr(experts, name) for name in experts.lora_names()]
    results(graph, inputs, *factors)
    experts.up_lora_a.data = experts.gate_lora_a.data.clone()
    expected = results(graph, inputs, *factors)
    experts.up_lora_a.data = experts.gate_lora_a.data
    assert all(torch.equal(x, y) for x, y in zip(results(graph, inputs, *factors), expected, strict=True))


def test_one_factor_twice() -> None:
    """In a graph too the operator computes with it once, or sums would be rounded elsewhere."""
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    experts = module_of(layer)
    experts.up_lora_a = experts.gate_lora_a
    inputs = [layer.x.requires_grad_(), layer.expert_ids, layer.routing_weights.requires_grad_()]
    factors = [p for p in experts.parameters() if p.requires_grad]
    expected = results(experts, inputs, *factors)
    found = results(torch.compile(experts, fullgraph=True, backend=BACKEND), inputs, *factors)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["eager", BACKEND])
@pytest.mark.parametrize("tokens", [12, 0])
@pytest.mark.parametrize("of", ["module", "transformers"])
def test_backward_after_the_module_is_gone(of: str, tokens: int, backend: str) -> None:
    """As in eager mode: what a forward saved keeps the weights alive, and nothing else does."""
    layer = make_layer(Sizes(tokens=tokens), dtype=torch.float32)
    x = layer.x.requires_grad_()
    inputs = x, layer.expert_ids, layer.routing_weights
    module: nn.Module = module_of(layer) if of == "module" else experts_of("qwen3_moe")
    (expected,) = torch.autograd.grad(module(*inputs).sum(), x)
    y = torch.compile(module, backend=backend)(*inputs)
    module.last_output = y  # so that it reaches its own graph
    alive = weakref.ref(module)
    weights = [weakref.ref(weight) for weight in module.parameters()]
    del module
    gc.collect()
    assert alive() is None
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)
    del y
    gc.collect()
    assert not any(weight() is not None for weight in weights)


@pytest.mark.parametrize("backend", ["eager", BACKEND])
def test_second_derivative_is_refused(backend: str) -> None:
    """In eager mode's words, but where torch does so first: in a full graph of AOTAutograd."""
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    x = layer.x.requires_grad_()
    y = torch.compile(module_of(layer), backend=backend)(x, layer.expert_ids, layer.routing_weights)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^amx_sft_moe: expected one derivative .* got a second"):
        grad.square().sum().backward()


@pytest.mark.parametrize("backend", ["eager", BACKEND])
def test_penalty_on_a_gradient_is_refused_for_every_parameter(backend: str) -> None:
    """Where parameters are named autograd goes to these only; there is a way to each from the gradients."""
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    module, x = module_of(layer), layer.x.requires_grad_()
    y = torch.compile(module, backend=backend)(x, layer.expert_ids, layer.routing_weights)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    for parameter in (parameter for parameter in module.parameters() if parameter.requires_grad):
        with pytest.raises(RuntimeError):
            torch.autograd.grad(y.sum() + grad.square().sum(), parameter, retain_graph=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("of", ["module", "function", "transformers"])
def test_export_is_refused(of: str, strict: bool) -> None:
    """A program's handle would be another layer's in the next process."""
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    exported: nn.Module = module_of(layer)
    if of == "function":
        exported = _Calls(
            ExpertWeights(top_k=2, gate_proj=layer.gate_proj, up_proj=layer.up_proj, down_proj=layer.down_proj)
        )
    elif of == "transformers":
        exported = experts_of("qwen3_moe")
    with pytest.raises(StateError, match=r"^torch\.export: expected torch\.compile or eager, got an export"):
        torch.export.export(exported, inputs, strict=strict)
    assert exported(*inputs).shape == layer.x.shape


class _Calls(nn.Module):
    def __init__(self, experts: ExpertWeights) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return sft_moe(self.experts, *inputs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("tracer", ["make_fx", "torch.jit.trace"])
def test_other_tracers_are_refused(tracer: str, grad: bool) -> None:
    """Of the operator they see but the allocation of y."""
    layer = make_layer(Sizes(tokens=12), dtype=torch.float32)
    experts = module_of(layer)
    inputs = (layer.x, layer.expert_ids, layer.routing_weights)
    refused = pytest.raises(StateError, match=rf"^{tracer}: expected torch\.compile or eager, got a trace")
    with torch.set_grad_enabled(grad), refused:
        if tracer == "make_fx":
            make_fx(experts)(*inputs)
        else:
            torch.jit.trace(experts, inputs, check_trace=False)
    assert experts(*inputs).shape == layer.x.shape


def test_routes_per_token_of_before_once_more(in_graphs: list[int]) -> None:
    """As for an evaluation with fewer routes."""
    experts = experts_of("qwen3_moe")
    graph = torch.compile(experts, fullgraph=True, backend=BACKEND)
    x, ids, weights = routed(7)
    fewer = [x, ids[:, :1].contiguous(), weights[:, :1].detach().contiguous().requires_grad_()]
    for inputs in ([x, ids, weights], fewer, [x, ids, weights]):
        gc.collect()
        found, expected = results(graph, inputs), results(experts, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert in_graphs


def test_a_second_call_with_lora_is_not_compiled_again() -> None:
    model = with_lora(small("qwen3_moe"))
    compiler = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    graph = torch.compile(model, backend=compiler)
    for _ in range(3):
        graph(**token_batch()).loss.backward()
    once = compiler.frame_count
    torch._dynamo.reset()
    compiler = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    torch.compile(model, backend=compiler)(**token_batch()).loss.backward()
    assert once == compiler.frame_count > 0
