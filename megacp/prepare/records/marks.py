"""Marks in the values of a conversation, which show where one rendering writes each message.

A mark is a number written in Unicode noncharacters. A template copies it like any other character,
and it is removed afterwards. Because a template may test a text (`startswith`, `trim`, `length`), a
mark is never placed before leading white space and tags. Users of marks must also compare the
remaining text with a rendering without marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_OPEN = "\ufdd3"
_CLOSE = "\ufdd4"
# 16 noncharacters, one for each hexadecimal digit
_DIGITS = "".join(chr(0xFDE0 + digit) for digit in range(16))
MARK_CHARACTERS = (_OPEN, _CLOSE, *_DIGITS)
_MARK = re.compile(f"{_OPEN}([{_DIGITS}]+){_CLOSE}")
_VALUES = str.maketrans(_DIGITS, "0123456789abcdef")
_EDGE = re.compile(r"\s*(?:<[^<>]*>\s*)*")
"""White space and tags at the beginning of a text, which templates test."""
WORDS = "content"
"""Key for the place of an answer's words."""
THOUGHT_WORDS = "thought"
"""Key for the place of an answer's thought."""

MarkedPlace = tuple[int, str]
"""Number of a message and one of its keys (or THOUGHT_WORDS); "" denotes its turn."""


def _mark(number: int) -> str:
    """Return the mark that encodes a number."""
    digits = "".join(_DIGITS[int(digit, 16)] for digit in f"{number:x}")
    return f"{_OPEN}{digits}{_CLOSE}"


@dataclass
class Marks:
    """The marks of one rendering, by number."""

    places: list[MarkedPlace] = field(default_factory=list)

    def new(self, message: int, key: str = "") -> str:
        """Return a new mark for a place."""
        self.places.append((message, key))
        return _mark(len(self.places) - 1)

    def found(self, text: str) -> tuple[str, dict[MarkedPlace, int]]:
        """Remove the marks from a rendering; return the text and the beginning of each place.

        If a value is written twice, its first position counts. For a turn the last position counts,
        because a template may loop over all messages before it writes them.
        """
        # text, number, text, number, ..., text
        pieces = _MARK.split(text)
        begins: dict[MarkedPlace, int] = {}
        at = 0
        for n, piece in enumerate(pieces):
            if n % 2 == 0:
                at += len(piece)
                continue
            place = self.places[int(piece.translate(_VALUES), 16)]
            if place[1] == "" or place not in begins:
                begins[place] = at
        return "".join(pieces[::2]), begins


class TurnMarks:
    """The function sandbox.TURN of a template: returns the mark of each message in its loops."""

    def __init__(self, marks: Marks, messages: Sequence[Mapping[str, Any]]) -> None:
        """Create a mark per message; `messages` must be the same objects that the template gets."""
        # by identity, because two messages may be equal
        self._marks = {id(message): marks.new(i) for i, message in enumerate(messages)}

    def __call__(self, value: Any) -> str:
        return self._marks.get(id(value), "")


def marked_text(text: str, mark: str, start: int = 0) -> str:
    """Insert a mark before the first word at or after `start`, skipping white space and tags.

    If the text has only tags, the mark precedes them; a blank text gets no mark.
    """
    edge = _EDGE.match(text, start)
    at = edge.end() if edge else start
    # only tags: skip just the white space
    if at == len(text):
        at = start + len(text[start:]) - len(text[start:].lstrip())
    if at == len(text):
        return text
    return text[:at] + mark + text[at:]


def marked_value(value: Any, mark: str) -> Any:
    """Return a value with a mark in its first text, searching lists and objects.

    Return the same object if it has no text.
    """
    if isinstance(value, str):
        return marked_text(value, mark)
    # a changed item contains the mark, so the search ends there
    if isinstance(value, list):
        for n, item in enumerate(value):
            if (made := marked_value(item, mark)) is not item:
                return [*value[:n], made, *value[n + 1 :]]
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("type", "id") and (made := marked_value(item, mark)) is not item:
                return {**value, key: made}
    return value
