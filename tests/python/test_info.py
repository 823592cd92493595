"""What the package says about itself and this machine: info() and the command line."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import amx_sft_moe
from amx_sft_moe import ArgumentError, KernelError
from amx_sft_moe.__main__ import main
from amx_sft_moe.nn import ExpertWeights
from amx_sft_moe.system.files import without_names
from cases import Sizes, kernels
from reference import make_layer, run

SIZES = Sizes()


def test_info_is_plain_json() -> None:
    found = amx_sft_moe.info()
    assert json.loads(json.dumps(found)) == found
    names = {(kernel["name"], kernel["weights"]) for kernel in found["kernels"]}
    assert {("amx_bf16", "bfloat16"), ("avx512_bf16", "bfloat16"), ("portable", "bfloat16")} <= names
    assert {("avx2", "bfloat16"), ("avx2", "float32"), ("portable", "float32")} <= names
    for kernel in found["kernels"]:
        assert kernel["available"] == (kernel["why_not"] == "")
    assert isinstance(found["instruction_sets"]["amx"], str)
    assert found["num_threads"] >= 1
    assert found["auto_kernel"]["bfloat16"] in {kernel["name"] for kernel in found["kernels"]}


AVX512 = {"fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
# What of /proc/cpuinfo a kernel needs, by its name and weights: arch/cpu_features.hpp asks CPUID and XCR0.
NEEDS = {
    ("portable", "bfloat16"): set(),
    ("portable", "float32"): set(),
    ("avx2", "bfloat16"): {"avx2", "fma"},
    ("avx2", "float32"): {"avx2", "fma"},
    ("avx512", "bfloat16"): AVX512,
    ("avx512", "float32"): AVX512,
    ("avx512_bf16", "bfloat16"): AVX512 | {"avx512_bf16"},
    ("amx_bf16", "bfloat16"): AVX512 | {"amx_tile", "amx_bf16"},
}


@pytest.mark.emulated
def test_the_cpu_decides_which_kernels_there_are() -> None:
    """All others are tested on the kernels that are listed as available: none may go missing."""
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    if "AMX_EMULATOR" in os.environ:
        flags |= {"amx_tile", "amx_bf16"}
    expected = {kernel: needs <= flags for kernel, needs in NEEDS.items()}
    info = amx_sft_moe.info()
    expected["amx_bf16", "bfloat16"] &= not info["amx_permission"].startswith("denied")
    rows = [kernel for kernel in info["kernels"] if kernel["name"] != "onednn"]
    assert {(kernel["name"], kernel["weights"]): kernel["available"] for kernel in rows} == expected


@pytest.mark.emulated
def test_the_kernel_under_test_is_there() -> None:
    assert kernels("bfloat16"), "no kernel to test on"


@pytest.mark.emulated
@pytest.mark.skipif("AMX_EMULATOR" not in os.environ, reason="only under the AMX emulator")
def test_emulation_is_said() -> None:
    found = amx_sft_moe.info()
    assert found["instruction_sets"]["amx"] == "amx (emulated)"
    assert found["instruction_sets"]["amx_emulated"] is True
    assert kernels("bfloat16") == ["amx_bf16"]


def test_environment_chooses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "portable")
    found = amx_sft_moe.info()
    assert found["auto_kernel"] == {"bfloat16": "portable", "float32": "portable"}
    assert found["environment"]["AMX_SFT_MOE_KERNEL"] == "portable"
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "abacus")
    assert "abacus" in amx_sft_moe.info()["auto_kernel"]["bfloat16"]


def test_environment_is_read_when_an_operator_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(SIZES)
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "portable")
    op = SIZES.operator()
    weights = {"gate_proj": layer.gate_proj, "up_proj": layer.up_proj, "down_proj": layer.down_proj}
    experts = ExpertWeights(top_k=SIZES.top_k, **weights)
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "abacus")
    op.set_base(**weights)
    assert op.kernel == "portable"
    found: list[str] = []  # the operator of another thread
    other = threading.Thread(target=lambda: found.append(experts.operator().kernel))
    other.start()
    other.join()
    assert found == ["portable"]


def test_a_kernel_for_one_type_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "avx512_bf16")
    if not any(kernel == "avx512_bf16" for kernel in kernels("bfloat16")):
        pytest.skip("no kernel avx512_bf16 here")
    layer = make_layer(SIZES)
    op = SIZES.operator()
    monkeypatch.delenv("AMX_SFT_MOE_KERNEL")
    with pytest.raises(amx_sft_moe.KernelError, match=r"AMX_SFT_MOE_KERNEL: .* does not take fp32 weights"):
        op.set_base(layer.gate_proj.float(), layer.up_proj.float(), layer.down_proj.float())
    op.set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
    assert op.kernel == "avx512_bf16"


@pytest.mark.parametrize("kernel", ["amx_bf16", "avx512_bf16"])
def test_fp32_weights_are_refused_by_the_kernels_of_bf16(kernel: str) -> None:
    """Where this CPU has the kernel for their type, elsewhere for the CPU's lack: never converted."""
    here = any(name == kernel for name in kernels("bfloat16"))
    refusal = rf"kernel: .*got {kernel}: {'it does not take fp32 weights' if here else 'the CPU'}"
    layer = make_layer(SIZES)
    with pytest.raises(amx_sft_moe.KernelError, match=refusal):
        SIZES.operator(kernel=kernel).set_base(
            layer.gate_proj.float(), layer.up_proj.float(), layer.down_proj.float()
        )


def test_all_threads_have_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the environment in which the weights came, for the other type of weights too."""
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "avx512_bf16")
    if not any(kernel == "avx512_bf16" for kernel in kernels("bfloat16")):
        pytest.skip("no kernel avx512_bf16 here")
    layer = make_layer(SIZES)
    weights = (layer.gate_proj, layer.up_proj, layer.down_proj)
    experts = ExpertWeights(top_k=SIZES.top_k, gate_proj=weights[0], up_proj=weights[1], down_proj=weights[2])
    monkeypatch.delenv("AMX_SFT_MOE_KERNEL")
    for weight in weights:
        weight.data = weight.data.float()
    with ThreadPoolExecutor(1) as other:
        for operator in (experts.operator, lambda: other.submit(experts.operator).result()):
            with pytest.raises(
                amx_sft_moe.KernelError, match=r"AMX_SFT_MOE_KERNEL: .* does not take fp32 weights"
            ):
                operator()
        for weight in weights:
            weight.data = weight.data.bfloat16()
        assert other.submit(experts.operator).result().kernel == "avx512_bf16"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("TIMER", "xml", "expected text or json, got xml"),
        ("TRACE", "{folder}/none/x", "expected a file to append to, got {folder}/none/x"),
        ("TRACE_LIMIT", "abc", "expected a number of MB above 0, got abc"),
    ],
)
def test_what_refuses_every_operator_is_a_finding(
    variable: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = amx_sft_moe.info()["findings"]
    monkeypatch.setenv(f"AMX_SFT_MOE_{variable}", value.format(folder=tmp_path))
    with pytest.raises(amx_sft_moe.ArgumentError, match=f"^AMX_SFT_MOE_{variable}: expected "):
        run(SIZES.operator(), make_layer(SIZES))
    found = amx_sft_moe.info()["findings"]
    assert found[: len(before)] == before
    expected = f"no operator can be made: AMX_SFT_MOE_{variable}: {reason.format(folder=tmp_path)}"
    assert found[len(before) :] == [without_names(expected)]


def test_info_leaves_no_files_of_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps.jsonl").touch()
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "json")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", str(tmp_path / "steps.jsonl"))
    monkeypatch.setenv("AMX_SFT_MOE_TRACE", str(tmp_path / "trace.json"))
    assert not [finding for finding in amx_sft_moe.info()["findings"] if "AMX_SFT_MOE" in finding]
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"amx_sft_moe {amx_sft_moe.__version__}" in text
    assert "kernels, best first:" in text
    assert "portable" in text
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == amx_sft_moe.__version__
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"amx_sft_moe {amx_sft_moe.__version__}\n"
    for wrong in ([], ["trian"]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
        assert "usage: python -m amx_sft_moe" in capsys.readouterr().err


def test_command_line_with_torch() -> None:
    """One OpenMP library for both, whoever came first."""
    done = subprocess.run(
        [sys.executable, "-m", "amx_sft_moe", "info", "--json", "--with-torch"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert len(json.loads(done.stdout)["openmp_libraries"]) == 1


def test_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "amx_sft_moe", "info", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["kernels"] == amx_sft_moe.info()["kernels"]


def test_commands_without_their_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("amx_sft_moe.finetune.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["finetune"]) == 1
    said = capsys.readouterr().err
    assert "needs t" in said
    assert "pip install '.[train]' in a clone" in said


def test_names() -> None:
    assert set(amx_sft_moe.__all__) <= set(dir(amx_sft_moe))
    assert "batch_size" in inspect.signature(amx_sft_moe.prepare).parameters
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = amx_sft_moe.missing
    assert (Path(amx_sft_moe.__file__).parent / "py.typed").is_file()


def test_values_of_the_environment_that_are_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", os.fsdecode(b"\xff"))
    with pytest.raises(KernelError, match=r"got \\xff"):
        SIZES.operator()
    found = amx_sft_moe.info()
    assert found["auto_kernel"]["bfloat16"].startswith("none: ")
    assert main(["info"]) == 0
    assert "\\xff" in capsys.readouterr().out
    monkeypatch.delenv("AMX_SFT_MOE_KERNEL")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "json")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", f"{tmp_path}/none/{os.fsdecode(bytes([0xE9]))}")
    layer = make_layer(SIZES)
    with pytest.raises(ArgumentError, match=r"^AMX_SFT_MOE_TIMER_FILE: .* got .*/none/\\xe9$"):
        SIZES.operator().set_base(layer.gate_proj, layer.up_proj, layer.down_proj)
