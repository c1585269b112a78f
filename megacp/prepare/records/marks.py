"""Marks in the values of a conversation, by which one rendering says where each message and each
value is written.

A mark is a number in characters that Unicode gives only to programs. A template copies it like any
other character, and it is taken out again. A template may look at a text (`startswith`, `trim`,
`length`), so a mark never touches a blank or a tag at an edge, and whoever uses marks compares what
is left with a rendering that had none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "\ufdd3", "\ufdd4"
_DIGITS = "".join(chr(0xFDE0 + digit) for digit in range(16))
MARK_CHARACTERS = (_OPEN, _CLOSE, *_DIGITS)
_MARK = re.compile(f"{_OPEN}([{_DIGITS}]+){_CLOSE}")
_VALUES = str.maketrans(_DIGITS, "0123456789abcdef")
_EDGE = re.compile(r"\s*(?:<[^<>]*>\s*)*")
"""Blanks and tags at the beginning of a text, which templates look for."""
WORDS, THOUGHT_WORDS = "content", "thought"
"""Names of the places of an answer's own words and of its thought's."""

MarkedPlace = tuple[int, str]
"""A message by its number, and a key of it (or THOUGHT_WORDS); the key is empty for its turn."""


def _mark(number: int) -> str:
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
        """Take the marks out of a rendering. Return it and the character at which each place
        begins.

        A value that is written twice begins where it is first. A turn begins where it is last: a
        template may look through all messages before it writes them.
        """
        pieces = _MARK.split(text)  # text, number, text, number, ..., text
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
    """Writes a mark for each message over which a template loops; it is called as sandbox.TURN."""

    def __init__(self, marks: Marks, messages: Sequence[Mapping[str, Any]]) -> None:
        """`messages`: the very objects that the template is given."""
        self._marks = {id(message): marks.new(i) for i, message in enumerate(messages)}

    def __call__(self, value: Any) -> str:
        return self._marks.get(id(value), "")


def marked_text(text: str, mark: str, start: int = 0) -> str:
    """Put a mark before the first word of a text that is no blank and no tag, from `start` on; not
    in a blank text.
    """
    edge = _EDGE.match(text, start)
    at = edge.end() if edge else start
    if at == len(text):
        at = start + len(text[start:]) - len(text[start:].lstrip())
    if at == len(text):
        return text
    return text[:at] + mark + text[at:]


def marked_value(value: Any, mark: str) -> Any:
    """Put a mark into the first text of a value, looking through lists and objects; the value
    itself without one.
    """
    if isinstance(value, str):
        return marked_text(value, mark)
    if isinstance(value, list):
        for n, item in enumerate(value):
            if (made := marked_value(item, mark)) is not item:
                return [*value[:n], made, *value[n + 1 :]]
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("type", "id") and (made := marked_value(item, mark)) is not item:
                return {**value, key: made}
    return value
