"""Breaks one line of the library at a time and reports which mutants the C++ tests notice.

    python tests/mutation/mutate.py BUILD [--seed N] [--share X] [--part moe] [--report FILE]

BUILD is a folder of its own; the tests are configured and built there first. Per mutant only the operator of
the kernels concerned is compiled again. A mutant that does not compile does not count, one that hangs or
crashes is noticed. Survivors that are known, with their reason, stand in equivalent.txt. Exit status 1 when
fewer than 95 % of the others are noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from mutants import LABELS, PARTS, Mutant, drawn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE_OF_LABEL = {
    "avx512_bf16": "avx512_widened_bf16",
    "avx512_bf16_bf16": "avx512_bf16",
    "amx_bf16_bf16": "amx_bf16",
}
CPU_LIMIT = 600  # seconds of CPU time; a mutant that takes more hangs, however busy the machine is
WALL_LIMIT = 3600  # seconds; a mutant that takes longer sleeps for ever
# Programs with an operator new of their own, or with a main of their own.
NOT_IN_ONE_PROGRAM = (
    "test_operator_steady_state",
    "test_operator_out_of_memory",
    "test_nvtx",
    "test_amx_emulator",
    "test_two_units",
    "test_registry",
    "test_onednn_cache",  # of a kernel that is left out
)


class Bench:
    """The built tests, and how to build them again around a mutant."""

    def __init__(self, build: Path) -> None:
        self.build = build
        self.scratch = build / "mutant"
        flags = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
            "-DAMX_SFT_MOE_BENCHMARKS=OFF",
            "-DAMX_SFT_MOE_EXAMPLES=OFF",
            "-DAMX_SFT_MOE_ONEDNN=OFF",
            "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON",  # from its sources, so that libgtest.a lies in the build
        ]
        run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *flags])
        commands = json.loads((build / "compile_commands.json").read_text())
        self.commands = {Path(c["file"]).stem: c["command"] for c in commands if "/tests/" in c["file"]}
        self.programs = sorted(
            p.stem for p in (ROOT / "tests/cpp").glob("test_*.cpp") if not p.stem.startswith(NOT_IN_ONE_PROGRAM)
        )
        run(["cmake", "--build", build, "--target", *self.programs])
        self.objects = [
            next((build / "tests").glob(f"CMakeFiles/{p}.dir/cpp/{p}.cpp.o")) for p in self.programs
        ]
        self.archives = [
            build / "tests/libamx_sft_moe_test_support.a",
            *sorted(build.rglob("libamx_emulator_static.a")),
            *sorted(build.rglob("libgtest.a")),
        ]
        self.include = ROOT / "include"

    def compile(self, mutant: Mutant, labels: list[str]) -> Path | None:
        """The test program around the mutant in these kernels; None where it does not compile."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.copytree(self.include, self.scratch / "include")
        path = self.scratch / "include/amx_sft_moe" / mutant.file
        lines = path.read_text().splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.new + "\n"
        path.write_text("".join(lines))
        jobs, objects = [], []
        for label in labels:
            name = "moe_" + SOURCE_OF_LABEL.get(label, label)
            objects.append(self.scratch / f"{name}.o")
            command = (
                self.commands[name].split(" -o ")[0].replace(str(self.include), str(self.scratch / "include"))
            )
            command = command.replace("-Werror", "-w")
            jobs.append(
                subprocess.Popen(
                    f"{command} -o {objects[-1]} -c {ROOT}/tests/support/{name}.cpp",
                    shell=True,
                    stderr=subprocess.DEVNULL,
                    cwd=self.build,
                )
            )
        codes = [job.wait() for job in jobs]
        if any(codes):
            return None
        program = self.scratch / "tests"
        # Mutated objects first: of equal inline functions the linker keeps the first.
        link = ["c++", "-fopenmp", *objects, *self.objects, *self.archives, "-ldl", "-o", program]
        return program if subprocess.run(link, stderr=subprocess.DEVNULL).returncode == 0 else None

    def require_sound(self, any_mutant: Mutant) -> None:
        """The library as it is must build and pass: else every mutant would seem not to compile, or noticed."""
        labels = PARTS[any_mutant.part][1][0]
        program = self.compile(replace(any_mutant, new=any_mutant.old), labels)
        if program is None:
            raise SystemExit("mutate: the unchanged library does not build")
        if (failed := self.notices(program, labels)) is not None:
            raise SystemExit(f"mutate: the unchanged library fails {failed}")

    def notices(self, program: Path, labels: list[str]) -> str | None:
        """The name of the first test that fails, None where all pass."""
        others = [label for label in LABELS if label not in labels]
        others += ["avx512_fp32", "onednn_bf16", "onednn_fp32"]
        negative = ":".join(f"*_{label}.*:*/{label}.*" for label in others)
        first = ":".join(f"OperatorCases_{label}.*/plain:OperatorExact/{label}.*" for label in labels)
        for positive in (first, "*"):
            try:
                done = subprocess.run(
                    [program, f"--gtest_filter={positive}-{negative}", "--gtest_fail_fast", "--gtest_brief=1"],
                    capture_output=True,
                    text=True,
                    timeout=WALL_LIMIT,
                    errors="replace",
                    preexec_fn=limit_cpu_time,
                    env={**os.environ, "OMP_WAIT_POLICY": "passive", "MALLOC_PERTURB_": "165"},
                )
            except subprocess.TimeoutExpired:
                return "time limit"
            if done.returncode != 0:
                failed = [line for line in done.stdout.splitlines() if line.startswith("[  FAILED  ]")]
                return (
                    failed[0].split("]")[1].split(",")[0].strip()
                    if failed
                    else f"exit status {done.returncode}"
                )
        return None


def limit_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 5))


def run(command: list[object]) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


def known_equivalents() -> dict[tuple[str, str, str], str]:
    """(file, old line, new line), stripped, to the reason why nothing can be noticed."""
    known = {}
    for block in (HERE / "equivalent.txt").read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if len(lines) >= 4:
            known[lines[0], lines[1].removeprefix("- "), lines[2].removeprefix("+ ")] = " ".join(lines[3:])
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the numbers of mutants in mutants.py")
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    bench = Bench(options.build.resolve())
    known = known_equivalents()
    order = drawn(ROOT / "include/amx_sft_moe", options.seed)
    bench.require_sound(next(iter(order["parallel"])))
    counts: Counter[str] = Counter()
    report = []
    for part, (wanted, groups) in PARTS.items():
        if options.part not in (None, part):
            continue
        wanted = max(1, round(wanted * options.share))
        queue = iter(order[part])
        while wanted > 0 and (mutant := next(queue, None)) is not None:
            began = time.monotonic()
            if (mutant.file, mutant.old.strip(), mutant.new.strip()) in known:
                counts["known equivalents"] += 1
                continue
            program = bench.compile(mutant, groups[0])
            if program is None:
                counts["did not compile"] += 1
                continue
            wanted -= 1
            by = bench.notices(program, groups[0])
            for labels in groups[1:]:
                if by is None and (program := bench.compile(mutant, labels)) is not None:
                    by = bench.notices(program, labels)
            counts["survived" if by is None else "noticed"] += 1
            verdict = "SURVIVED" if by is None else f"noticed by {by}"
            change = f"- {mutant.old.strip()}\n+ {mutant.new.strip()}"
            text = f"{mutant.file}:{mutant.line} {mutant.kind}\n{change}\n  {verdict}"
            print(f"{text} ({time.monotonic() - began:.0f} s)\n", flush=True)
            report.append(text)
    tried = counts["noticed"] + counts["survived"]
    share = counts["noticed"] / max(tried, 1)
    summary = f"{counts['noticed']} of {tried} mutants noticed ({share:.1%}); " + ", ".join(
        f"{number} {name}" for name, number in counts.items() if name not in ("noticed", "survived")
    )
    print(summary)
    if options.report is not None:
        options.report.write_text(summary + "\n\n" + "\n\n".join(report) + "\n")
    return 0 if share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
