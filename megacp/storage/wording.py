"""The wording of messages: long lists are shortened, counts agree with nouns, and untrusted text
cannot control a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# C0 except tab and newline, DEL and C1; separators that some terminals treat as newlines; overrides
# of the text direction; surrogates, which file names may contain but no stream can write
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_WORD, _LINE, _MESSAGE = 1_000, 8_000, 100_000
"""Maximum number of characters of a word, a line and a message that are shown in full."""
_LONG_WORD = re.compile(rf"\S{{{_WORD + 1},}}")
_LONG_LINE = re.compile(rf"[^\n]{{{_LINE + 1},}}")


def escaped(text: str) -> str:
    r"""Return text with control characters and direction overrides escaped (`\x1b`, `\u202e`).

    Newlines, tabs and all other characters of any language stay unchanged.
    """
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_terminal(text: str) -> str:
    """Return a message for a terminal: escaped, and shortened in the middle if it is very long.

    Long words and lines are shortened in the same way.
    """
    # shorten before escaping, so that no escape sequence is cut
    text = _LONG_WORD.sub(lambda found: _without_middle(found[0], _WORD), text)
    text = _LONG_LINE.sub(lambda found: _without_middle(found[0], _LINE), text)
    if len(text) > _MESSAGE:
        text = _without_middle(text, _MESSAGE)
    return escaped(text)


def _without_middle(text: str, most: int) -> str:
    """Return the first `most / 2` characters, the total count, and the last `most / 4`."""
    return f"{text[: most // 2]}...({len(text):,} characters)...{text[-(most // 4) :]}"


def listed(texts: Sequence[object], most: int, between: str = ", ") -> str:
    """Return the first `most` texts, joined, followed by `and N more` if there are more."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join([*map(str, texts[:most]), *more])


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 record", "1,200 records"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def human_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit and three digits: 1536 -> "1.50 KiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def human_count(count: float, unit: str = "") -> str:
    """Return a number with a decimal prefix and three digits: 7.24e9 -> "7.24 G"."""
    units = (unit, f"k{unit}", f"M{unit}", f"G{unit}", f"T{unit}", f"P{unit}", f"E{unit}")
    return _scaled(count, 1000, units)


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    """Return a number with three digits in the largest unit that keeps it at 1 or more."""
    value = float(count)
    place = 0
    # 999.5 would be rounded to a fourth digit
    while abs(value) >= 999.5 and place < len(units) - 1:
        value /= base
        place += 1
    if place == 0 and value == int(value):  # a whole number without prefix
        digits = 0
    elif abs(value) >= 99.95:
        digits = 0
    elif abs(value) >= 9.995:
        digits = 1
    else:
        digits = 2
    return f"{value:.{digits}f} {units[place]}".rstrip()
