"""Kernel `onednn`: a module of its own, loaded by those who ask for it. That it computes what the others do is
the business of all tests that run on every kernel of `amx_sft_moe.info()`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import amx_sft_moe
from amx_sft_moe.kernels import load_onednn
from cases import Sizes
from reference import make_layer

PROVIDER, WHY_NOT = load_onednn()
needs_onednn = pytest.mark.skipif(PROVIDER is None, reason=f"kernel onednn: {WHY_NOT}")
SIZES = Sizes()


def loaded_after(code: str) -> bool:
    """Whether a fresh interpreter has loaded oneDNN after `code`."""
    test = f"{code}\nprint('libdnnl' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", test], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()[-1] == "True"


def test_nobody_else_loads_onednn() -> None:
    assert not loaded_after("import amx_sft_moe\namx_sft_moe.SftMoe(4, 2, 32, 24, kernel='portable')")


@needs_onednn
def test_who_asks_for_it_loads_it() -> None:
    assert loaded_after("import amx_sft_moe\namx_sft_moe.SftMoe(4, 2, 32, 24, kernel='onednn')")


def test_listed_once_per_type_of_weights() -> None:
    rows = [kernel for kernel in amx_sft_moe.info()["kernels"] if kernel["name"] == "onednn"]
    assert [kernel["weights"] for kernel in rows] == ["bfloat16", "float32"]
    for kernel in rows:
        assert kernel["available"] == (PROVIDER is not None)
        assert kernel["why_not"] == WHY_NOT


@needs_onednn
def test_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "onednn")
    assert amx_sft_moe.info()["auto_kernel"] == {"bfloat16": "onednn", "float32": "onednn"}
    assert SIZES.operator().kernel == "auto"
    assert SIZES.operator(kernel="portable").kernel == "portable"


@needs_onednn
def test_the_environment_may_change_before_the_weights_come(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(SIZES)
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "onednn")
    early = SIZES.operator()
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "portable")
    late = SIZES.operator()
    for op, kernel in ((early, "onednn"), (late, "portable")):
        monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "portable" if kernel == "onednn" else "onednn")
        op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
        assert op.kernel == kernel


def test_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amx_sft_moe._onednn", None)  # as where it was not built
    with pytest.raises(amx_sft_moe.KernelError, match=r"kernel: .*portable.* got onednn: .*libdnnl-dev"):
        SIZES.operator(kernel="onednn")
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "onednn")
    with pytest.raises(amx_sft_moe.KernelError, match=r"AMX_SFT_MOE_KERNEL: .*portable.* got onednn: "):
        SIZES.operator()
    rows = [kernel for kernel in amx_sft_moe.info()["kernels"] if kernel["name"] == "onednn"]
    assert [kernel["available"] for kernel in rows] == [False, False]


@needs_onednn
def test_a_module_of_another_build_is_refused() -> None:
    with pytest.raises(TypeError, match="provider"):
        amx_sft_moe._core.info("onednn")
