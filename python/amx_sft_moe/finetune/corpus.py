"""Real text that every machine with Python has: the standard library's prose and its documented signatures.

Nothing is downloaded. Both are part of CPython, under the PSF licence. Counts differ between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import math
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from .errors import FinetuneError

logger = logging.getLogger(__name__)

# Not the library's own prose: installed packages, tests, and the modules that exist to be broken Python.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
LONGEST_ANSWER = 600  # characters; the few longer first paragraphs are tables that lost their layout
SHORTEST_PROSE = 200  # characters; a shorter module docstring is a caption
SHORTEST_ANSWER = 12  # characters; "Stub." teaches nothing

Item = TypeVar("Item")


@dataclass(frozen=True)
class Document:
    """A piece of prose: where it comes from, and its text."""

    title: str
    text: str


@dataclass(frozen=True)
class Example:
    """One training example. The loss counts on `completion` only; a plain text has an empty prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class _Module:
    """What a source file of the standard library documents."""

    name: str  # dotted
    docstring: str | None
    documented: tuple[tuple[str, str], ...]  # (signature, docstring) of its classes, functions and methods


def _dotted_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _signature(node: ast.AST, qualified_name: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {qualified_name}({bases})" if bases else f"class {qualified_name}"
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return f"{qualified_name}({ast.unparse(node.args)})"


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """(signature, docstring) of what is defined under `node`; functions inside functions are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
            docstring = ast.get_docstring(child)
            if docstring:
                yield _signature(child, name), docstring
            if isinstance(child, ast.ClassDef):
                yield from _documented(child, name)
        elif isinstance(child, ast.stmt):
            yield from _documented(child, prefix)  # `if` and `try` at module level define things too


@lru_cache(maxsize=1)
def _modules(root: Path) -> tuple[_Module, ...]:
    """All modules under `root` that parse, in a fixed order. Takes some 5 seconds, so once is enough."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            with warnings.catch_warnings():
                # The sources' own escapes ("\d" in a plain string) are not this program's warnings.
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError) as error:
            logger.debug("skipped %s: %s", relative, error)
            continue
        name = _dotted_name(relative)
        modules.append(_Module(name, ast.get_docstring(tree), tuple(_documented(tree, name))))
    return tuple(modules)


def standard_library() -> Path:
    """The folder of the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def prose() -> list[Document]:
    """The language reference that `help()` shows, then module docstrings of a paragraph or more.

    Raises FinetuneError where this Python was installed without them (some distributions split them off).
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FinetuneError(
            "this Python has no pydoc_data.topics, the text to train on; use a full CPython"
        ) from error
    documents = [Document(f"topic {title}", text.strip()) for title, text in sorted(topics.items())]
    for module in _modules(standard_library()):
        if module.docstring and len(module.docstring) >= SHORTEST_PROSE:
            documents.append(Document(f"module {module.name}", module.docstring.strip()))
    return documents


def _first_paragraph(docstring: str) -> str:
    return " ".join(docstring.strip().split("\n\n")[0].split())


def questions() -> list[Example]:
    """Signatures and first docstring paragraphs of the standard library, as questions and answers.

    Each question occurs once. Raises FinetuneError where the library is installed without its sources.
    """
    found: dict[str, Example] = {}
    for module in _modules(standard_library()):
        for signature, docstring in module.documented:
            answer = _first_paragraph(docstring)
            if SHORTEST_ANSWER <= len(answer) <= LONGEST_ANSWER:
                prompt = f"Question: What is {signature}?\nAnswer:"
                found.setdefault(prompt, Example(prompt, f" {answer}"))
    if len(found) < 100:
        raise FinetuneError(
            f"only {len(found)} documented functions under the standard library of Python "
            f"{sys.version_info.major}.{sys.version_info.minor}: its sources seem not to be installed"
        )
    return list(found.values())


def split(
    items: Sequence[Item], group: Callable[[Item], str], weight: Callable[[Item], int], fraction: float
) -> tuple[list[Item], list[Item]]:
    """(training, held-out), both in the order of `items`; equal groups stay on one side.

    Groups go to the held-out side in the order of their SHA-256 until they hold `fraction` of the weight: the
    same on every machine and for every seed, so that held-out losses of different runs can be compared. With
    at least two groups neither side is empty; with fewer, FinetuneError.
    """
    weights: dict[str, int] = {}
    for item in items:
        weights[group(item)] = weights.get(group(item), 0) + weight(item)
    _require_two("texts", len(weights), len(items))
    wanted = fraction * sum(weights.values())
    held_out: set[str] = set()
    reached = 0
    for key in sorted(weights, key=_digest):
        if (held_out and reached >= wanted) or len(held_out) == len(weights) - 1:
            break
        held_out.add(key)
        reached += weights[key]
    return (
        [item for item in items if group(item) not in held_out],
        [item for item in items if group(item) in held_out],
    )


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Splits prose by document, weighed in characters."""
    return split(documents, lambda document: document.text, lambda document: len(document.text), fraction)


def split_questions(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Splits the library's questions by answer, so that no held-out answer was seen under another question.

    Many of its functions share a docstring; no answer is anywhere near `fraction` of all.
    """
    return split(examples, lambda example: example.completion.strip(), lambda example: 1, fraction)


def split_examples(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Splits the user's examples; (training, held-out), both in their order. Equal ones stay on one side.

    Not by answer: where answers are classes ("yes", "no"), that would hold out one of them whole and train
    without it. Of an answer to several prompts at least one stays in training. Examples are equal where prompt
    and answer are, but for white space around them. They are held out in the order of their SHA-256, the same
    in each run, up to `fraction` of the different ones and of all, rounded up. One repeated so often that it
    alone is more than that stays in training, unless all are. FinetuneError with fewer than two different ones.
    """
    different = Counter(map(_stripped, examples))
    _require_two("examples", len(different), len(examples))
    prompts = Counter(example.completion for example in different)
    most = min(math.ceil(fraction * len(different)), len(different) - 1)
    room = max(math.ceil(fraction * len(examples)), min(different.values()))
    held_out: set[Example] = set()
    answers: Counter[str] = Counter()  # of those held out
    for example in sorted(different, key=lambda each: _digest(f"{each.prompt}\0{each.completion}")):
        answer = example.completion
        last_of_several = 0 < answers[answer] == prompts[answer] - 1
        if len(held_out) < most and different[example] <= room and not last_of_several:
            held_out.add(example)
            answers[answer] += 1
            room -= different[example]
    return (
        [example for example in examples if _stripped(example) not in held_out],
        [example for example in examples if _stripped(example) in held_out],
    )


def _stripped(example: Example) -> Example:
    return Example(example.prompt.strip(), example.completion.strip())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _require_two(what: str, different: int, count: int) -> None:
    if different < 2:
        raise FinetuneError(
            f"expected at least 2 different {what}, one of them to be held out, got {different} among {count:,}"
        )
