"""GPT-2's two files as the `tokenizers` package wants them: a vocabulary and a list of merges, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def byte_level_bpe(ids: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """A `tokenizers.Tokenizer`. ValueError when a byte or the result of a merge is missing from the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    needed = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    if missing := [token for token in needed if token not in ids]:
        shown = ", ".join(map(repr, missing[:5]))
        raise ValueError(f"vocabulary and merges do not belong together: {len(missing)} tokens missing ({shown})")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    except Exception as error:  # an id beyond 32 bits, a half of a merge that is no token
        raise ValueError(f"no byte-level BPE ({error})") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merge_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """The pairs of tokens of a `merges.txt`, from first to last merged; ValueError names a line that is no pair."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        line = line.rstrip("\r")
        if line and not (number == 0 and line.startswith("#version")):
            left, space, right = line.partition(" ")
            if not space or " " in right:
                raise ValueError(f"{path}: expected two tokens and a space on a line, found {line!r}")
            yield left, right
