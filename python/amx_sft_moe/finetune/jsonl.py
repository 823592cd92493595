"""The user's own data: JSON lines, each {"prompt": ..., "completion": ...} or {"text": ...}."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .corpus import Example
from .errors import FinetuneError

MOST_COMPLAINTS = 5  # lines named in one error
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON's escapes can say half a pair; tokenizers take no such text


class _UnusableError(Exception):
    """What is wrong with a line."""


def _example(line: str) -> Example:
    """The example on one line; raises _UnusableError."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _UnusableError(f"not JSON: {error.msg} (column {error.colno})") from None
    except (RecursionError, ValueError) as error:  # deep nesting, a number of thousands of digits
        raise _UnusableError(f"cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise _UnusableError(f"expected an object, found {type(record).__name__}")
    keys = {"prompt", "completion", "text"} & record.keys()
    if keys not in ({"prompt", "completion"}, {"text"}):
        found = ", ".join(sorted(map(repr, record))) or "no keys"
        raise _UnusableError(f"expected either 'prompt' and 'completion', or 'text'; found {found}")
    for key in sorted(keys):
        if not isinstance(record[key], str):
            raise _UnusableError(f"{key!r} must be a string, found {type(record[key]).__name__}")
        if half := _SURROGATE.search(record[key]):
            raise _UnusableError(f"{key!r} has half a character, {half[0]!a}, at {half.start() + 1}")
    answer = "text" if "text" in keys else "completion"
    if not record[answer].strip():
        raise _UnusableError(f"{answer!r} is empty")
    return Example(record.get("prompt", ""), record[answer])


def read_examples(path: Path) -> list[Example]:
    """The examples of a UTF-8 file, in its order; blank lines are passed over, other keys are ignored.

    Raises FinetuneError naming the file and the numbers of the lines that are wrong (the first few), or the
    file where it cannot be read or holds nothing.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FinetuneError(f"cannot read the data file {path}: {error.strerror}") from error
    examples: list[Example] = []
    complaints: list[str] = []
    # Of bytes: str.splitlines would also split at characters that JSON strings may hold.
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        try:
            line = raw.decode("utf-8")
            if line.strip():
                examples.append(_example(line))
        except UnicodeDecodeError as error:
            complaints.append(f"line {number}: not UTF-8 at byte {error.start + 1}")
        except _UnusableError as error:
            complaints.append(f"line {number}: {error}")
    if complaints:
        shown = "\n".join(f"  {complaint}" for complaint in complaints[:MOST_COMPLAINTS])
        more = len(complaints) - MOST_COMPLAINTS
        rest = f"\n  and {more} more" if more > 0 else ""
        raise FinetuneError(f"{path} has lines that are not usable:\n{shown}{rest}")
    if not examples:
        raise FinetuneError(f"{path} holds no examples")
    return examples
