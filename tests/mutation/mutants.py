"""Single-line mutants of the library's headers: which lines may be broken, and how."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

_PLAIN = ["portable_bf16", "avx512_bf16_bf16"]
_TILES = ["amx_bf16_bf16"]  # K by 32 elements: zeros behind a short K are read, where the others have none

# How many mutants of each part, and the kernels (labels of tests/support/moe.hpp) whose tests have to notice:
# one group after the other, until one does.
PARTS = {
    "arch/portable": (14, [["portable_bf16", "portable_fp32"], _TILES]),  # where operands are strided
    "arch/avx2": (14, [["avx2_bf16", "avx2_fp32"]]),
    "arch/avx512": (24, [["avx512_bf16", "avx512_bf16_bf16"], _TILES]),  # the tiles' rows are packed there
    "arch/amx": (12, [_TILES]),
    "gemm": (16, [_PLAIN, _TILES]),
    "lora": (12, [_PLAIN, _TILES]),
    "moe": (32, [_PLAIN, _TILES]),
    "operator": (16, [["portable_bf16"]]),
    "parallel": (4, [["portable_bf16"]]),
}
LABELS = list(dict.fromkeys(label for _, groups in PARTS.values() for group in groups for label in group))

# Lines whose change alters speed or a message only, or that another program than these tests covers.
_LEFT_OUT = re.compile(
    r"prefetch|[Aa]head|static_assert|^\s*//|^\s*#|template <|AMX_SFT_MOE_UNROLL|timer|Phase::|\btime\("
    r"|^\s*(using|struct|class)\b|concat\(|NOLINT|memory_order|noexcept|\bbytes\b|\bthrow\b|default;|^\s*\""
    r"|^\s*(std::size_t|index_t|int|bool|float)( \w+ = \w+,?)+;|(reserve|level)_threads"
)
# Sizes that change speed only; the registry, with tests of its own; panels that only the kernel onednn has.
_FILES_LEFT_OUT = {
    "gemm/blocking.hpp",
    "operator/kernel_registry.hpp",
    "operator/any_sft_moe.hpp",
    "arch/avx2/pack.hpp",
}


@dataclass(frozen=True)
class Mutant:
    """``new`` in place of ``old`` as line ``line`` (from 1) of ``file``, relative to include/amx_sft_moe/."""

    part: str
    file: str
    line: int
    old: str
    new: str
    kind: str


def _swap(one: str, other: str) -> list[tuple[str, str]]:
    return [(rf"\b{one}\b", other), (rf"\b{other}\b", one)]


# kind -> (pattern, replacement); each occurrence in a line is a mutant of its own.
_OPERATORS: dict[str, list[tuple[str, str]]] = {
    "tail off by one": [
        (r" < (?=\w)", " <= "),
        (r" <= ", " < "),
        (r" \+ 1\b", ""),
        (r" - 1\b", ""),
        (r" > ", " >= "),
        (r" >= ", " > "),
    ],
    "wrong sign": [
        (r"(?<=[\w\)\]]) \+ (?=[\w\(])", " - "),
        (r"(?<=[\w\)\]]) - (?=[\w\(])", " + "),
        (r" \+= ", " -= "),
    ],
    "wrong operation": [
        (r"std::min\b", "std::max"),
        (r"std::max\b", "std::min"),
        (r" && ", " || "),
        (r" \|\| ", " && "),
        (r" == ", " != "),
        (r" != ", " == "),
        (r"\btrue\b", "false"),
        (r"\bfalse\b", "true"),
        (r"fmadd", "fnmadd"),
        (r"\bround_up\b", "ceil_div"),
    ],
    "swapped indices": [
        *_swap("row_stride", "col_stride"),
        *_swap("rows", "cols"),
        *_swap("row", "col"),
        *_swap("hidden", "intermediate"),
        *_swap("row_begin", "panel_begin"),
    ],
    "other operand": [
        *_swap("gate", "up"),
        *_swap("gate_a", "gate_b"),
        *_swap("up_a", "up_b"),
        *_swap("down_a", "down_b"),
        *_swap("v_gate", "v_up"),
        *_swap("u_gate", "u_up"),
        *_swap("grad_gate", "grad_up"),
        *_swap("low", "high"),
    ],
    "dropped factor": [
        (r" \* (scale|weight|weights|to\.scale|factor|scaling|src\.col_stride|kk?|kPanelCols|kGroup)\b", ""),
        (r"\b(scaling|scale)(?=[,)}])", "1.0F"),
    ],
    "other constant": [
        (r"(?<![\w.])0(?![\w.])", "1"),
        (r"(?<![\w.])1(?![\w.])", "2"),
        (r"(?<![\w.])16(?![\w.])", "15"),
    ],
}
_STATEMENT = re.compile(r"^\s+[\w:.\->\[\]*]+(?:<[\w:, ]+>)?(?:\(.*\)| [-+*]?= .*);\s*$")


# The smaller or larger of two: at equality either one, so that < for <= changes nothing.
_CHOICE = re.compile(r"(\w[\w .+\-*()]*?) [<>]=? ([\w.]+) \? (?:\1 : \2|\2 : \1)\b")


def _mutations_of(line: str) -> list[tuple[str, str]]:
    code, _, comment = line.partition("//")
    choices = [match.span() for match in _CHOICE.finditer(code)]
    found = []
    for kind, patterns in _OPERATORS.items():
        for pattern, replacement in patterns:
            for match in re.finditer(pattern, code):
                if kind == "tail off by one" and any(a < match.start() < b for a, b in choices):
                    continue
                new = code[: match.start()] + replacement + code[match.end() :]
                found.append((kind, new + ("//" + comment if comment else "")))
    if _STATEMENT.match(code) and not re.match(r"\s+(const|auto|return|index_t|int|float)\b", code):
        found.append(("dropped statement", re.match(r"\s*", code).group() + ";"))
    return found


def candidates(include: Path, part: str) -> list[Mutant]:
    """All mutants of the files below ``include / part``."""
    found = []
    for path in sorted((include / part).rglob("*.hpp")):
        file = path.relative_to(include).as_posix()
        if file in _FILES_LEFT_OUT:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if _LEFT_OUT.search(line):
                continue
            found += [Mutant(part, file, number, line, new, kind) for kind, new in _mutations_of(line)]
    return found


def drawn(include: Path, seed: int) -> dict[str, list[Mutant]]:
    """Per part all its mutants in the order in which they are tried: kinds by turns, places at random."""
    order = {}
    for part in PARTS:
        by_kind: dict[str, list[Mutant]] = {}
        for mutant in candidates(include, part):
            by_kind.setdefault(mutant.kind, []).append(mutant)
        chance = random.Random(f"{seed} {part}")
        for mutants in by_kind.values():
            chance.shuffle(mutants)
        queues = list(by_kind.values())
        order[part] = [queue.pop() for _ in range(max(map(len, queues))) for queue in queues if queue]
    return order
