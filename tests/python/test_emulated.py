"""The tests marked `emulated` once more, on kernel amx_bf16: in a process with the AMX emulator preloaded,
its AMX instructions are trapped and executed one by one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amx_sft_moe

ROOT = Path(__file__).resolve().parents[2]
CPU_HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
LIBRARY = os.environ.get("AMX_EMULATOR_LIBRARY", "")


def preloadable(library: str, folder: Path) -> str:
    """A path of the library for LD_PRELOAD, which blanks and colons separate."""
    if not set(library) & set(" :"):
        return library
    link = folder / "libamx_emulator.so"
    link.symlink_to(library)
    return str(link)


@pytest.mark.skipif(
    not LIBRARY, reason="AMX_EMULATOR_LIBRARY does not name the emulator's library (make test does)"
)
@pytest.mark.skipif("AMX_EMULATOR" in os.environ, reason="this is the emulated run")
@pytest.mark.skipif(not amx_sft_moe.info()["instruction_sets"]["avx512"], reason="AVX512 is not emulated")
@pytest.mark.skipif(CPU_HAS_AMX, reason="this CPU executes AMX itself, in all other tests")
def test_on_emulated_amx(tmp_path: Path) -> None:
    assert Path(LIBRARY).is_file(), f"AMX_EMULATOR_LIBRARY: expected a file, got {LIBRARY}"
    environment = os.environ | {
        "LD_PRELOAD": preloadable(LIBRARY, tmp_path),
        "AMX_EMULATOR": "1",
        "AMX_SFT_MOE_TEST_KERNELS": "amx_bf16",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "emulated",
            # faulthandler would take SIGILL, with which the emulator gets its instructions.
            "-p",
            "no:faulthandler",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).parent),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    assert int(passed.group(1)) > 15
    assert "failed" not in done.stdout


def test_a_path_with_a_blank_is_preloaded(tmp_path: Path) -> None:
    plain = f"{tmp_path}/plain.so"
    assert preloadable(plain, tmp_path) == plain
    odd = tmp_path / "a checkout" / "lib.so"
    odd.parent.mkdir()
    odd.write_text("")
    link = preloadable(str(odd), tmp_path)
    assert " " not in link
    assert Path(link).samefile(odd)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose path has a blank, with a `python` that says which emulator library it is given."""
    if shutil.which("make") is None or not (ROOT / "Makefile").is_file():
        pytest.skip("there is no make, or no Makefile")
    folder = tmp_path / "a checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "build" / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    script(folder, 'echo "library: $AMX_EMULATOR_LIBRARY"')
    return folder


def script(checkout: Path, command: str, name: str = "python") -> None:
    path = checkout / ".venv" / "bin" / name
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Of the `make test` that may run this: its options are not meant.
    of_make = ("MAKE", "MFLAGS", "REQUIRE_ALL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_make)}
    environment["PATH"] = f"{checkout / '.venv' / 'bin'}:{environment['PATH']}"
    return subprocess.run(
        ["make", *arguments], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


BUILT = ("-o", "test-cpp", "-o", ".venv/installed")


def test_make_gives_the_library(checkout: Path) -> None:
    library = checkout / "build" / "tests" / "libamx_emulator.so"
    library.write_text("")
    done = make(checkout, *BUILT, "test-python")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"library: {library}"), done.stderr


def test_make_fails_without_the_library(checkout: Path) -> None:
    """The AMX tests would be skipped in silence."""
    done = make(checkout, *BUILT, "test-python")
    assert done.returncode == 2
    assert f"expected libamx_emulator.so in {checkout}/build, got none" in done.stderr
    assert "library:" not in done.stdout


def test_make_quotes_what_is_absolute(checkout: Path) -> None:
    """The NVTX headers lie in .venv, of which Python says the absolute path."""
    script(checkout, f'echo "{checkout}/nvtx"')
    done = make(checkout, "-n", "test-cpp", "bench", "coverage", "matrix")
    words = shlex.split(done.stdout)
    given = [word for word in words if word.startswith("-DAMX_SFT_MOE_NVTX_INCLUDE")]
    assert given == [f"-DAMX_SFT_MOE_NVTX_INCLUDE={checkout}/nvtx"] * 4


# On a machine without them, of a CPU without AVX512.
NOTHING = (
    "-o",
    ".venv/tools",
    "SUDO=",
    "DNNL=/nowhere/dnnl.hpp",
    "SIMDE=/nowhere/avx512.h",
    "CPU_NEEDS_SIMDE=avx2",
)


@pytest.mark.parametrize(("goal", "package"), [("onednn", "libdnnl-dev"), ("simde", "libsimde-dev")])
def test_make_without_a_package(checkout: Path, goal: str, package: str) -> None:
    """Goes on without its tests; in CI, where nobody reads warnings, it does not."""
    script(checkout, 'echo "$@"; exit 100', "apt-get")
    done = make(checkout, *NOTHING, "REQUIRE_ALL=1", f".venv/{goal}")
    assert done.returncode == 2
    assert f"REQUIRE_ALL: expected {package} to be installed by apt, got an error" in done.stderr
    done = make(checkout, *NOTHING, f".venv/{goal}")
    assert done.returncode == 0
    assert f"{package}: left out; to try again: rm .venv/{goal}" in done.stderr
    script(checkout, 'echo "$@"', "apt-get")
    (checkout / ".venv" / goal).unlink()
    done = make(checkout, *NOTHING, "REQUIRE_ALL=1", f".venv/{goal}")
    assert done.returncode == 0
    assert done.stdout.endswith(f"install -y -q {package}\n")
    assert "left out" not in done.stderr


@pytest.mark.parametrize(("require_all", "soft"), [("", "OFF"), ("1", "ON")])
def test_make_tells_cmake_what_is_required(checkout: Path, require_all: str, soft: str) -> None:
    """Who has no AVX512 and does without SIMDe runs fewer tests."""
    done = make(checkout, "-n", *NOTHING, f"REQUIRE_ALL={require_all}", "test-cpp")
    words = shlex.split(done.stdout)
    assert f"AMX_SFT_MOE_REQUIRE_ALL={require_all}" in words
    assert f"-DAMX_SFT_MOE_SOFT_AVX512={soft}" in words


def test_ci_requires_all() -> None:
    if not (ROOT / ".ci" / "run").is_file():
        pytest.skip("there is no .ci/run")
    assert re.search(r"^export REQUIRE_ALL=1\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
