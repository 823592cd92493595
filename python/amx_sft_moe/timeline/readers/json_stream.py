"""The events of a Chrome trace, one at a time: a file of any size through a buffer of a few megabytes.

A trace is an array of events, with or without its closing bracket, or an object with one under
"traceEvents". After a crash the end is missing; some writers leave single broken events. Neither ends the
reading: what was passed over is counted.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..errors import TimelineError

_CHUNK = 1 << 20
_SEPARATORS = re.compile(r"[\s,]*")
_NEXT_EVENT = re.compile(r"\}[\s,]*(?=\{)")
# A value that the buffer cuts is reported at most this far before the buffer's end ("-Infinity"); strings
# apart.
_CUT = 16


class _BrokenError(Exception):
    """Something that is no JSON, at a place from which the search goes on."""


class _EndError(Exception):
    """The file ended inside a value."""


class TraceEvents:
    """Iterates over the events; `header` has the small values beside them (those before the events at once,
    those after them at the end)."""

    def __init__(self, stream: BinaryIO, path: str, longest: int) -> None:
        self.header: dict[str, Any] = {}
        self.broken = 0  # events that were passed over
        self.cut = False  # whether the file ended in the middle of something
        self.more = False  # whether something stands behind the trace's end
        self._stream = io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="")
        self._path, self._longest = path, longest
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._ended = False
        self._in_object = False

    def _fill(self) -> bool:
        """Reads on, dropping what was consumed; False at the end of the file."""
        if self._ended:
            return False
        chunk = self._stream.read(_CHUNK)
        self._text = self._text[self._at :] + chunk
        self._at = 0
        self._ended = not chunk
        return bool(chunk)

    def _peek(self) -> str:
        """The next character that is no separator; empty at the end of the file."""
        while True:
            self._at = _SEPARATORS.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        """The value at the cursor, which moves behind it."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise _BrokenError from None
            except json.JSONDecodeError as error:
                may_be_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _CUT
                if not may_be_cut:
                    self._at = max(error.pos, self._at + 1)
                    raise _BrokenError from None
            except ValueError:  # an integer of more digits than Python converts; it does not say where
                raise _BrokenError from None
            else:
                # A number at the end of the buffer may go on behind it.
                if end < len(self._text) or isinstance(value, (dict, list, str)):
                    self._at = end
                    return value
                if self._ended:
                    self._at = end
                    return value
            if len(self._text) - self._at > self._longest:
                self._at += 1
                raise _BrokenError
            if not self._fill():
                raise _EndError

    def _resync(self) -> bool:
        """Moves to the next event behind a broken one; False where none follows."""
        while True:
            found = _NEXT_EVENT.search(self._text, self._at)
            if found is not None:
                self._at = found.end()
                return True
            # Only a bracket and the blanks behind it may belong to the next match.
            self._at = max(self._at, self._text.rfind("}"))
            if len(self._text) - self._at > _CHUNK:
                self._at = len(self._text)
            if not self._fill():
                return False

    def _array(self) -> Iterator[dict[str, Any]]:
        """The events of the array whose bracket has just been passed."""
        while True:
            following = self._peek()
            if following == "]":
                self._at += 1
                return
            if not following:
                # "[" and events without the closing bracket are a whole trace, by the format's own rules.
                self.cut = self._in_object
                return
            try:
                event = self._value()
            except _EndError:
                self.cut = True
                return
            except _BrokenError:
                self.broken += 1
                if not self._resync():
                    self.cut = True
                    return
                continue
            if isinstance(event, dict):
                yield event
            else:
                self.broken += 1

    def _member(self) -> str:
        """The next key of the outermost object, with the cursor at its value; empty behind the last."""
        following = self._peek()
        if following in ("", "}"):
            return ""
        key = self._value()
        if not isinstance(key, str) or self._peek() != ":":
            raise _BrokenError
        self._at += 1
        self._peek()
        return key

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = self._peek()
        self._at += 1
        if first == "[":
            yield from self._array()
            self.more = not self.cut and bool(self._peek())
            return
        self._in_object = True
        found = False
        try:
            while key := self._member():
                if key == "traceEvents" and self._peek() == "[":
                    found = True
                    self._at += 1
                    yield from self._array()
                else:
                    self.header[key] = self._value()
            self._at += 1  # the closing brace
            self.more = not self.cut and bool(self._peek())
        except (_BrokenError, _EndError):
            # Behind the events nothing is needed any more; before them there is nothing to go on from.
            if not found:
                raise TimelineError(
                    f"{self._path} begins like a Chrome trace but is broken before its traceEvents (or holds "
                    f"a value of more than {self._longest:,} bytes there)"
                ) from None
            self.cut = True
        if not found and "traceEvents" in self.header:
            try:
                shown = json.dumps(self.header["traceEvents"])[:40]
            except RecursionError:
                shown = "values inside each other"
            raise TimelineError(
                f"{self._path}: expected an array under traceEvents, got {shown}: no Chrome trace"
            )
        if not found:
            keys = ", ".join(list(self.header)[:5]) or "no keys"
            raise TimelineError(
                f"{self._path} is a JSON object without traceEvents (it has {keys}): no Chrome "
                "trace, and no line of a step"
            )
