"""Text that two engines may split into other words, because their Unicode tables differ in age.

Key property: such text is left to a kind's reference, so that an engine's update changes no ids.
"""

from __future__ import annotations

import sys
import unicodedata
from functools import cache

import numpy as np


@cache
def _is_newer() -> np.ndarray:
    """bool [code points]: letters, digits and spaces that `regex` knows and the older tables of Python do not."""
    import regex

    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    newer = [ord(c) for c in regex.findall(r"[\p{L}\p{N}\s]", everything) if unicodedata.category(c) == "Cn"]
    table = np.zeros(sys.maxunicode + 1, dtype=bool)
    table[newer] = True
    return table


def has_newer_characters(text: str) -> bool:
    """Whether engines with Unicode tables of different age could split `text` differently."""
    if text.isascii():
        return False
    # a table, not a character class: `re` walks a class beyond U+FFFF item by item, thousands for each character
    return bool(_is_newer()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")].any())
