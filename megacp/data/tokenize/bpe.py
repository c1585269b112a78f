"""GPT-2's byte-level BPE from `vocab.json` and `merges.txt`, in plain Python with the `regex` package.

Key property: it is the definition of the `gpt2` tokenizer kind, short enough to read; the fast engines are used only
because they give its ids. Every byte string has an encoding, so no text is ever unknown. Rejected: trusting a native
engine with nothing to compare it to.

Format: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and the files published with it:
each byte is written as one printable character, `merges.txt` lists pairs from first to last merged.
"""

from __future__ import annotations

import heapq
import sys
import unicodedata
from functools import cache

import numpy as np

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CACHE_ENTRIES = 1 << 18
CACHED_CHARACTERS = 64


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
def _is_newer() -> np.ndarray:
    """bool [code points]: characters whose class only `regex` knows, because this Python's Unicode tables are older.

    Two engines with tables of different age split them differently: such text is left to a kind's reference.
    """
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
                found = self._merge(word)
                if len(word) <= CACHED_CHARACTERS:
                    if len(known) >= CACHE_ENTRIES:
                        known.clear()
                    known[word] = found
            ids += found
        return np.array(ids, dtype=np.int32)

    def _merge(self, word: str) -> list[int]:
        """Merge the best pair, leftmost first, until none is left: O(n log n), since a "word" can be a long line."""
        parts = [self._to_character[byte] for byte in word.encode()]
        stop = len(parts)
        following = list(range(1, stop + 1))
        preceding = list(range(-1, stop - 1))
        rank = self._rank
        waiting = [(rank[pair], i, pair) for i, pair in enumerate(zip(parts, parts[1:], strict=False)) if pair in rank]
        heapq.heapify(waiting)
        while waiting:
            _, left, pair = heapq.heappop(waiting)
            right = following[left]
            if right == stop or (parts[left], parts[right]) != pair:
                continue  # one of the two has been merged since
            parts[left], parts[right] = pair[0] + pair[1], ""
            following[left] = after = following[right]
            if after != stop:
                preceding[after] = left
            for i, j in ((preceding[left], left), (left, after)):
                if i >= 0 and j != stop and (found := (parts[i], parts[j])) in rank:
                    heapq.heappush(waiting, (rank[found], i, found))
        return [self._ids[part] for part in parts if part]

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
