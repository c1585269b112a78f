"""A SentencePiece model file, and the fast tokenizer (`tokenizer.json`) that gives the same ids.

Each setting of the model becomes one part of the fast tokenizer, or is refused by its name. What settings do not tell
(ties, how a character map treats clusters) is left to a comparison of both on texts (`tokenizer.py`). The file is read
by hand, since versions of protobuf's generated classes conflict and a dozen fields of three messages are needed.

One difference is known that not every text shows. A character map (nfkc and its kin) may join a letter of two combining
marks with the first. The tokenizers package then drops the second.
"""

from __future__ import annotations

import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_MODEL_NAMES = {UNIGRAM: "Unigram", BPE: "BPE", 3: "Word", 4: "Char"}


def wire(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: int, bytes, or the 4 or 8 bytes of a fixed one. ValueError."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    try:
        while place < len(data):
            key = varint()
            number, kind = key >> 3, key & 7
            if kind == 0:
                yield number, varint()
                continue
            if kind not in (1, 2, 5):
                raise ValueError(f"not a SentencePiece model: wire type {kind}")
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            if place + size > len(data):
                raise IndexError
            place += size
            yield number, data[place - size : place]
    except IndexError as error:
        raise ValueError("not a SentencePiece model: it ends inside a field") from error


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Model:
    """The parts of a .model file that decide how text becomes ids."""

    pieces: tuple[Piece, ...]
    kind: int
    byte_fallback: bool
    charsmap: bytes
    dummy_prefix: bool
    squeeze: bool
    """remove_extra_whitespaces"""
    unk: int
    bos: int
    eos: int
    pad: int

    def of_kind(self, kind: int) -> list[str]:
        """Texts of the pieces of one kind."""
        return [piece.text for piece in self.pieces if piece.kind == kind]


def _signed(value: int) -> int:
    """int32 of a varint: protobuf writes -1 as a 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _piece(data: bytes) -> Piece:
    fields = dict(wire(data))
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    return Piece(fields.get(1, b"").decode(), score, fields.get(3, NORMAL))


def parse(data: bytes) -> Model:
    """Read a .model file. ValueError names a setting that a fast tokenizer cannot express."""
    message: dict[int, list[Any]] = defaultdict(list)
    for number, value in wire(data):
        message[number].append(value)
    if not message[1] or not message[2]:
        raise ValueError("not a SentencePiece model: it has no pieces or no trainer_spec")
    trainer, normalizer = (dict(wire(b"".join(message[number]))) for number in (2, 3))
    kind = trainer.get(3, UNIGRAM)
    reasons = []
    if kind not in (UNIGRAM, BPE):
        reasons.append(f"model_type is {_MODEL_NAMES.get(kind, kind)}, expressible are Unigram and BPE")
    if trainer.get(24, 0):
        reasons.append("treat_whitespace_as_suffix is true")
    if not normalizer.get(5, 1):
        reasons.append("escape_whitespaces is false")
    pieces = tuple(_piece(entry) for entry in message[1])
    if any(piece.kind == UNUSED for piece in pieces):
        reasons.append("some pieces are of type UNUSED")
    if reasons:
        raise ValueError("a fast tokenizer cannot express this SentencePiece model: " + "; ".join(reasons))
    ids = [_signed(trainer.get(field, default)) for field, default in ((40, 0), (41, 1), (42, 2), (43, -1))]
    return Model(
        pieces,
        kind,
        bool(trainer.get(35, 0)),
        normalizer.get(2, b""),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
        *(i if 0 <= i < len(pieces) else -1 for i in ids),
    )


def merges(model: Model) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece, the best score first, as SentencePiece looks them up.

    Pairs of one piece are ordered by the ids of their parts.
    """
    ids = {piece.text: i for i, piece in enumerate(model.pieces) if piece.kind == NORMAL}
    found: list[tuple[float, int, int, int, str, str]] = []
    for text, i in ids.items():
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                found.append((-model.pieces[i].score, i, left, right, text[:cut], text[cut:]))
    return [(left, right) for *_, left, right in sorted(found)]


def _bpe(model: Model, symbols: bool) -> Any:
    from tokenizers import models

    vocabulary = {piece.text: i for i, piece in enumerate(model.pieces)}
    options = {"unk_token": model.pieces[model.unk].text, "fuse_unk": True, "byte_fallback": model.byte_fallback}
    made = models.BPE(vocab=vocabulary, merges=merges(model), **options)
    if symbols:  # a symbol alone in a piece of text is found by its whole text, and so would be any other piece
        for piece in model.pieces:
            if piece.kind == NORMAL and len(piece.text) > 1 and len(made.tokenize(piece.text)) != 1:
                raise ValueError(
                    "a fast tokenizer cannot express this SentencePiece model: it has user-defined symbols, and its "
                    f"piece {piece.text!r} is no result of its merges"
                )
        made = models.BPE(vocab=vocabulary, merges=merges(model), ignore_merges=True, **options)
    return made


def _unigram(model: Model) -> Any:
    from tokenizers import models

    least = min(piece.score for piece in model.pieces if piece.kind == NORMAL)

    def score(piece: Piece) -> float:
        if piece.kind == NORMAL:
            return piece.score
        if piece.kind == USER_DEFINED:
            return 0.0  # alone in its piece of text, where it beats any way of cutting it
        return least * len(piece.text) - 1.0  # never better than the characters of its name, should a text spell them

    vocabulary = [(piece.text, score(piece)) for piece in model.pieces]
    return models.Unigram(vocabulary, unk_id=model.unk, byte_fallback=model.byte_fallback)


def are_tied(model: Model, first: list[int], second: list[int]) -> bool:
    """Whether two ways of cutting a text have the same score to a Unigram model, as far as float32 can tell.

    It adds one score after the other: n additions round by at most 2^-24 of the sum each.
    """
    if model.kind != UNIGRAM:
        return False
    others = [sorted(i for i in ids if model.pieces[i].kind != NORMAL) for ids in (first, second)]
    sums = [math.fsum(model.pieces[i].score for i in ids if model.pieces[i].kind == NORMAL) for ids in (first, second)]
    rounding = 2.0**-24 * max(len(first), len(second)) * max(map(abs, sums))
    return others[0] == others[1] and abs(sums[0] - sums[1]) <= rounding


def fast_tokenizer(model: Model) -> Any:
    """A `tokenizers.Tokenizer` with the ids of the model for any text that spells none of its control symbols.

    Control symbols are special tokens of it: they are found in a text, as the transformers library expects, where
    SentencePiece sees plain characters. ValueError names what cannot be expressed.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    if model.unk < 0 and not model.byte_fallback:
        raise ValueError("a fast tokenizer cannot express this SentencePiece model: it has no unknown piece")
    symbols = model.of_kind(USER_DEFINED)
    tokenizer = Tokenizer(_bpe(model, bool(symbols)) if model.kind == BPE else _unigram(model))
    steps: list[Any] = []
    if model.charsmap:
        table = normalizers.Precompiled(model.charsmap)
        both = "".join(table.normalize_str(end) for end in "\r\n")  # as one cluster it would be looked up as one
        steps = [normalizers.Replace("\r\n", both), table] if both != "\r\n" else [table]
    if model.squeeze:
        ends = Regex(rf"\A +|[ {SPACE}]+\z")
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(ends, "")]
    for symbol in symbols:
        seen = normalizers.Sequence(steps).normalize_str(symbol) if steps else symbol
        if seen != symbol or " " in symbol:
            raise ValueError(
                f"a fast tokenizer cannot express this SentencePiece model: its user-defined symbol {symbol!r} is "
                "changed by its normalizer"
            )
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if symbols:
        longest = "|".join(re.escape(symbol) for symbol in sorted(symbols, key=lambda s: (-len(s), s)))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest), "isolated")
    shown: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.dummy_prefix:
        shown.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(shown)
    controls = [AddedToken(text, special=True, normalized=False) for text in model.of_kind(CONTROL)]
    tokenizer.add_special_tokens(controls)
    return tokenizer
