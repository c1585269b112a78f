"""A parsed record as token ids with their weights, branches and images: what a packer packs and a prompt asks.

All texts of a chunk of records are tokenized in one call. A token that means an image comes from an image alone; text
that spells one is refused. A document begins with the token that the tokenizer begins a text with, so a prompt that a
server tokenizes is one of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megacp.core.data.geometry import ImageLayout
from megacp.core.data.tables import token_dtype
from megacp.prepare.records.chat_template import ChatTemplate
from megacp.prepare.records.parts import Rendered, SamplePart
from megacp.prepare.tokenize.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Placed:
    """The tokens of one unit, an image or a frame, in the place of the record where they stand."""

    layout: ImageLayout
    item: int
    """Index into the items of the record."""
    frame: int
    """Number among the taken frames of its video; -1 for an image."""

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n]."""
        return self.layout.tokens


Part = SamplePart | Placed


@dataclass(frozen=True)
class SegmentUnit:
    """A unit, an image or a video frame, among the tokens of a segment."""

    item: int
    """Index into Segment.items."""
    start: int
    """First of its tokens, within the segment."""
    num_tokens: int
    num_crops: int
    num_pooled: int
    frame: int = -1
    """Number among the taken frames of its item; -1 for an image."""


class Origin(NamedTuple):
    """Where a document comes from, and what multiplies its loss weights."""

    source: int
    """Index into the manifest's sources."""
    offset: int
    weight: float
    items: tuple[tuple[int, int], ...]
    """Offset and size of each of its images and videos in the build's spool."""


def learned_tokens(tokens: np.ndarray, weights: np.ndarray | None, branch_starts: Sequence[int]) -> int:
    """How many tokens of a document have a loss weight and a token before them that predicts them.

    tokens: [n]; weights: [n] or None = all ones. Where all branches begin with the same token, the prefix predicts it.
    """
    if weights is None and not branch_starts:
        return len(tokens) - 1
    counted = np.ones(len(tokens), bool) if weights is None else weights > 0
    first = np.array([0, *branch_starts])
    total = int(counted.sum() - counted[first].sum())
    if branch_starts and (tokens[first[1:]] == tokens[first[1]]).all():
        total += int(counted[first[1]])
    return total


class Document(NamedTuple):
    """A record in tokens."""

    origin: Origin
    tokens: np.ndarray
    weights: np.ndarray | None
    """float32 [n]; None = all ones."""
    branch_starts: tuple[int, ...]
    units: tuple[SegmentUnit, ...]

    def teaches(self, longest: int) -> bool:
        """Whether something of its first `longest` tokens is learned."""
        weights = None if self.weights is None else self.weights[:longest]
        return learned_tokens(self.tokens[:longest], weights, self.branch_starts) > 0

    @property
    def num_crops(self) -> int:
        """Crops of all its images and frames."""
        return sum(unit.num_crops for unit in self.units)


class DocumentMaker:
    """Turns parts of records into documents."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        append_eod: bool,
        token_ids: dict[str, int],
        template: ChatTemplate | None = None,
    ) -> None:
        """`token_ids`: of the special image tokens; empty in a text build. `template`: what wrote the messages."""
        self._tokenizer, self._template = tokenizer, template
        self._special = {i: name for name, i in token_ids.items()}
        self._special_ids = np.array(sorted(self._special))
        self.num_token_ids = max([tokenizer.vocab_size, *(i + 1 for i in self._special)])
        self._eod = None
        if append_eod:
            assert tokenizer.eos_id is not None, "checked before any worker starts"
            self._eod = np.array([tokenizer.eos_id], dtype=np.int32)
        self._first = None if tokenizer.begins_with is None else np.array([tokenizer.begins_with], dtype=np.int32)

    def encode(self, records: Sequence[Sequence[Sequence[Part]]]) -> Iterator[Encoded]:
        """The ids of each record's prefix and branches, in order."""
        pieces = [
            part
            for record in records
            for parts in record
            for part in parts
            if isinstance(part, SamplePart) and not isinstance(part, Rendered)
        ]
        encoded = iter(self._tokenizer.encode([piece.text for piece in pieces if piece.text is not None]))
        for record in records:
            if self._template is not None and isinstance(record[0][0], Rendered):
                yield _conversation(record, self._template)
            else:
                yield Encoded(self._begun([self._stretches(parts, encoded) for parts in record]))

    def _begun(self, parts: list[list[Stretch]]) -> list[list[Stretch]]:
        """A record's prefix and branches after the token that begins every document, if its text does not have it."""
        prefix, *branches = parts
        head = next((stretch for stretch in prefix if len(stretch.ids)), None)
        if self._first is None or head is None or head.ids[0] == self._first[0]:
            return parts
        return [[Stretch(self._first, head.weight), *prefix], *branches]

    def _stretches(self, parts: Sequence[Part], encoded: Iterator[np.ndarray]) -> list[Stretch]:
        result = []
        for part in parts:
            if isinstance(part, Placed):
                result.append(Stretch(part.tokens, 0.0, part))
            elif part.text is not None:
                result.append(Stretch(next(encoded), part.weight))
            elif self._eod is not None:
                result.append(Stretch(self._eod, part.weight))
        return result

    def spelled_special_token(self, encoded: Encoded) -> str | None:
        """The name of an image token that a text of the record spells, or None."""
        if not self._special:
            return None
        for stretch in encoded.stretches:
            if stretch.placed is None and (bad := np.isin(stretch.ids, self._special_ids)).any():
                return self._special[int(stretch.ids[bad][0])]
        return None

    def document(self, encoded: Encoded, origin: Origin) -> Document:
        """The document of an encoded record."""
        stretches, weight = encoded.stretches, origin.weight
        weights = None
        if weight != 1.0 or any([stretch.weight != 1.0 for stretch in stretches]):
            each = np.array([stretch.weight * weight for stretch in stretches], dtype=np.float32)
            weights = np.repeat(each, [len(stretch.ids) for stretch in stretches])
        tokens = np.concatenate(
            [stretch.ids for stretch in stretches], dtype=token_dtype(self.num_token_ids), casting="unsafe"
        )
        lengths = encoded.lengths
        starts = tuple(np.cumsum(lengths)[:-1].tolist()) if len(lengths) > 1 else ()
        return Document(origin, tokens, weights, starts, encoded.units())


class Stretch(NamedTuple):
    """Ids of one weight: a text's, the end of document, or a unit's."""

    ids: np.ndarray
    weight: float
    placed: Placed | None = None


def _lengths(parts: list[list[Stretch]]) -> list[int]:
    return [sum([len(stretch.ids) for stretch in part]) for part in parts]


def _conversation(record: Sequence[Sequence[Part]], template: ChatTemplate) -> Encoded:
    """A record that a chat template wrote: one text, or one and several that begin with it."""
    prefix = np.empty(0, np.int32)
    parts: list[list[Stretch]] = []
    for number, (rendered, *placed) in enumerate(record):
        assert isinstance(rendered, Rendered) and rendered.text, "a template writes all of a record"
        ids, places = template.encode(rendered.text)
        if not np.array_equal(ids[: len(prefix)], prefix):
            what = f"branches[{number - 1}]: the tokens of the shared messages are others once it follows them"
            return Encoded(parts, f"{what}; make a record of each branch")
        weights = np.zeros(len(ids))
        for start, stop, weight in rendered.learned:
            # a token with one character of what is learned is learned, as in the library
            first, last = np.searchsorted(places[:, 1], start, "right"), np.searchsorted(places[:, 0], stop)
            if first == last:
                return Encoded(parts, f"the tokenizer makes no token of {rendered.text[start:stop]!r:.80}")
            weights[first:last] = weight
        images: dict[int, tuple[int, Placed]] = {}
        for (start, stop), unit in zip(rendered.places, placed, strict=True):
            first, last = np.searchsorted(places[:, 0], start), np.searchsorted(places[:, 1], stop, "right")
            whole = first < last and (places[first, 0], places[last - 1, 1]) == (start, stop)
            if not (whole and isinstance(unit, Placed)):
                return Encoded(parts, "the place of an image in the chat template is no whole token")
            images[int(first)] = int(last), unit
        parts.append(_cut(ids, weights, images, len(prefix)))
        prefix = prefix if number else ids
    if len(parts) > 1 and parts[0][-1].placed is not None and any(_begins_learned(branch) for branch in parts[1:]):
        return Encoded(parts[:1], "branches begin with learned text right after an image: let a text stand between")
    return Encoded(parts)


def _cut(ids: np.ndarray, weights: np.ndarray, images: dict[int, tuple[int, Placed]], begin: int) -> list[Stretch]:
    """Tokens [n] from `begin` on in stretches of one weight; `images` stand for tokens from each first to its last."""
    stretches, start = [], begin
    while start < len(ids):
        if start in images:
            start, unit = images[start]
            stretches.append(Stretch(unit.tokens, 0.0, unit))
            continue
        stop = min([first for first in images if first > start], default=len(ids))
        other = np.flatnonzero(weights[start:stop] != weights[start])
        stop = start + int(other[0]) if len(other) else stop
        stretches.append(Stretch(ids[start:stop], float(weights[start])))
        start = stop
    return stretches


def _begins_learned(part: list[Stretch]) -> bool:
    return next((stretch.weight for stretch in part if len(stretch.ids)), 0.0) > 0


def _predictable(parts: list[list[Stretch]]) -> list[list[Stretch]]:
    """A record's prefix and branches, such that some token before it predicts the first one of every branch.

    The end of a prefix cannot predict several tokens. Where a branch begins with learned text, the prefix's last token
    moves to the beginning of every branch. Each still is the sequence that prefix and branch make, and the token is
    learned once, as before.
    """
    prefix, *branches = parts
    *before, end = prefix
    while not len(end.ids):  # texts of no token
        end = before.pop()
    last = end.ids[-1:]
    moved = [[Stretch(last, end.weight if i == 0 else 0.0), *branch] for i, branch in enumerate(branches)]
    return [[*before, end._replace(ids=end.ids[:-1])], *moved]


class Encoded:
    """A record's prefix and branches as stretches; made once for every record, so it counts once."""

    __slots__ = ("is_guesswork", "lengths", "num_crops", "problem", "stretches")

    def __init__(self, parts: list[list[Stretch]], problem: str | None = None) -> None:
        self.problem = problem
        """Why a conversation cannot be cut into tokens as its template cuts it into texts."""
        self.lengths = _lengths(parts)
        """Tokens of the prefix and of each branch."""
        self.is_guesswork = False
        """Whether a branch begins with learned text and no token can be there to predict it."""
        if len(parts) > 1 and 0 not in self.lengths and any(_begins_learned(branch) for branch in parts[1:]):
            self.is_guesswork = self.lengths[0] == 1
            parts = parts if self.is_guesswork else _predictable(parts)
            self.lengths = _lengths(parts)
        self.stretches = [stretch for part in parts for stretch in part]
        """All of them, in order."""
        self.num_crops = sum([one.placed.layout.num_crops for one in self.stretches if one.placed is not None])
        """Crops of all its images and frames."""

    def units(self) -> tuple[SegmentUnit, ...]:
        """Its images and frames."""
        if not self.num_crops:
            return ()
        units, start = [], 0
        for stretch in self.stretches:
            if stretch.placed is not None:
                placed = stretch.placed
                sizes = len(placed.tokens), placed.layout.num_crops, len(placed.layout.pooling)
                units.append(SegmentUnit(placed.item, start, *sizes, placed.frame))
            start += len(stretch.ids)
        return tuple(units)
