"""Times the GEMM forms of several source trees beside one another, in one process:

    python benchmarks/compare_trees.py ../before . [--kernel avx2] [--shape 2048 7168] [--tokens 1 4 8]

On a shared machine one program after the other shows the neighbours, not a change of a few percent. Here each
tree's headers become a library of their own, and the libraries take turns, in an order that moves on with each
turn, on the same bf16 weights in memory, in pages of 4 KiB. Printed are each one's rate, in GB/s of weights (of
x for gemm_tn), and the median of its ratios to the first.
Needs GCC 12 or clang 16 (`CXX`), and numpy.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from whole_numbers import positive

FORMS = ("nt", "nn", "tn")
KERNELS = {
    "amx_bf16": "AmxBf16",
    "avx512": "Avx512<amx_sft_moe::bf16>",
    "avx512_bf16": "Avx512Bf16",
    "avx2": "Avx2<amx_sft_moe::bf16>",
    "portable": "Portable<amx_sft_moe::bf16>",
}
MEMORY = 1 << 30  # bytes of weights: no cache holds them
A_TURN = 96 << 20  # bytes of weights that a turn passes over


def build(tree: Path, kernel: str, folder: Path, source: Path) -> ctypes.CDLL:
    """A program over the headers of a source tree as a library, loaded apart from all others."""
    if not (tree / "include" / "amx_sft_moe").is_dir():
        sys.exit(f"{tree}: no include/amx_sft_moe in it")
    library = folder / f"{len(list(folder.iterdir()))}.so"
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-fopenmp", "-fPIC", "-shared", f"-I{tree / 'include'}"]
    if "clang" not in compiler:
        flags.append("-fno-gnu-unique")  # tables of headers would be those of the first library in all others
    define = f"-DBENCH_KERNEL=amx_sft_moe::kernels::{KERNELS[kernel]}"
    subprocess.run([compiler, *flags, define, source, "-o", library, "-ldl"], check=True)
    forms = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL)
    if hasattr(forms, "is_available") and not forms.is_available():  # trees of before had no such function
        sys.exit(f"{kernel}: not available on this CPU")
    return forms


def forms_of(tree: Path) -> Path:
    """The tree's own program, as names in the headers may have changed, or this one's."""
    own = tree / "benchmarks" / "forms_library.cpp"
    return own if own.exists() else Path(__file__).with_name("forms_library.cpp")


def memory_of(count: int, huge_pages: bool) -> np.ndarray:
    """Room for so many 16-bit numbers. Weights of files and of torch mostly lie in pages of 4 KiB; numpy would
    ask for huge ones."""
    pages = mmap.mmap(-1, 2 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    except OSError:  # a kernel without huge pages
        if huge_pages:
            sys.exit("--huge-pages: this kernel has none")
    return np.frombuffer(pages, dtype=np.uint16)


def bf16_numbers(count: int, huge_pages: bool) -> np.ndarray:
    """Random numbers in bf16, which is the upper half of fp32."""
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    memory = memory_of(count + 32, huge_pages)
    from_line = -(memory.ctypes.data // 2) % 32  # tensors of torch begin with a cache line
    numbers = memory[from_line : from_line + count]
    numbers[:] = np.resize((values.view(np.uint32) >> 16).astype(np.uint16), count)
    return numbers


def parts_for(trees: int, least: int) -> int:
    """Into how many parts the weights are cut, at least so many: a number that shares no factor with that of
    the trees, or each tree would meet some of the parts only."""
    return next(parts for parts in itertools.count(least) if math.gcd(parts, trees) == 1)


def order(runs: int, turns: int) -> Iterator[int]:
    """Whose turn it is: everybody's once a turn, each of which begins with another one."""
    return ((turn + place) % runs for turn in range(turns) for place in range(runs))


def compare(runs: list[Callable[[int], None]], turns: int) -> list[list[float]]:
    """Seconds of each run in each turn but the first; run(i) passes over the i-th part of the weights."""
    seconds: list[list[float]] = [[] for _ in runs]
    for part, which in enumerate(order(len(runs), turns + 1)):
        begin = time.perf_counter()
        runs[which](part)
        seconds[which].append(time.perf_counter() - begin)
    return [times[1:] for times in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", type=Path, help="checkouts; ratios are to the first")
    parser.add_argument("--kernel", choices=KERNELS, default="avx512")
    parser.add_argument("--shape", nargs=2, type=positive, default=(1536, 2048), metavar=("OUT", "IN"))
    parser.add_argument("--tokens", nargs="+", type=positive, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--turns", type=positive, default=31)
    parser.add_argument("--huge-pages", action="store_true", help="weights and tokens in pages of 2 MiB")
    args = parser.parse_args()

    out, inner = args.shape
    matrix = 2 * out * inner
    matrices = max(16, A_TURN // matrix // 2 * 2)
    parts = parts_for(len(args.trees), max(2, MEMORY // (matrices * matrix)))
    weights = bf16_numbers(parts * matrices * out * inner, args.huge_pages)
    activations = bf16_numbers(max(args.tokens) * max(out, inner, 16), args.huge_pages)
    with tempfile.TemporaryDirectory() as folder:
        libraries = [build(tree, args.kernel, Path(folder), forms_of(tree)) for tree in args.trees]

    def run_of(library: ctypes.CDLL, form: str, tokens: int) -> Callable[[int], None]:
        function = library[f"run_{form}"]
        sizes = [ctypes.c_int64(n) for n in (matrices, out, inner)]

        def run(part: int) -> None:
            begin = weights.ctypes.data + part % parts * matrices * matrix
            pointer, other = ctypes.c_void_p(begin), ctypes.c_void_p(activations.ctypes.data)
            function(args.threads, ctypes.c_int64(tokens), pointer, *sizes, other)

        return run

    print(f"{args.kernel}, weights [{out}, {inner}], {args.threads} threads, {args.turns} turns")
    for form in args.forms:
        for tokens in args.tokens:
            times = compare([run_of(library, form, tokens) for library in libraries], args.turns)
            columns = []
            for tree, own in zip(args.trees, times, strict=True):
                ratio = statistics.median(a / b for a, b in zip(own, times[0], strict=True))
                rate = matrices * matrix / statistics.median(own) * 1e-9
                columns.append(f"{tree}: {rate:5.1f} GB/s, time {ratio:.3f}")
            print(f"gemm_{form} m={tokens:<4} " + "   ".join(columns), flush=True)


if __name__ == "__main__":
    main()
