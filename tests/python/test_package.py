"""The package as it is installed: one version everywhere, headers and CMake files inside, stubs that tell the
truth about the compiled modules."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import amx_sft_moe
from amx_sft_moe import _core

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "python" / "amx_sft_moe"
PACKAGE = Path(amx_sft_moe.__file__).resolve().parent
VERSION = re.search(
    r'define AMX_SFT_MOE_VERSION_STRING "(.+)"',
    (ROOT / "include/amx_sft_moe/core/config_macros.hpp").read_text(),
).group(1)


def installed() -> importlib.metadata.Distribution:
    """The distribution that is under test, where it is installed (and not a source tree on the path)."""
    try:
        found = importlib.metadata.distribution("amx-sft-moe")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    if Path(str(found.locate_file("amx_sft_moe"))).resolve() != PACKAGE:
        pytest.skip("the package under test is not the installed one")
    return found


def test_version_of_the_modules() -> None:
    assert amx_sft_moe.__version__ == _core.__version__ == amx_sft_moe.info()["version"] == VERSION


def test_version_of_the_distribution() -> None:
    assert installed().version == VERSION


def test_version_is_written_once() -> None:
    """Nothing but the header holds the number: a second place would be forgotten."""
    files = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", *(ROOT / "python").rglob("*")]
    files = [
        file for file in files if file.suffix in (".toml", ".txt", ".py", ".pyi", ".cpp", ".hpp", ".cmake")
    ]
    assert not [str(file) for file in files if VERSION in file.read_text()]


def test_version_of_cmake(tmp_path: Path) -> None:
    """project() and the version file of find_package follow the header: the lines that read it, run alone."""
    lines = (ROOT / "CMakeLists.txt").read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("project("))
    header = (ROOT / "include/amx_sft_moe/core/config_macros.hpp").read_text().replace(VERSION, "12.34.56rc1")
    (tmp_path / "include/amx_sft_moe/core").mkdir(parents=True)
    (tmp_path / "include/amx_sft_moe/core/config_macros.hpp").write_text(header)
    project = lines[end].replace("LANGUAGES CXX", "LANGUAGES NONE")
    (tmp_path / "CMakeLists.txt").write_text(
        "\n".join([*lines[:end], project, 'message(STATUS "version is ${PROJECT_VERSION}")'])
    )
    cmake = Path(sys.executable).parent / "cmake"
    command = [str(cmake) if cmake.exists() else "cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no cmake")
    assert "version is 12.34.56\n" in done.stdout, done.stderr


def test_metadata() -> None:
    metadata = installed().metadata
    assert metadata["Name"] == "amx-sft-moe"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"\w+", line)[0] for line in required] == ["numpy"]  # torch is the user's choice
    scripts = {entry.name: entry.value for entry in installed().entry_points}
    assert scripts == {"amx-sft-moe": "amx_sft_moe.__main__:main"}


def test_files_of_the_wheel() -> None:
    """Python files, stubs, headers, CMake files and the modules; no tests, no libraries of others."""
    files = {str(file) for file in installed().files or () if ".." not in file.parts}
    inside = {name for name in files if name.startswith("amx_sft_moe/") and not name.endswith(".pyc")}
    sources = {
        f"amx_sft_moe/{file.relative_to(SOURCE)}"
        for file in SOURCE.rglob("*")
        if file.suffix in (".py", ".pyi")
    }
    headers = {f"amx_sft_moe/{file.relative_to(ROOT)}" for file in (ROOT / "include").rglob("*.hpp")}
    cmake = {
        f"amx_sft_moe/share/cmake/amx_sft_moe/amx_sft_moe-{name}.cmake"
        for name in ("config", "config-version", "onednn")
    }
    modules = {name for name in inside if ".so" in name}
    assert inside - modules == sources | headers | cmake | {"amx_sft_moe/py.typed"}
    assert {re.match(r"amx_sft_moe/(\w+)\.[\w-]+\.so$", name)[1] for name in modules} <= {"_core", "_onednn"}
    assert all("dist-info/" in name for name in files - inside if not name.endswith(".pyc"))


def test_headers_and_cmake_files_are_where_the_package_says() -> None:
    installed()
    assert (Path(amx_sft_moe.get_include()) / "amx_sft_moe" / "amx_sft_moe.hpp").is_file()
    assert (Path(amx_sft_moe.get_cmake_dir()) / "amx_sft_moe-config.cmake").is_file()
    version_file = Path(amx_sft_moe.get_cmake_dir()) / "amx_sft_moe-config-version.cmake"
    assert f'set(PACKAGE_VERSION "{VERSION}")' in version_file.read_text()


def test_openmp_is_torchs_where_torch_is_beside() -> None:
    """None comes with the package: torch's is taken before torch is imported, one copy for both."""
    installed()
    beside = PACKAGE.parent / "torch/lib/libgomp.so.1"
    if not beside.is_file():
        pytest.skip("no torch beside the package, or one with another libgomp")
    code = "import amx_sft_moe; print(amx_sft_moe.info()['openmp_libraries'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("libgomp") == done.stdout.count("torch/lib/libgomp.so.1") == 1, done.stdout


@pytest.mark.skipif("AMX_SFT_MOE_EXPECTED_TORCH" not in os.environ, reason="only in `make torch-versions`")
def test_torch_is_the_one_that_is_meant() -> None:
    torch = importlib.import_module("torch")
    assert torch.__version__.partition("+")[0] == os.environ["AMX_SFT_MOE_EXPECTED_TORCH"]


def test_missing_openmp_is_explained() -> None:
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'amx_sft_moe._core':\n"
        "            raise ImportError('libgomp.so.1: cannot open shared object file')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import amx_sft_moe"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "libgomp.so.1: cannot open shared object file. amx_sft_moe needs the OpenMP library" in done.stderr


# Stubs.

# What pybind11 and the import system add to every module and class.
_ADDED = re.compile(r"__(doc|file|loader|name|package|spec|module|dict|weakref)__|_pybind11_\w+")
Parameters = tuple[str, ...]


def stub(name: str) -> ast.Module:
    """The tree of a stub."""
    return ast.parse((SOURCE / f"{name}.pyi").read_text())


def parameters_of_stub(function: ast.FunctionDef) -> Parameters:
    """Names, ``*`` before those by name only, ``=`` behind those with a default. By place only: ``argN``."""
    args = function.args
    first = [arg for arg in (*args.posonlyargs, *args.args) if arg.arg != "self"]
    by_place = len([arg for arg in args.posonlyargs if arg.arg != "self"])
    found = [f"arg{n}" if n < by_place else arg.arg for n, arg in enumerate(first)]
    for place in range(len(found) - len(args.defaults), len(found)):
        found[place] += "="
    if args.kwonlyargs:
        found.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(arg.arg + ("=" if default is not None else ""))
    return tuple(found)


def parameters_of_module(documentation: str) -> Parameters:
    """The same from the signature that pybind11 writes into the first line of a function's documentation."""
    inside = documentation.splitlines()[0].partition("(")[2].rpartition(") ->")[0]
    inside = re.sub(r'"[^"]*"|\'[^\']*\'', "_", inside)
    while re.search(r"\[[^\[\]]*\]", inside):
        inside = re.sub(r"\[[^\[\]]*\]", "", inside)
    parts = [part.strip() for part in inside.split(",") if part.strip()]
    names = [part.partition(":")[0] + ("=" if "=" in part else "") for part in parts]
    return tuple(name for name in names if name != "self")


def names_of_stub(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module's or a class's body declares."""
    found: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = statement
    return found


def differences(where: str, declared: dict[str, ast.stmt], have: object) -> list[str]:
    """What a stub and a module or class do not agree on."""
    there = {name for name in vars(have) if not _ADDED.fullmatch(name)}
    result = [f"{where}.{name}: not in the stub" for name in sorted(there - set(declared))]
    result += [f"{where}.{name}: not in the module" for name in sorted(set(declared) - there)]
    for name in sorted(there & set(declared)):
        statement, value = declared[name], vars(have)[name]
        if isinstance(statement, ast.ClassDef):
            result += differences(f"{where}.{name}", names_of_stub(statement.body), value)
        elif isinstance(value, property):
            read_only = isinstance(statement, ast.FunctionDef)
            if read_only != (value.fset is None):
                result.append(f"{where}.{name}: {'read-only in the stub alone' if read_only else 'read-only'}")
        elif isinstance(statement, ast.FunctionDef):
            if name == "__exit__":  # takes what it is given
                continue
            expected, got = parameters_of_module(value.__doc__), parameters_of_stub(statement)
            if expected != got:
                result.append(f"{where}.{name}: expected the parameters {expected}, got {got}")
    return result


def modules() -> list[str]:
    """The compiled modules of this build."""
    return [name for name in ("_core", "_onednn") if list(PACKAGE.glob(f"{name}.*.so"))]


@pytest.mark.parametrize("name", modules())
def test_stub_and_module_agree(name: str) -> None:
    try:
        module = importlib.import_module(f"amx_sft_moe.{name}")
    except ImportError as error:
        pytest.skip(str(error))
    assert differences(name, names_of_stub(stub(name).body), module) == []


def test_stubs_are_compared_in_earnest() -> None:
    module = ModuleType("m")
    module.known = lambda: None
    module.known.__doc__ = (
        "known(first: list[int, int], second: object = None, arg2: str = 'a, b') -> None\n\nMore."
    )
    module.extra = 1
    declared = ast.parse("def known(first: int, seconds: int = 0) -> None: ...\nmissing: int")
    assert parameters_of_module(module.known.__doc__) == ("first", "second=", "arg2=")
    assert differences("m", names_of_stub(declared.body), module) == [
        "m.extra: not in the stub",
        "m.missing: not in the module",
        "m.known: expected the parameters ('first', 'second=', 'arg2='), got ('first', 'seconds=')",
    ]


def test_package_says_that_it_has_types() -> None:
    assert (PACKAGE / "py.typed").is_file()
