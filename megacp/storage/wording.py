"""Words of messages: long lists are cut, counts agree with their nouns, and foreign text cannot
steer a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# All of C0 but tab and newline, DEL and C1; separators that some terminals take for a newline;
# characters that turn the direction of what follows; halves of characters, which names of files may
# hold and no stream can write.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_WORD, _LINE, _MESSAGE = 1_000, 8_000, 100_000
"""Characters of the longest word, line and message that are shown whole."""
_LONG_WORD, _LONG_LINE = re.compile(rf"\S{{{_WORD + 1},}}"), re.compile(rf"[^\n]{{{_LINE + 1},}}")


def escaped(text: str) -> str:
    r"""Return a text for a terminal: control characters and overrides of direction as `\x1b` and
    `\u202e`.

    Newlines and tabs stay, and so does every other character of any language.
    """
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_terminal(text: str) -> str:
    """Return a message for a terminal: escaped, with the middle of very long words, lines and texts
    left out.
    """
    text = _LONG_WORD.sub(lambda found: _without_middle(found[0], _WORD), text)
    text = _LONG_LINE.sub(lambda found: _without_middle(found[0], _LINE), text)
    if len(text) > _MESSAGE:
        text = _without_middle(text, _MESSAGE)
    return escaped(text)


def _without_middle(text: str, most: int) -> str:
    """The first half of `most` characters and the last quarter, with the number of all between."""
    return f"{text[: most // 2]}...({len(text):,} characters)...{text[-(most // 4) :]}"


def listed(texts: Sequence[object], most: int, between: str = ", ") -> str:
    """The first `most` texts in one, followed by `and N more` when there are others."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join([*map(str, texts[:most]), *more])


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 record", "1,200 records"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three digits: 1536 -> "1.50 KiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def human_count(count: float, unit: str = "") -> str:
    """A number with a decimal prefix and three digits: 7.24e9 -> "7.24 G"."""
    return _scaled(
        count, 1000, (unit, f"k{unit}", f"M{unit}", f"G{unit}", f"T{unit}", f"P{unit}", f"E{unit}")
    )


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    value, place = float(count), 0
    while abs(value) >= 999.5 and place < len(units) - 1:
        value, place = value / base, place + 1
    digits = (
        0
        if place == 0 and value == int(value)
        else 2 - (abs(value) >= 9.995) - (abs(value) >= 99.95)
    )
    return f"{value:.{digits}f} {units[place]}".rstrip()
