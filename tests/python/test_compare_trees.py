"""Turns of compare_trees.py and compare_steps.py: no tree has a place or a part of the weights of its own."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare_steps
import compare_trees


@pytest.mark.parametrize("trees", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("least", [2, 9, 10])
def test_trees_share_places_and_parts(trees: int, least: int) -> None:
    parts = compare_trees.parts_for(trees, least)
    assert least <= parts <= least + trees
    calls: list[tuple[int, int]] = []
    runs = [lambda part, tree=tree: calls.append((tree, part % parts)) for tree in range(trees)]
    turns = trees * parts  # after which it begins anew
    times = compare_trees.compare(runs, turns - 1)  # and one that warms up
    assert [len(of_one) for of_one in times] == [turns - 1] * trees
    met = Counter(calls)
    assert set(met.values()) == {trees}
    assert len(met) == trees * parts
    places = Counter((tree, n % trees) for n, (tree, _) in enumerate(calls))
    assert set(places.values()) == {parts}
    # A part comes again after all others: no cache has it by then.
    assert all(calls[n][1] == n % parts for n in range(len(calls)))


class FakeLibrary:
    """Steps that take as many seconds as were made, all of them in the backward."""

    def __init__(self) -> None:
        self.steppers: list[object] = []

    def run_step(self, stepper: object, seconds: ctypes.Array[ctypes.c_double]) -> bool:
        self.steppers.append(stepper)
        seconds[1] = len(self.steppers)
        return True


def test_steps_of_a_tree_are_made_by_its_own_operator_and_the_first_does_not_count() -> None:
    libraries = [FakeLibrary(), FakeLibrary()]
    times = compare_steps.compare(libraries, ["a", "b"], 2)
    assert [library.steppers for library in libraries] == [["a"] * 3, ["b"] * 3]
    assert times == [[(0, 2, 2), (0, 3, 3)]] * 2


def fake_library(layer: int | None, stepper: int | None, stepped: bool) -> SimpleNamespace:
    """What ctypes makes of such results of benchmarks/step_library.cpp."""
    return SimpleNamespace(
        new_layer=lambda *_: layer,
        new_stepper=lambda *_: stepper,
        run_step=lambda *_: stepped,
        last_error=lambda: b"why",
    )


def test_what_a_library_refuses_ends_with_its_message() -> None:
    with pytest.raises(SystemExit, match="--layer abacus: why"):
        compare_steps.Steppers([fake_library(None, 1, True)], "abacus", "zipf", 8, 2)
    libraries = [fake_library(1, 1, True), fake_library(1, None, True)]
    with pytest.raises(SystemExit, match="an operator with 2 threads: why"):
        compare_steps.Steppers(libraries, "small", "zipf", 8, 2)
    with pytest.raises(SystemExit, match="a step: why"):
        compare_steps.compare([fake_library(1, 1, False)], ["a"], 1)
