"""tests/mutation: which lines are broken, which headers are not, and that skipped tests say nothing."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mutation"))

import machine
import mutant_bench
import mutants
import mutate

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include/amx_sft_moe"
ALL = [mutant for part in mutants.PARTS for mutant in mutants.candidates(INCLUDE, part)]
HARDWARE = machine.Machine(frozenset({"avx2", "avx512f", "avx512_bf16"}), simde=False, onednn=True)


def test_every_part_and_every_kind_has_mutants() -> None:
    assert {mutant.part for mutant in ALL} == set(mutants.PARTS)
    assert {mutant.kind for mutant in ALL} == set(mutants.KINDS)


def test_every_header_is_broken_or_left_out_with_a_reason() -> None:
    broken = [file for part in mutants.PARTS for file in mutants.files_of(INCLUDE, part)]
    assert len(broken) == len(set(broken))
    for path in INCLUDE.rglob("*.hpp"):
        file = path.relative_to(INCLUDE).as_posix()
        assert (file in broken) != any(fnmatch(file, left) for left in mutants.FILES_LEFT_OUT), file


def test_every_operator_of_the_tests_can_be_built_around_a_mutant() -> None:
    sources = {path.stem for path in (ROOT / "tests/support").glob("moe_*.cpp")}
    assert sorted(machine.SOURCES.values()) == sorted(sources)


def test_mutants_are_other_lines_each_once() -> None:
    assert all(mutant.new != mutant.old for mutant in ALL)
    assert len({(m.file, m.line, m.new) for m in ALL}) == len(ALL)


def test_every_use_of_what_threads_wait_for_loses_it() -> None:
    barriers = [m for m in ALL if m.kind == "missing barrier"]
    changes = "\n".join(f"{m.file}: {m.old.strip()} -> {m.new.strip()}" for m in barriers)
    for expected in (
        "if (!unfinished[task.group].finish() ||",
        "unfinished[g].reset(1);",
        "fetch_sub(1, std::memory_order_acq_rel) >= 1;",
        "fetch_sub(1, std::memory_order_acq_rel) == 2;",
        "if (flag_.load()) throw",
    ):
        assert expected in changes
    assert {m.part for m in barriers} >= {"moe", "operator", "parallel"}
    # Few and early: drawn with any seed.
    for part in ("moe", "operator", "parallel"):
        assert mutants.drawn(INCLUDE, part, seed=3)[0].kind == "missing barrier"


@pytest.mark.parametrize(
    "line",
    [
        "  _mm_prefetch(row + 1, _MM_HINT_T0);",
        "      steps.far[d] = at + kFarRows < product.k ? product.b.row(at + kFarRows) : steps.b[d];",
        "    raised_.store(true, std::memory_order_relaxed);",
        "  // a + b",
    ],
)
def test_what_changes_no_result_is_left_alone(line: str) -> None:
    assert mutants._mutations_of(line) == []


def test_of_an_error_the_condition_is_broken_and_not_the_text() -> None:
    text = '  if (got < low) throw ArgumentError(concat(name, " + 1 of true"));'
    assert mutants._mutations_of(text) == [
        ("tail off by one", text.replace(" < ", " <= ")),
        ("other operand", text.replace("low", "high")),
    ]
    assert mutants._mutations_of("    throw std::bad_alloc();") == []


def test_draws_are_all_candidates_in_an_order_of_the_seed() -> None:
    first, second = (mutants.drawn(INCLUDE, "lora", seed) for seed in (1, 2))
    assert first != second
    assert first == mutants.drawn(INCLUDE, "lora", 1)
    candidates = mutants.candidates(INCLUDE, "lora")
    assert sorted(first, key=repr) == sorted(second, key=repr) == sorted(candidates, key=repr)


def test_known_equivalents_are_mutants() -> None:
    assert mutants.known_equivalents()
    assert mutants.unmatched_equivalents(INCLUDE) == []


def test_an_equivalent_of_a_line_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("lora/products.hpp", "no such line", "nor this")
    monkeypatch.setattr(mutants, "known_equivalents", lambda: {gone: "a reason"})
    assert mutants.unmatched_equivalents(INCLUDE) == [gone]


def test_kernels_and_sources_of_all_parts_exist() -> None:
    for part in mutants.PARTS.values():
        for name in [*(machine.SOURCES[label] for label in part.labels), *part.sources]:
            assert any((ROOT / "tests" / folder / f"{name}.cpp").exists() for folder in ("cpp", "support"))
    assert {label for part in mutants.PARTS.values() for label in part.labels} <= set(machine.SOURCES)


def left_out(of: machine.Machine) -> set[str]:
    return set(mutants.PARTS) - set(mutate.parts_here(of, None, mutate.Report(None)))


def test_parts_without_their_kernels_are_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert left_out(HARDWARE) == set()
    assert capsys.readouterr().out == ""
    assert left_out(replace(HARDWARE, onednn=False)) == {"onednn", "onednn/avx512"}
    soft = replace(HARDWARE, flags=frozenset({"avx2"}), simde=True)
    assert soft.soft_avx512
    assert not replace(HARDWARE, simde=True).soft_avx512
    assert left_out(soft) == {"onednn/avx512"}
    capsys.readouterr()
    assert left_out(replace(soft, simde=False)) >= {"arch/avx512", "arch/amx"}
    assert "LEFT OUT: arch/amx: kernel amx_bf16_bf16 needs AVX512-BF16, or SIMDe" in capsys.readouterr().out


def program_that(folder: Path, text: str, status: int = 0) -> Path:
    program = folder / "tests"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_tests_that_fail_notice_and_tests_that_are_skipped_say_nothing(tmp_path: Path) -> None:
    assert mutant_bench.failed_test(program_that(tmp_path, "[  PASSED  ] 10 tests."), "A.*") is None
    assert mutant_bench.failed_test(program_that(tmp_path, "[  FAILED  ] A.B, of C", 1), "A.*") == "A.B"
    assert mutant_bench.failed_test(program_that(tmp_path, "", 7), "A.*") == "exit status 7"
    skipped = program_that(tmp_path, "[  PASSED  ] 0 tests.\n[  SKIPPED ] 3 tests.")
    with pytest.raises(mutant_bench.AllSkippedError, match=r"no test of A\.\* ran"):
        mutant_bench.failed_test(skipped, "A.*-B.*")
