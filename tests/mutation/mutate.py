"""Breaks one line of the library at a time and reports which mutants the C++ tests notice.

    python tests/mutation/mutate.py BUILD [--seed N] [--share X] [--part moe] [--report FILE]
    python tests/mutation/mutate.py --list [--seed N] [--share X] [--part moe]

BUILD is a folder of its own; the tests are configured and built there first. Per mutant only the operator of
the kernels concerned is compiled again. A mutant that does not compile does not count, one that hangs or
crashes is noticed. Survivors that are known, with their reason, stand in equivalent.txt. On CPUs without AVX512
its kernels are run in software, by SIMDe; parts of which this machine cannot run a kernel are left out, and the
output says so. Exit status 1 when fewer than 95 % of the mutants that count are noticed. --list builds nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from machine import Machine
from mutant_bench import INCLUDE, AllSkippedError, Bench
from mutants import (
    KINDS,
    PARTS,
    Mutant,
    Part,
    candidates,
    drawn,
    key_of,
    known_equivalents,
    unmatched_equivalents,
)


class Report:
    """What was tried, on the terminal and, from the first mutant on, in a file."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.counts: Counter[str] = Counter()
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        print(text, flush=True)
        self.texts.append(text)

    def verdict(self, mutant: Mutant, by: str | None, seconds: float) -> None:
        self.counts["survived" if by is None else "noticed"] += 1
        verdict = "SURVIVED" if by is None else f"noticed by {by}"
        self.note(f"{describe(mutant)}\n  {verdict} ({seconds:.0f} s)\n")
        self.save()

    def save(self) -> None:
        if self.file is not None:
            self.file.write_text("\n\n".join([self.summary(), *(text.strip() for text in self.texts)]) + "\n")

    @property
    def share(self) -> float:
        return self.counts["noticed"] / max(self.counts["noticed"] + self.counts["survived"], 1)

    def summary(self) -> str:
        tried = self.counts["noticed"] + self.counts["survived"]
        others = [f"{n} {name}" for name, n in self.counts.items() if name not in ("noticed", "survived")]
        return ", ".join([f"{self.counts['noticed']} of {tried} mutants noticed ({self.share:.1%})", *others])


def describe(mutant: Mutant) -> str:
    change = f"- {mutant.old.strip()}\n+ {mutant.new.strip()}"
    return f"{mutant.file}:{mutant.line} {mutant.kind}\n{change}"


def parts_here(machine: Machine, only: str | None, report: Report) -> dict[str, Part]:
    """The parts that can be tried; of the others it is said why not."""
    parts = {}
    for name, part in PARTS.items():
        if only not in (None, name):
            continue
        lacking = {label: lack for label in part.labels if (lack := machine.lacks(label))}
        if not lacking:
            parts[name] = part
            continue
        reasons = "; ".join(f"kernel {label} needs {lack}" for label, lack in lacking.items())
        report.note(f"LEFT OUT: {name}: {reasons}")
        report.counts[f"mutants of {name} left out"] = part.mutants
    return parts


def tried_of(part: Part, share: float) -> int:
    return max(1, round(part.mutants * share))


def unknown(name: str, seed: int, counts: Counter[str]) -> Iterator[Mutant]:
    """A part's mutants in their order, without those of equivalent.txt."""
    known = known_equivalents()
    for mutant in drawn(INCLUDE, name, seed):
        if key_of(mutant) in known:
            counts["known equivalents"] += 1
        else:
            yield mutant


def list_mutants(parts: dict[str, Part], seed: int, share: float) -> None:
    """How many there are of each kind, and those that come first: some of them may not compile."""
    for name in parts:
        of_kind = Counter(mutant.kind for mutant in candidates(INCLUDE, name))
        print(f"{name}: " + ", ".join(f"{of_kind[kind]} {kind}" for kind in KINDS if of_kind[kind]))
    for name, part in parts.items():
        for _, mutant in zip(range(tried_of(part, share)), unknown(name, seed, Counter()), strict=False):
            print(f"\n{describe(mutant)}")


def noticed_by(bench: Bench, mutant: Mutant, part: Part) -> tuple[bool, str | None]:
    """Whether it compiles, and what notices it: one group of kernels after the other, until one does."""
    for number, labels in enumerate(part.groups):
        program = bench.compile(mutant, labels, part.sources)
        if program is None and number == 0:
            return False, None
        try:
            if program is not None and (by := bench.notices(program, labels)) is not None:
                return True, by
        except AllSkippedError as error:  # they ran before it: nothing has noticed
            print(f"{mutant.file}:{mutant.line}: {error}", flush=True)
    return True, None


def try_part(bench: Bench, part: Part, mutants: Iterator[Mutant], wanted: int, report: Report) -> None:
    while wanted > 0 and (mutant := next(mutants, None)) is not None:
        began = time.monotonic()
        compiles, by = noticed_by(bench, mutant, part)
        if not compiles:
            report.counts["did not compile"] += 1
            continue
        wanted -= 1
        report.verdict(mutant, by, time.monotonic() - began)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, nargs="?")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the numbers of mutants in mutants.py")
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--list", action="store_true", help="say what would be tried, and build nothing")
    chosen = parser.parse_args()
    if chosen.build is None and not chosen.list:
        parser.error("BUILD: expected a folder to build in, got none")
    return chosen


def main() -> int:
    chosen = options()
    machine = Machine.this()
    report = Report(chosen.report)
    for file, old, new in unmatched_equivalents(INCLUDE):
        report.note(f"equivalent.txt: no such mutant any more: {file}\n- {old}\n+ {new}")
    parts = parts_here(machine, chosen.part, report)
    if chosen.list:
        list_mutants(parts, chosen.seed, chosen.share)
        return 0
    if not parts:
        raise SystemExit("mutate: nothing left to try")
    if machine.soft_avx512:
        report.note("AVX512, and by the emulator AMX, in software")
    bench = Bench(chosen.build.resolve(), machine)
    bench.require_sound(parts)
    for name, part in parts.items():
        mutants = unknown(name, chosen.seed, report.counts)
        try_part(bench, part, mutants, tried_of(part, chosen.share), report)
    report.save()
    print(report.summary())
    return 0 if report.share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
