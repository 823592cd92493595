"""The built tests of a folder of their own, and the same around one mutant."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from machine import SOURCES, Machine
from mutants import Mutant, Part, candidates

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include/amx_sft_moe"
CPU_LIMIT = 600  # seconds of CPU time; a mutant that takes more hangs, however busy the machine is
WALL_LIMIT = 3600  # seconds; a mutant that takes longer sleeps for ever
# Programs with an operator new of their own, or with a main of their own.
NOT_IN_ONE_PROGRAM = (
    "test_failed_pass",
    "test_operator_steady_state",
    "test_operator_out_of_memory",
    "test_nvtx",
    "test_amx_emulator",
    "test_two_units",
    "test_registry",
)


class AllSkippedError(Exception):
    """No test of a filter ran: that says nothing of a mutant."""


class Bench:
    """Configures and builds the tests, then builds them again around a mutant."""

    def __init__(self, build: Path, machine: Machine) -> None:
        self.build = build
        self.scratch = build / "mutant"
        self.libraries = ["-ldl", *(["-ldnnl"] if machine.onednn else [])]
        self._configure(machine)
        commands = json.loads((build / "compile_commands.json").read_text())
        self.commands = {Path(c["file"]).stem: c for c in commands if "/tests/" in c["file"]}
        self.programs = sorted(
            p.stem
            for p in (ROOT / "tests/cpp").glob("test_*.cpp")
            if p.stem in self.commands and not p.stem.startswith(NOT_IN_ONE_PROGRAM)
        )
        run(["cmake", "--build", build, "--target", *self.programs])
        self.archives = [
            # Of one program alone, which cannot be linked without.
            build / "tests/CMakeFiles/test_aligned_buffer.dir/support/allocation_counter.cpp.o",
            build / "tests/libamx_sft_moe_test_support.a",
            *sorted(build.rglob("libamx_emulator_static.a")),
            *sorted(build.rglob("libgtest.a")),
        ]

    def _configure(self, machine: Machine) -> None:
        flags = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
            "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON",  # they would be those of the unbroken library
            "-DAMX_SFT_MOE_BENCHMARKS=OFF",
            "-DAMX_SFT_MOE_EXAMPLES=OFF",
            f"-DAMX_SFT_MOE_ONEDNN={'ON' if machine.onednn else 'OFF'}",
            f"-DAMX_SFT_MOE_SOFT_AVX512={'ON' if machine.soft_avx512 else 'OFF'}",
            "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON",  # from its sources, so that libgtest.a lies in the build
        ]
        run(["cmake", "-S", ROOT, "-B", self.build, "-G", "Ninja", *flags])

    def compile(self, mutant: Mutant, labels: Sequence[str], sources: Sequence[str]) -> Path | None:
        """The test program around the mutant in these kernels and sources; None: it does not compile."""
        self._break(mutant)
        names = [*(SOURCES[label] for label in labels), *sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            if not all(pool.map(self._compiles, names)):
                return None
        # Mutated objects first: of equal inline functions the linker keeps the first.
        objects = [self.scratch / f"{name}.o" for name in names]
        objects += [self._object(name) for name in self.programs if name not in names]
        program = self.scratch / "tests"
        link = ["c++", "-fopenmp", *objects, *self.archives, *self.libraries, "-o", program]
        return program if subprocess.run(link, stderr=subprocess.DEVNULL).returncode == 0 else None

    def _break(self, mutant: Mutant) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.copytree(ROOT / "include", self.scratch / "include")
        path = self.scratch / "include/amx_sft_moe" / mutant.file
        lines = path.read_text().splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.new + "\n"
        path.write_text("".join(lines))

    def _compiles(self, name: str) -> bool:
        options = self.commands[name]["command"].split(" -o ")[0]
        options = options.replace(str(ROOT / "include"), str(self.scratch / "include")).replace("-Werror", "-w")
        command = f"{options} -o {self.scratch}/{name}.o -c {self.commands[name]['file']}"
        return subprocess.run(command, shell=True, stderr=subprocess.DEVNULL, cwd=self.build).returncode == 0

    def _object(self, program: str) -> Path:
        return self.build / f"tests/CMakeFiles/{program}.dir/cpp/{program}.cpp.o"

    def require_sound(self, parts: dict[str, Part]) -> None:
        """The library as it is must build, run and pass with each kernel that the parts need.

        Else every mutant would seem not to compile, noticed, or not noticed.
        """
        for label in dict.fromkeys(label for part in parts.values() for label in part.labels):
            of_label = {name: part for name, part in parts.items() if label in part.labels}
            mutant = candidates(INCLUDE, next(iter(of_label)))[0]
            sources = dict.fromkeys(source for part in of_label.values() for source in part.sources)
            program = self.compile(replace(mutant, new=mutant.old), [label], list(sources))
            if program is None:
                raise SystemExit(f"mutate: the unchanged library does not build with kernel {label}")
            try:
                failed = self.notices(program, [label])
            except AllSkippedError as error:
                raise SystemExit(f"mutate: kernel {label} does not run here: {error}") from error
            if failed is not None:
                raise SystemExit(f"mutate: the unchanged library fails {failed} with kernel {label}")

    def notices(self, program: Path, labels: Sequence[str]) -> str | None:
        """The name of the first test that fails, None where all pass. Raises AllSkippedError."""
        negative = ":".join(f"*_{label}.*:*/{label}.*" for label in SOURCES if label not in labels)
        first = ":".join(f"OperatorCases_{label}.*/plain:OperatorExact/{label}.*" for label in labels)
        for positive in (first, "*"):
            if (failed := failed_test(program, f"{positive}-{negative}")) is not None:
                return failed
        return None


def failed_test(program: Path, tests: str) -> str | None:
    """The name of the first test that fails among those of a filter, None where all pass."""
    try:
        done = subprocess.run(
            [program, f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_brief=1"],
            capture_output=True,
            text=True,
            timeout=WALL_LIMIT,
            errors="replace",
            preexec_fn=limit_cpu_time,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", "MALLOC_PERTURB_": "165"},
        )
    except subprocess.TimeoutExpired:
        return "time limit"
    if done.returncode == 0:
        if "[  PASSED  ] 0 tests" in done.stdout:
            raise AllSkippedError(f"no test of {tests.partition('-')[0]} ran")
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith("[  FAILED  ]")]
    return failed[0].split("]")[1].split(",")[0].strip() if failed else f"exit status {done.returncode}"


def limit_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 5))


def run(command: list[object]) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
