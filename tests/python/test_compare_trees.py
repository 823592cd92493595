"""The turns of benchmarks/compare_trees.py: no tree has a place or a part of the weights of its own."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

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
