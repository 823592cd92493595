"""Callers without torch: numpy, ml_dtypes' bfloat16, other DLPack producers; no import of torch along the
way."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from amx_sft_moe import ArgumentError
from cases import Sizes
from reference import WEIGHTS, Layer, make_layer, run

SIZES = Sizes(tokens=9)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def mapped(layer: Layer, function: Callable[[torch.Tensor], Any]) -> Layer:
    """The layer with ``function`` of each of its tensors."""
    return Layer(
        **{
            name: {key: function(tensor) for key, tensor in value.items()}
            if isinstance(value, dict)
            else function(value)
            for name, value in vars(layer).items()
        }
    )


def numpy_layer(layer: Layer) -> Layer:
    return mapped(layer, as_numpy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_as_torch(dtype: torch.dtype) -> None:
    layer = make_layer(SIZES, dtype=dtype, biases=True)
    expected = run(SIZES.operator(), layer)
    found = run(SIZES.operator(), numpy_layer(layer))
    assert found.keys() == expected.keys()
    wanted = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float32
    for name, array in found.items():
        assert type(array) is np.ndarray, name
        assert array.dtype == wanted, name
        assert array.flags.owndata, name
        assert np.array_equal(array, as_numpy(expected[name])), name


def test_read_only_base_weights(tmp_path: Path) -> None:
    layer = numpy_layer(make_layer(SIZES))
    expected = run(SIZES.operator(), layer)["y"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(layer, name)
        path = tmp_path / name
        weight.tofile(path)
        setattr(layer, name, np.memmap(path, dtype=weight.dtype, mode="r", shape=weight.shape))
    assert np.array_equal(run(SIZES.operator(), layer)["y"], expected)


def test_strides_and_views() -> None:
    layer = numpy_layer(make_layer(SIZES))
    expected = run(SIZES.operator(), layer)
    wide = np.zeros((9, 50), layer.x.dtype)
    wide[:, 7:39] = layer.x
    layer.x = wide[:, 7:39]
    layer.factors = {name: np.asfortranarray(factor) for name, factor in layer.factors.items()}
    found = run(SIZES.operator(), layer)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_odd_arrays_are_refused() -> None:
    layer = numpy_layer(make_layer(SIZES))
    op = SIZES.operator()
    run(op, layer)
    inputs = (layer.expert_ids, layer.routing_weights)
    with pytest.raises(TypeError, match=r"x: expected dtype bfloat16 or float32.*V2"):
        op.forward_sft(layer.x.view("V2"), *inputs)
    with pytest.raises(TypeError, match=r"x: .*float16"):
        op.forward_sft(layer.x.astype(np.float16), *inputs)
    with pytest.raises(TypeError, match=r"x: .*>f4"):
        op.forward_sft(layer.x.astype(">f4"), *inputs)
    packed = np.zeros(9, dtype=[("tag", "u1"), ("row", "f4", (32,))])
    with pytest.raises(ArgumentError, match=r"x: expected strides.*multiples of 4"):
        op.forward_sft(packed["row"], *inputs)


@pytest.mark.parametrize("ids", [np.int64, np.int32])
@pytest.mark.parametrize("flip", [np.flipud, np.fliplr, np.flip])
def test_routing_that_lies_backwards(flip: Callable[..., np.ndarray], ids: type) -> None:
    layer = numpy_layer(make_layer(SIZES))
    layer.expert_ids = layer.expert_ids.astype(ids)
    op = SIZES.operator()
    expected = run(op, layer)
    layer.expert_ids = flip(flip(layer.expert_ids).copy())
    layer.routing_weights = flip(flip(layer.routing_weights).copy())
    assert min(layer.expert_ids.strides) < 0
    found = run(op, layer)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def backwards(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The same values, in memory that goes down along those of its ``axes``."""
    axes = tuple(axis for axis in axes if axis < array.ndim)
    return np.flip(np.flip(array, axes).copy(), axes)


@pytest.mark.emulated
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("along", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_parameters_that_lie_backwards(bf16_kernel: str, along: tuple[int, ...], fused: bool) -> None:
    """Base weights by expert, factors and biases in every dimension, and all their gradients."""
    layer = numpy_layer(make_layer(SIZES, biases=True))
    factors, biases = dict(layer.factors), dict(layer.biases)
    weights = {name: getattr(layer, name) for name in WEIGHTS}
    if fused:
        factors["gate_up_lora_a"] = factors.pop("gate_lora_a")
        del factors["up_lora_a"]
        for into, ending in ((factors, "lora_b"), (biases, "bias"), (weights, "proj")):
            pair = into.pop(f"gate_{ending}"), into.pop(f"up_{ending}")
            into[f"gate_up_{ending}"] = np.concatenate(pair, 1)
    results = []
    for axes, of_weights in (((), ()), (along, (0,))):
        op = SIZES.operator(kernel=bf16_kernel)
        op.set_lora(**{name: backwards(factor, axes) for name, factor in factors.items()})
        given = {name: backwards(bias, axes) for name, bias in biases.items()}
        given |= {name: backwards(weight, of_weights) for name, weight in weights.items()}
        op.set_base(**given)
        y = op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
        out = {
            name: backwards(np.full(parameter.shape, np.nan, np.float32), axes)
            for name, parameter in (factors | given).items()
        }
        found = op.backward(layer.grad_y, out=out).as_dict()
        assert all(found[name] is array for name, array in out.items())
        results.append(found | {"y": y})
    ahead, back = results
    assert ahead.keys() == back.keys()
    assert all(np.array_equal(back[name], ahead[name]) for name in ahead)


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("name", ["down_lora_b", "down_bias", "down_proj"])
def test_gradients_beside_memory_that_goes_down(name: str, step: int) -> None:
    """A tensor's memory begins at its lowest element: one more, and they would meet in one."""
    layer = numpy_layer(make_layer(SIZES, dtype=torch.float32, biases=True))
    weights = {each: getattr(layer, each) for each in WEIGHTS}
    parameters = layer.factors | layer.biases | weights
    given = parameters[name]
    memory = np.zeros(2 * given.size, np.float32)
    if name == "down_proj":  # its elements are adjacent
        below = memory[: given.size].reshape(given.shape)[::step]
    else:
        below = memory[: given.size][::step].reshape(given.shape)
    below[...], parameters[name] = given, below
    op = SIZES.operator()
    op.set_base(**{each: parameters[each] for each in (*weights, *layer.biases)})
    op.set_lora(**{each: parameters[each] for each in layer.factors})
    op.forward_sft(layer.x, layer.expert_ids, layer.routing_weights)
    apart, meeting = (
        memory[begin:][: given.size][::-step].reshape(given.shape) for begin in (given.size, given.size - 1)
    )
    assert np.shares_memory(meeting, below)
    with pytest.raises(ArgumentError, match=rf"out\.{name}: expected memory of its own"):
        op.backward(layer.grad_y, out={name: meeting})
    assert np.array_equal(below, given)
    op.backward(layer.grad_y, out={name: apart})
    assert apart.any()
    assert np.array_equal(below, given)


def misaligned(array: np.ndarray) -> np.ndarray:
    """The same values, one byte beyond where numpy puts them."""
    made = np.ndarray(array.shape, array.dtype, np.zeros(array.nbytes + 1, np.uint8), offset=1)
    made[...] = array
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_misaligned_arrays_are_refused(dtype: torch.dtype) -> None:
    layer = numpy_layer(make_layer(SIZES, dtype=dtype))
    op = SIZES.operator()
    expected = run(op, layer)["y"]
    inputs = {"x": layer.x, "expert_ids": layer.expert_ids, "routing_weights": layer.routing_weights}
    inputs["out"] = np.zeros_like(expected)
    for name, array in inputs.items():
        size = array.itemsize
        with pytest.raises(
            ArgumentError, match=rf"^{name}: .* aligned to {size} bytes, .* is 1 modulo {size}$"
        ):
            op.forward_sft(**(inputs | {name: misaligned(array)}))
    with pytest.raises(ArgumentError, match=r"expert_ids: .* aligned to 4 bytes"):
        op.forward_sft(**(inputs | {"expert_ids": misaligned(layer.expert_ids.astype(np.int32))}))
    up_proj = [layer.up_proj[0], misaligned(layer.up_proj[1]), *layer.up_proj[2:]]
    with pytest.raises(ArgumentError, match=rf"up_proj\[1\]: .* aligned to {size} bytes"):
        op.set_base(layer.gate_proj, up_proj, layer.down_proj)
    with pytest.raises(ArgumentError, match=rf"down_lora_b: .* aligned to {size} bytes"):
        op.set_lora(**(layer.factors | {"down_lora_b": misaligned(layer.factors["down_lora_b"])}))
    memory = np.zeros(4 * layer.x.size + 3, np.uint8)
    tensor = torch.frombuffer(memory, dtype=torch.float32, offset=3).view(layer.x.shape)
    with pytest.raises(ArgumentError, match=r"x: .* aligned to 4 bytes, .* 3 modulo 4"):
        op.forward_sft(**(inputs | {"x": tensor}))
    assert np.array_equal(op.forward_sft(**inputs), expected), "a refused call left something behind"
    op.forward_sft(misaligned(layer.x)[:0], layer.expert_ids[:0], layer.routing_weights[:0], False)


def test_results_follow_x() -> None:
    layer = make_layer(SIZES)
    arrays = numpy_layer(layer)
    arrays.gate_proj, arrays.factors = layer.gate_proj, layer.factors
    found = run(SIZES.operator(), arrays)
    assert all(isinstance(array, np.ndarray) for array in found.values())
    layer.gate_proj = as_numpy(layer.gate_proj)
    assert all(isinstance(tensor, torch.Tensor) for tensor in run(SIZES.operator(), layer).values())


class Producer:
    """A tensor of a library that has nothing but DLPack; counts what it still holds."""

    def __init__(self, tensor: torch.Tensor, versioned: bool) -> None:
        self._tensor, self._versioned = tensor, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if self._versioned:
            return self._tensor.__dlpack__(**options)
        if options:
            raise TypeError("no keywords here")
        return self._tensor.__dlpack__()


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_producers(versioned: bool) -> None:
    layer = make_layer(SIZES, biases=True)
    expected = run(SIZES.operator(), layer)
    found = run(SIZES.operator(), mapped(layer, lambda tensor: Producer(tensor, versioned)))
    assert all(np.array_equal(found[name], as_numpy(expected[name])) for name in expected)


class Interface:
    """An object with numpy's array interface and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array = array


def test_array_interface() -> None:
    layer = numpy_layer(make_layer(SIZES, dtype=torch.float32))
    op = SIZES.operator()
    expected = run(op, layer)["y"]
    y = op.forward_sft(Interface(layer.x), Interface(layer.expert_ids), Interface(layer.routing_weights), False)
    assert np.array_equal(y, expected)


WITHOUT_TORCH = """
    import sys
    for name in ("torch", "transformers", "peft", *{missing}):
        sys.modules[name] = None  # importing it fails
    import numpy as np
    import operator
    import amx_sft_moe
    random = np.random.default_rng(0)
    op = amx_sft_moe.SftMoe(3, 2, 8, 6)
    base = [random.normal(size=shape).astype(np.float32) for shape in ((3, 6, 8), (3, 6, 8), (3, 8, 6))]
    factors = [random.normal(size=shape).astype(np.float32) for shape in ((3, 2, 6), (3, 8, 2))]
    ids, weights = np.array([[0, 1], [2, -1]]), np.full((2, 2), 0.5, np.float32)
    x = random.normal(size=(2, 8)).astype(np.float32)
    {body}
    for name in ("nn", "adapters.save_per_expert"):
        try:
            operator.attrgetter(name)(amx_sft_moe)
        except ImportError:
            continue
        raise SystemExit(name)
    try:
        amx_sft_moe.register()
    except ImportError:
        print("done")
"""
FP32 = """
    op.set_base(*base)
    op.set_lora(down_lora_a=factors[0], down_lora_b=factors[1])
    y = op.forward_sft(x, ids, weights)
    g = op.backward(np.ones_like(y))
    assert type(y) is np.ndarray and g.grad_x.shape == (2, 8) and g.down_lora_b.shape == (3, 8, 2)
    assert np.isfinite(g.down_lora_a).all() and g.grad_routing_weights[1, 1] == 0
"""
BF16 = """
    import ml_dtypes
    bf16 = ml_dtypes.bfloat16
    op.set_base(*[weight.astype(bf16) for weight in base])
    y = op.forward_sft(x.astype(bf16), ids, weights)
    assert y.dtype == bf16
    assert op.forward_sft(x, ids, weights, False).dtype == np.float32
"""
NO_ML_DTYPES = """
    op.set_base(*base)

    class Bf16:
        def __dlpack_device__(self):
            return 1, 0
        def __dlpack__(self, **options):
            return capsule
    import ctypes
    shape, strides = (ctypes.c_int64 * 2)(2, 8), (ctypes.c_int64 * 2)(8, 1)
    data = (ctypes.c_uint16 * 16)()
    class Managed(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                    ("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                    ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]
    managed = Managed(ctypes.addressof(data), (1, 0), 2, (4, 16, 1, 0), ctypes.addressof(shape),
                      ctypes.addressof(strides), 0, None, None)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(ctypes.addressof(managed), b"dltensor", None)
    try:
        op.forward_sft(Bf16(), ids, weights)
    except TypeError as error:
        assert "ml_dtypes" in str(error) and "out=" in str(error), error
    else:
        raise SystemExit("no error")
"""


@pytest.mark.parametrize(
    ("body", "missing"),
    [(FP32, ["ml_dtypes"]), (BF16, []), (NO_ML_DTYPES, ["ml_dtypes"])],
    ids=["fp32", "bf16", "bf16 without ml_dtypes"],
)
def test_without_torch(body: str, missing: list[str]) -> None:
    code = textwrap.dedent(WITHOUT_TORCH).format(body=textwrap.dedent(body).strip(), missing=missing)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
