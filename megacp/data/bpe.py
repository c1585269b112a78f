"""GPT-2's byte-level BPE from `vocab.json` and `merges.txt`, in plain Python with the `regex` package.

Key property: it is the definition of the `gpt2` tokenizer kind, short enough to read; the fast engines are used only
because they give its ids. Every byte string has an encoding, so no text is ever unknown. Rejected: trusting a native
engine with nothing to compare it to.

Format: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and the files published with it:
each byte is written as one printable character, `merges.txt` lists pairs from first to last merged.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

import numpy as np

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CACHE_ENTRIES = 1 << 18


@cache
def byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte, [256]: itself when printable Latin-1, else from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, moved = [], 0
    for byte in range(256):
        characters.append(chr(byte if byte in printable else 256 + moved))
        moved += byte not in printable
    return tuple(characters)


@cache
def _newer_characters() -> re.Pattern[str]:
    """Characters whose class only `regex` knows, because they are newer than this Python's Unicode tables.

    Native engines may be as old as Python, and then split them differently: such text is left to `ByteLevelBPE`.
    """
    import regex

    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    newer = [c for c in regex.findall(r"[\p{L}\p{N}\s]", everything) if unicodedata.category(c) == "Cn"]
    return re.compile(f"[{''.join(newer)}]" if newer else r"(?!)")


def has_newer_characters(text: str) -> bool:
    """Whether native engines with older Unicode tables could split `text` differently."""
    return not text.isascii() and _newer_characters().search(text) is not None


class ByteLevelBPE:
    """Encodes and decodes; special tokens are not looked for in text.

    `vocabulary` maps a token, written in `byte_characters`, to its id; `merges` are pairs of such tokens, best first.
    """

    def __init__(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        """ValueError when a byte or the result of a merge is missing from the vocabulary."""
        import regex

        missing = [c for c in byte_characters() if c not in vocabulary]
        missing += [a + b for a, b in merges if a + b not in vocabulary]
        if missing:
            shown = ", ".join(map(repr, missing[:5]))
            raise ValueError(f"vocabulary and merges do not belong together: {len(missing)} tokens missing ({shown})")
        self._ids = vocabulary
        self._rank = {pair: rank for rank, pair in enumerate(merges)}
        self._find = regex.compile(PATTERN).findall
        self._cache: dict[str, list[int]] = {}
        self._to_character = byte_characters()
        self._to_byte = {character: byte for byte, character in enumerate(self._to_character)}
        self._token = {i: token for token, i in vocabulary.items()}

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [n]."""
        ids: list[int] = []
        known = self._cache
        for word in self._find(text):
            found = known.get(word)
            if found is None:
                if len(known) >= CACHE_ENTRIES:
                    known.clear()
                found = known[word] = self._merge(word)
            ids += found
        return np.array(ids, dtype=np.int32)

    def _merge(self, word: str) -> list[int]:
        parts = [self._to_character[byte] for byte in word.encode()]
        worst = len(self._rank)
        while len(parts) > 1:
            ranks = [self._rank.get(pair, worst) for pair in zip(parts, parts[1:], strict=False)]
            best = min(ranks)
            if best == worst:
                break
            merged, i = [], 0
            while i < len(parts):  # every occurrence of the best pair, left to right
                if i < len(ranks) and ranks[i] == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self._ids[part] for part in parts]

    def decode_bytes(self, ids: list[int]) -> bytes:
        """The bytes of `ids`; a token that is not written in byte characters (a special one) gives its own text."""
        result = bytearray()
        for i in ids:
            token = self._token.get(i, "")
            if all(c in self._to_byte for c in token):
                result += bytes(self._to_byte[c] for c in token)
            else:
                result += token.encode()
        return bytes(result)
