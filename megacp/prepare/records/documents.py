"""A parsed record as token ids with their weights, branches and images: what a packer packs and a prompt asks.

A token that means an image comes from an image alone; text that spells one is refused. A document begins with the token
that the tokenizer begins a text with, so a prompt that a server tokenizes is one of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megacp.core.data.geometry import ImageLayout
from megacp.core.data.tables import token_dtype
from megacp.prepare.records.chat_template import ChatTemplate
from megacp.prepare.records.record import Rendered, SamplePart
from megacp.prepare.tokenize.tokenizer import Tokenizer

NO_TOKEN = "the tokenizer makes no token of a text of this record"


@dataclass(frozen=True, eq=False)
class Placed:
    """The tokens of one unit, an image or a frame, in the place of the record where they stand."""

    layout: ImageLayout
    item: int
    """Index into the items of the record."""
    frame: int
    """Number among the taken frames of its video; -1 for an image."""


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
    """A record in tokens: its prefix, then its branches."""

    tokens: np.ndarray
    """[n], of the type that stores the vocabulary."""
    weights: np.ndarray | None
    """float32 [n]; None = all ones."""
    branch_starts: tuple[int, ...]
    units: tuple[SegmentUnit, ...]
    """Its images and frames."""
    problem: str | None
    """Why it cannot be learned."""

    @property
    def num_crops(self) -> int:
        """Crops of all its images and frames."""
        return sum([unit.num_crops for unit in self.units])


class Stretch(NamedTuple):
    """Ids of one weight: a text's, the end of document, or a unit's."""

    ids: np.ndarray
    weight: float
    placed: Placed | None = None


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
        self._eod = np.array([tokenizer.eos_id], dtype=np.int32) if append_eod else None
        self._first = None if tokenizer.begins_with is None else np.array([tokenizer.begins_with], dtype=np.int32)

    def encode(self, records: Sequence[Sequence[Sequence[Part]]]) -> Iterator[Document]:
        """The document of each record, which is a prefix and branches, in order."""
        parts = [part for record in records for text in record for part in text if type(part) is SamplePart]
        encoded = iter(self._tokenizer.encode([part.text for part in parts if part.text is not None]))
        for record in records:
            if self._template is not None and isinstance(record[0][0], Rendered):
                yield self._document(*_conversation(record, self._template))
                continue
            stretches: list[list[Stretch]] = []
            for text in record:
                stretches.append([])
                for part in text:
                    if isinstance(part, Placed):
                        stretches[-1].append(Stretch(part.layout.tokens, 0.0, part))
                    elif part.text is not None:
                        stretches[-1].append(Stretch(next(encoded), part.weight))
                    elif self._eod is not None:
                        stretches[-1].append(Stretch(self._eod, part.weight))
            head = next((stretch for stretch in stretches[0] if len(stretch.ids)), None)
            if self._first is not None and head is not None and head.ids[0] != self._first[0]:
                stretches[0].insert(0, Stretch(self._first, head.weight))
            yield self._document(stretches, None)

    def _document(self, parts: list[list[Stretch]], problem: str | None) -> Document:
        """`parts` in a row; a branch that begins with learned text is made predictable."""
        lengths = [sum([len(stretch.ids) for stretch in part]) for part in parts]
        if len(parts) > 1 and 0 not in lengths and any(_begins_learned(branch) for branch in parts[1:]):
            if lengths[0] == 1:
                problem = (
                    "the record's branches begin with learned text after a prefix of a single token, and nothing "
                    "could predict it: let more stand before it"
                )
            else:
                parts = _predictable(parts)
                lengths = [lengths[0] - 1, *(length + 1 for length in lengths[1:])]
        if 0 in lengths:
            problem = problem or NO_TOKEN
        stretches = [stretch for part in parts for stretch in part]
        units, start = [], 0
        for ids, _, placed in stretches:
            if placed is not None:
                sizes = len(ids), placed.layout.num_crops, len(placed.layout.pooling)
                units.append(SegmentUnit(placed.item, start, *sizes, placed.frame))
            elif self._special and (bad := np.isin(ids, self._special_ids)).any():
                problem = f"a text of this record spells the special token {self._special[int(ids[bad][0])]}"
            start += len(ids)
        dtype = token_dtype(self.num_token_ids)
        ids_of_all = [stretch.ids for stretch in stretches] or [np.empty(0, dtype)]
        tokens = np.concatenate(ids_of_all, dtype=dtype, casting="unsafe")
        weights = None
        if any([stretch.weight != 1.0 for stretch in stretches]):
            each = np.array([stretch.weight for stretch in stretches], dtype=np.float32)
            weights = np.repeat(each, [len(stretch.ids) for stretch in stretches])
        starts = tuple(np.cumsum(lengths)[:-1].tolist()) if len(lengths) > 1 else ()
        return Document(tokens, weights, starts, tuple(units), problem)


def _conversation(record: Sequence[Sequence[Part]], template: ChatTemplate) -> tuple[list[list[Stretch]], str | None]:
    """A record that a chat template wrote: one text, or one and several that begin with it; and what is wrong."""
    prefix = np.empty(0, np.int32)
    parts: list[list[Stretch]] = []
    for number, (rendered, *placed) in enumerate(record):
        assert isinstance(rendered, Rendered) and rendered.text, "a template writes all of a record"
        ids, places = template.encode(rendered.text)
        if not np.array_equal(ids[: len(prefix)], prefix):
            what = f"branches[{number - 1}]: the tokens of the shared messages are others once it follows them"
            return parts, f"{what}; make a record of each branch"
        weights = np.zeros(len(ids))
        for start, stop, weight in rendered.learned:
            # a token with one character of what is learned is learned, as in the library
            first, last = np.searchsorted(places[:, 1], start, "right"), np.searchsorted(places[:, 0], stop)
            if first == last:
                return parts, f"the tokenizer makes no token of {rendered.text[start:stop]!r:.80}"
            weights[first:last] = weight
        images: dict[int, tuple[int, Placed]] = {}
        for (start, stop), unit in zip(rendered.places, placed, strict=True):
            first, last = np.searchsorted(places[:, 0], start), np.searchsorted(places[:, 1], stop, "right")
            whole = first < last and (places[first, 0], places[last - 1, 1]) == (start, stop)
            if not (whole and isinstance(unit, Placed)):
                return parts, "the place of an image in the chat template is no whole token"
            images[int(first)] = int(last), unit
        parts.append(_cut(ids, weights, images, len(prefix)))
        prefix = prefix if number else ids
    if len(parts) > 1 and parts[0][-1].placed is not None and any(_begins_learned(branch) for branch in parts[1:]):
        return parts[:1], "branches begin with learned text right after an image: let a text stand between"
    return parts, None


def _cut(ids: np.ndarray, weights: np.ndarray, images: dict[int, tuple[int, Placed]], begin: int) -> list[Stretch]:
    """Tokens [n] from `begin` on in stretches of one weight; `images` stand for tokens from each first to its last."""
    stretches, start = [], begin
    while start < len(ids):
        if start in images:
            start, unit = images[start]
            stretches.append(Stretch(unit.layout.tokens, 0.0, unit))
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
    moves to the beginning of every branch. It is learned once, as before.
    """
    prefix, *branches = parts
    *before, end = prefix
    while not len(end.ids):  # texts of no token
        end = before.pop()
    last = end.ids[-1:]
    moved = [[Stretch(last, end.weight if i == 0 else 0.0), *branch] for i, branch in enumerate(branches)]
    return [[*before, end._replace(ids=end.ids[:-1])], *moved]
