"""Single-line mutants of the library's headers: which lines may be broken, and how."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """Headers, how many mutants of them are tried, and what has to notice."""

    mutants: int
    files: tuple[str, ...]  # below include/amx_sft_moe/; a name goes before another part's pattern
    # Kernels (labels of tests/support/moe.hpp) whose tests have to: one group after the other, until one does.
    groups: tuple[tuple[str, ...], ...]
    sources: tuple[str, ...] = ()  # of tests, that call these headers without an operator: compiled again too

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for group in self.groups for label in group))


_PLAIN = ("portable_bf16", "avx512_bf16_bf16")
_TILES = ("amx_bf16_bf16",)  # K by 32 elements: zeros behind a short K are read, where the others have none
_ONEDNN = ("onednn_plain_fp32", "onednn_ymm_bf16")

PARTS = {
    "arch": Part(
        12,
        ("arch/*.hpp",),
        (("portable_bf16", "avx2_bf16"), ("avx512_bf16",), _TILES),
        (
            "test_dot_blocks",
            "test_finished_strips",
            "test_gemm_columns",
            "test_gemm_tokens",
            "test_in_place",
            "test_paced_prefetch",
            "test_strip_walk",
        ),
    ),
    "arch/portable": Part(  # where operands are strided
        14,
        ("arch/portable/*.hpp",),
        (("portable_bf16", "portable_fp32"), _TILES),
        ("test_finished_strips",),
    ),
    "arch/avx2": Part(
        14,
        ("arch/avx2/*.hpp",),
        (("avx2_bf16", "avx2_fp32"),),
        ("test_dot_blocks", "test_finished_strips", "test_in_place"),
    ),
    "arch/avx512": Part(  # the tiles' rows are packed there
        24,
        ("arch/avx512/*.hpp",),
        (("avx512_bf16", "avx512_bf16_bf16"), _TILES),
        ("test_dot_blocks", "test_finished_strips", "test_gemm_columns", "test_gemm_tokens", "test_in_place"),
    ),
    "arch/amx": Part(12, ("arch/amx/*.hpp",), (_TILES,)),
    "core": Part(
        14,
        ("core/*.hpp",),
        (("portable_bf16",), ("avx2_bf16",)),
        ("problem", "test_locale", "test_overlap", "test_parallel", "test_sizes", "test_validate"),
    ),
    "gemm": Part(
        16,
        ("gemm/*.hpp",),
        (_PLAIN, _TILES),
        ("test_blocking", "test_finished_strips", "test_gemm_columns", "test_gemm_tokens", "test_strip_walk"),
    ),
    "lora": Part(12, ("lora/*.hpp",), (_PLAIN, _TILES)),
    "moe": Part(32, ("moe/*.hpp",), (_PLAIN, _TILES)),
    "operator": Part(16, ("operator/*.hpp",), (("portable_bf16",),), ("test_saved_stack", "test_validate")),
    "parallel": Part(10, ("parallel/*.hpp",), (("portable_bf16",),), ("test_parallel",)),
    # What only the kernel onednn calls, on any CPU, and with AVX512 (pairs of panels).
    "onednn": Part(
        8,
        ("arch/onednn/matmul_cache.hpp", "arch/avx2/pack.hpp", "core/kernel_state.hpp"),
        (_ONEDNN,),
        ("test_onednn_cache",),
    ),
    "onednn/avx512": Part(
        8,
        ("arch/onednn/*.hpp", "kernels/onednn.hpp"),
        (("onednn_zmm_fp32", "onednn_bf16_bf16"), _ONEDNN),
    ),
}
_NAMED = {file for part in PARTS.values() for file in part.files if "*" not in file}

# Headers of which nothing is broken, and why.
FILES_LEFT_OUT = {
    "amx_sft_moe.hpp": "includes only",
    "arch/cpu_features.hpp": "what this CPU answers; the tests have another where AVX512 is software",
    "arch/intrinsics.hpp": "includes only",
    "arch/peak_loops.hpp": "how fast this machine is",
    "core/*_macros.hpp": "macros only",
    "*/blocking.hpp": "sizes that change speed only",
    "kernels/[!o]*.hpp": "which types a kernel is made of, and how fast this machine is",
    "operator/any_sft_moe.hpp": "of the registry, with tests of its own",
    "operator/kernel_registry.hpp": "of the registry, with tests of its own",
    "profile/*": "what a pass says of its times and sizes, with tests of its own",
}

# Lines whose change alters speed or a message only, or that another program than these tests covers.
_LEFT_OUT = re.compile(
    r"static_assert|^\s*//|^\s*#|template <|AMX_SFT_MOE_UNROLL|timer|Phase::|\btime\("
    r"|^\s*(using|struct|class)\b|concat\(|NOLINT|noexcept|\bbytes\b|default;|^\s*\""
    r"|^\s*(std::size_t|std::u?int\w+|index_t|int|bool|float)( \w+ = \w+,?)+;|(reserve|level)_threads"
    # Memory asked for ahead: no result depends on it. What makes a strip ahead has other names.
    r"|[Pp]refetch|kPackRowsAhead|ahead_|ask_ahead|\.later|asked_|\b(near|far)\[|\bfar_shift =|\bkNear\w+"
    r"|kWaitingRows|index_t byte\b|\bdone_\b|\brow_ \+= stride_|\bpace_\.|kLineBytes;|kCacheLine ?="
    r"|(ahead|rows)(\.|->)turn|\bask_for\w*\(|in_order|kFarBytes|rows_\.(any|ask|next)\(|\bany\(\)|later_ != 0"
    r"|asks_near|follows_rows|loses_requests|hides_page_walks|zen5|AskedInto|const bool (far|near) ="
    r"|kLeadProducts|rows_left|\blater = |place = \[|place\(0, k\)|segment\.a\) \+"
    r"|\.a_stride \+ step|\+\+tiles|ahead\.spread"
    r"|\bpages\b|PagesAhead|\btranslate\(|const index_t (lead|most|there) =|const bool last ="
    # Sizes of blocks, and when B is read in place: speed only.
    r"|kStripBytes =|kRowBytes =|kStripDepth =|kFarRows =|k <= k\w*Steps|part_of_columns|parts\)|parts ="
    r"|k > kHeldSteps|kRowsOfOneTile|const bool first = arch"
    r"|k(Widened)?(Rows|Columns)Depth =|k(Widened)?PieceCols =|const bool pieces =|const index_t wide = pieces"
    r"|<= arch::kFewFactorRows|const bool rounded =|k(Panels|Vectors) = Rows|kStepsOfLine"
    r"|(LinesInOrder|SharedLines) ahead|begin_pass|roomy_l1|\bfar_\b|ahead = asked;|kDotBlock\w+|kDotPartBytes"
    r"|kDotsInOrder|2 \* here, most"
    # Whether a result is left in the caches: where it may be, and that others see it in time.
    r"|past_caches|_mm_sfence|kCols % kLineElements|read_soon"
    # Sizes of blocks again: plans of one class.
    r"|uniform_plan|plan\.add\(\{0, rows, (row_step|kMaxRows)|columns_of_part|most_cols|most_steps|\bask_half"
    # Tasks that are still begun after one has failed: its error is thrown all the same.
    r"|\braised_"
    # Whether this machine has a kernel: else its tests are skipped.
    r"|\b(available|refusal|has_isa)\("
)


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


# A thread that does not wait for the others, or not for all of them. Left out, for no result shows them for
# certain: memory orders (an atomic exchange of x86 has them all), an atomic step made two (threads would have
# to meet within nanoseconds), the lock around the first error; and the end of a region, which is OpenMP's own.
_BARRIERS = [
    (r"!\w+\[[\w.]+\]\.finish\(\)", "false"),  # whoever comes goes on
    (r"(\w+\[\w+\])\.reset\(\w+\)", r"\1.reset(1)"),  # the first that comes goes on
    (r"(fetch_sub\(1, [\w:]+\)) == 1\b", r"\1 >= 1"),
    (r"(fetch_sub\(1, [\w:]+\)) == 1\b", r"\1 == 2"),  # the last but one goes on
    (r"(\w+)\.exchange\(true, [\w:]+\)", r"\1.load()"),  # nobody is kept out
    (r"\b\w+\.wait\(\);", ";"),
]
# kind -> (pattern, replacement); each occurrence in a line is a mutant of its own.
_OPERATORS: dict[str, list[tuple[str, str]]] = {
    "missing barrier": _BARRIERS,
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
        (r"(?<!float )(?<![\w.])(\w+\.)*(scaling|scale)(?=[,)}])", "1.0F"),
    ],
    "other constant": [
        (r"(?<![\w.])0(?![\w.])", "1"),
        (r"(?<![\w.])1(?![\w.])", "2"),
        (r"(?<![\w.])16(?![\w.])", "15"),
    ],
}
_STATEMENT = re.compile(r"^\s+[\w:.\->\[\]*]+(?:<[\w:, ]+>)?(?:\(.*\)| [-+*]?= .*);\s*$")

_DECLARATION = re.compile(r"\s+(const|auto|return|index_t|int|float)\b")
KINDS = [*_OPERATORS, "dropped statement"]

# The smaller or larger of two: at equality either one, so that < for <= changes nothing.
_CHOICE = re.compile(r"(\w[\w .+\-*()]*?) [<>]=? ([\w.]+) \? (?:\1 : \2|\2 : \1)\b")


def _mutations_of(line: str) -> list[tuple[str, str]]:
    """(kind, broken line); of equal ones the first."""
    code, slashes, comment = line.partition("//")
    # When something is thrown, not what it says.
    code, *thrown = re.split(r"(?=\bthrow\b)", code, maxsplit=1)
    choices = [match.span() for match in _CHOICE.finditer(code)]
    left_out = _LEFT_OUT.search(code + slashes + comment) is not None
    rest = "".join(thrown) + slashes + comment
    found: dict[str, str] = {}
    for kind, patterns in _OPERATORS.items():
        if left_out and kind != "missing barrier":
            continue
        for pattern, replacement in patterns:
            for match in re.finditer(pattern, code):
                if kind == "tail off by one" and any(a < match.start() < b for a, b in choices):
                    continue
                new = code[: match.start()] + match.expand(replacement) + code[match.end() :]
                found.setdefault(new + rest, kind)
    if not left_out and not thrown and _STATEMENT.match(code) and not _DECLARATION.match(code):
        found.setdefault(re.match(r"\s*", code).group() + ";", "dropped statement")
    return [(kind, new) for new, kind in found.items()]


def files_of(include: Path, part: str) -> list[str]:
    """The headers of a part, relative to ``include``."""
    found = {
        path.relative_to(include).as_posix(): pattern
        for pattern in PARTS[part].files
        for path in include.glob(pattern)
    }
    return sorted(
        file
        for file, pattern in found.items()
        if not any(fnmatch(file, left_out) for left_out in FILES_LEFT_OUT)
        and ("*" not in pattern or file not in _NAMED)
    )


def candidates(include: Path, part: str) -> list[Mutant]:
    """All mutants of a part's headers."""
    return [
        Mutant(part, file, number, line, new, kind)
        for file in files_of(include, part)
        for number, line in enumerate((include / file).read_text().splitlines(), 1)
        for kind, new in _mutations_of(line)
    ]


def drawn(include: Path, part: str, seed: int) -> list[Mutant]:
    """All mutants of a part in the order in which they are tried: kinds by turns, places at random."""
    by_kind: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for mutant in candidates(include, part):
        by_kind[mutant.kind].append(mutant)
    chance = random.Random(f"{seed} {part}")
    for mutants in by_kind.values():
        chance.shuffle(mutants)
    queues = list(by_kind.values())
    return [queue.pop() for _ in range(max(map(len, queues))) for queue in queues if queue]


def known_equivalents() -> dict[tuple[str, str, str], str]:
    """(file, line, broken line), stripped, to the reason why nothing can be noticed."""
    known = {}
    for block in (Path(__file__).parent / "equivalent.txt").read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if len(lines) >= 4:
            known[lines[0], lines[1].removeprefix("- "), lines[2].removeprefix("+ ")] = " ".join(lines[3:])
    return known


def key_of(mutant: Mutant) -> tuple[str, str, str]:
    """As known_equivalents() has it."""
    return mutant.file, mutant.old.strip(), mutant.new.strip()


def unmatched_equivalents(include: Path) -> list[tuple[str, str, str]]:
    """Entries of equivalent.txt that are no mutant: their line has changed, or is left out."""
    made = {key_of(mutant) for part in PARTS for mutant in candidates(include, part)}
    return [key for key in known_equivalents() if key not in made]
