"""The pages of ``docs/`` as programs: their blocks of code, found and executed in order.

What counts is fenced with its language; indented code is refused. ``bash`` runs in bash, ``python`` in one
namespace a page, ``cpp`` blocks of a page become one program ``main.cpp`` (a block that begins with
``#include`` stands at its top, the others in ``main``) which a ``bash`` block of the page compiles and runs,
``cmake`` blocks are each configured as a project. ``text``, ``json`` and ``yaml`` are shown, not run. A page
runs in a folder of its own. Comments right above a fence, which readers do not see:

    <!-- not run: reason -->            the block is not executed
    <!-- test: ABC => XYZ -->           XYZ in the place of ABC, for smaller sizes
    <!-- test: checked by the compiler only ... -->     C++ behind all other blocks of the page, not run
    <!-- output -->                     lines of this text are in what the last block printed (numbers aside)
    <!-- file: NAME -->                 the block is how the file NAME begins
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from amx_sft_moe.__main__ import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

EXECUTED = ("bash", "python", "cpp", "cmake")
SHOWN = ("text", "json", "yaml")
_BLOCK = re.compile(
    r"^(?P<comments>(?:<!--[^\n]*-->\n)*)```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"<!-- (?P<kind>not run|test|output|file)(?:: (?P<text>.*?))? -->")
_COMPILER_ONLY = "checked by the compiler only"
_ADAPTER = "python -m amx_sft_moe adapter "
_PROJECT = "cmake_minimum_required(VERSION 3.24)\nproject(page LANGUAGES CXX)\n"


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int  # of its fence, from 1
    language: str
    code: str  # as it is executed
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"docs/{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in EXECUTED and "not run" not in self.marks

    @property
    def compiler_only(self) -> bool:
        return self.marks.get("test", "").startswith(_COMPILER_ONLY)


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page. ValueError where one is not understood."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        where = f"docs/{page.name}:{line}"
        marks: dict[str, str] = {}
        code = match["code"]
        for comment in match["comments"].splitlines():
            mark = _COMMENT.fullmatch(comment)
            if mark is None:
                raise ValueError(f"{where}: unknown comment {comment}")
            marks[mark["kind"]] = mark["text"] or ""
            if mark["kind"] == "test" and not marks["test"].startswith(_COMPILER_ONLY):
                before, _, after = mark["text"].partition(" => ")
                if before not in code:
                    raise ValueError(f"{where}: no {before!r} to replace")
                code = code.replace(before, after)
        if match["language"] not in (*EXECUTED, *SHOWN):
            raise ValueError(f"{where}: expected one of {(*EXECUTED, *SHOWN)}, got {match['language']!r}")
        found.append(Block(page.name, line, match["language"], code, marks))
    rest = _BLOCK.sub("", text)
    if "```" in rest or re.search(r"^\n {4}", rest, re.MULTILINE):
        raise ValueError(f"docs/{page.name}: expected closed fences and no indented code")
    return found


def program(blocks: list[Block], *, compiler_only: bool = False) -> str:
    """The C++ program of a page, with or without the blocks that are only compiled."""
    cpp = [b for b in blocks if b.language == "cpp" and b.runs and (compiler_only or not b.compiler_only)]
    top = [b.code for b in cpp if b.code.startswith("#include")]
    body = [b.code for b in cpp if not b.code.startswith("#include")]
    return "\n".join([*top, "int main() {", *body, "}", ""])


def without_numbers(text: str) -> str:
    """One space for any space, # for any number, which may end in a unit of bytes; minutes and seconds are
    seconds then."""
    text = re.sub(r"\d[\d,.]*(e[-+]?\d+)?( [KMGT]iB)?", "#", text)
    text = text.replace("# min # s", "# s")
    return re.sub(r"\s+", " ", text).strip()


class Folder:
    """Where a page is executed, what it has defined and what its last block printed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""
        self._projects = 0

    def run(self, block: Block) -> None:
        """Executes a block. AssertionError or its own exception where it fails."""
        if "output" in block.marks:
            self._compare(block)
        elif "file" in block.marks:
            assert (self._path / block.marks["file"]).read_text().startswith(block.code), block
        elif block.runs and block.language != "cpp":
            getattr(self, f"_run_{block.language}")(block)

    def check_program(self, blocks: list[Block]) -> None:
        """Compiles the page's whole C++ without making code of it."""
        (self._path / "all.cpp").write_text(program(blocks, compiler_only=True))
        self._call("g++ -std=c++20 -fopenmp -fsyntax-only -Wall -Wextra -Werror -I amx-sft-moe/include all.cpp")

    def _run_bash(self, block: Block) -> None:
        lines = block.code.splitlines()
        if all(line.startswith(_ADAPTER) for line in lines):
            # What the processes would do, without importing torch and peft in each of them.
            printed = io.StringIO()
            with redirect_stdout(printed), patch.dict(os.environ):
                for line in lines:
                    assert main(shlex.split(line, comments=True)[3:]) == 0, f"{block}: {line}"
            self._printed = printed.getvalue()
        else:
            self._call(block.code, str(block))

    def _run_python(self, block: Block) -> None:
        # Lines are those of the page, for tracebacks.
        code = compile("\n" * block.line + block.code, str(DOCS / block.page), "exec")
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, self._names)
        self._printed = printed.getvalue()

    def _run_cmake(self, block: Block) -> None:
        self._projects += 1
        source = f"project-{self._projects}"
        (self._path / source).mkdir()
        for name in ("amx-sft-moe", "installed", "main.cpp"):
            (self._path / source / name).symlink_to(self._path / name)
        (self._path / source / "CMakeLists.txt").write_text(_PROJECT + block.code)
        fetched = (
            shlex.quote(f"-DFETCHCONTENT_SOURCE_DIR_AMX_SFT_MOE={ROOT}") if "FetchContent" in block.code else ""
        )
        self._call(f"cmake -S {source} -B {source}/build {fetched}", str(block))

    def _call(self, script: str, where: str = "") -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        offline = {"HF_ENDPOINT": "http://localhost:9"}  # nobody answers there
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            check=False,
            capture_output=True,
            text=True,
            cwd=self._path,
            env=os.environ | offline | {"PATH": path},
            timeout=500,
        )
        assert done.returncode == 0, f"{where}\n{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        self._printed = done.stdout

    def _compare(self, block: Block) -> None:
        printed = without_numbers(self._printed)
        for line in block.code.splitlines():
            assert without_numbers(line) in printed, f"{block}: not printed: {line}\n{self._printed}"
