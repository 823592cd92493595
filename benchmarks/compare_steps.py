"""Times steps of the operator of several source trees beside one another, in one process:

    python benchmarks/compare_steps.py ../before . [--kernel avx2] [--layer mixtral] [--spread zipf] \
        [--tokens 128 512]

As compare_trees.py does for GEMM forms: programs that run one after the other differ by the pages that they
get, by up to a tenth. Here the trees' operators take turns over the same weights; in its turn each makes two
steps, of which the second counts. Printed are the medians in ms, and those of the ratios to the first tree's.
Needs GCC 12 or clang 16 (`CXX`), and numpy.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from compare_trees import KERNELS, build, order
from whole_numbers import positive

Times = tuple[float, float, float]


def fail(library: ctypes.CDLL, what: str) -> NoReturn:
    sys.exit(f"{what}: {library.last_error().decode()}")


class Steppers:
    """An operator of each library over one layer."""

    def __init__(
        self, libraries: list[ctypes.CDLL], layer: str, spread: str, tokens: int, threads: int
    ) -> None:
        self.libraries = libraries
        for library in libraries:
            library.new_layer.restype = library.new_stepper.restype = ctypes.c_void_p
            library.run_step.restype = ctypes.c_bool
            library.last_error.restype = ctypes.c_char_p
        self.layer = ctypes.c_void_p(
            libraries[0].new_layer(layer.encode(), ctypes.c_int64(tokens), spread == "zipf")
        )
        if self.layer.value is None:
            fail(libraries[0], f"--layer {layer}")
        self.steppers = [ctypes.c_void_p(library.new_stepper(self.layer, threads)) for library in libraries]
        for library, stepper in zip(libraries, self.steppers, strict=True):
            if stepper.value is None:
                fail(library, f"an operator with {threads} threads")

    def free(self) -> None:
        for library, stepper in zip(self.libraries, self.steppers, strict=True):
            library.free_stepper(stepper)
        self.libraries[0].free_layer(self.layer)


def compare(libraries: list[ctypes.CDLL], steppers: list[ctypes.c_void_p], turns: int) -> list[list[Times]]:
    """Of each operator and turn but the first the seconds of forward, backward and step."""
    times: list[list[Times]] = [[] for _ in libraries]
    for which in order(len(libraries), turns + 1):
        seconds = (ctypes.c_double * 2)()
        if not libraries[which].run_step(steppers[which], seconds):
            fail(libraries[which], "a step")
        times[which].append((seconds[0], seconds[1], sum(seconds)))
    return [own[1:] for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", type=Path, help="checkouts; ratios are to the first")
    parser.add_argument("--kernel", choices=KERNELS, default="avx512")
    parser.add_argument("--layer", default="qwen3-30b-a3b", help="one of benchmarks/layer.hpp")
    parser.add_argument("--spread", choices=("uniform", "zipf"), default="uniform", help="of the routes")
    parser.add_argument("--tokens", nargs="+", type=positive, default=[8, 128, 512])
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--turns", type=positive, default=15)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        # One program for all: they share the layer that it makes.
        program = Path(__file__).with_name("step_library.cpp")
        libraries = [build(tree, args.kernel, Path(folder), program) for tree in args.trees]
    print(f"{args.layer}, {args.spread}, {args.kernel}, {args.threads} threads, {args.turns} turns")
    for tokens in args.tokens:
        layer = Steppers(libraries, args.layer, args.spread, tokens, args.threads)
        times = compare(libraries, layer.steppers, args.turns)
        layer.free()
        for tree, own in zip(args.trees, times, strict=True):
            columns = []
            for i, phase in enumerate(("forward", "backward", "step")):
                ratio = statistics.median(a[i] / b[i] for a, b in zip(own, times[0], strict=True))
                columns.append(f"{phase} {statistics.median(t[i] for t in own) * 1e3:7.2f} ms, {ratio:.3f}")
            print(f"T={tokens:<5} {tree}: " + "   ".join(columns), flush=True)


if __name__ == "__main__":
    main()
