"""A parsed record as token ids with their weights, branches and images: what a packer packs and a
prompt asks.

A token that means an image comes from an image alone; text that spells one is refused. A document
begins with the token that the tokenizer begins a text with, so a prompt that a server tokenizes is
one of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megacp.prepare.records.chat_template import ChatTemplate, Template, loaded
from megacp.prepare.records.record import Rendered, SamplePart
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.training.data.collate import parents
from megacp.training.data.tables import token_dtype
from megacp.training.data.vision.rules import ImageLayout

NO_TOKEN = "the tokenizer makes no token of a text of this record"


@dataclass(frozen=True, eq=False)
class Placed:
    """The tokens of one unit, an image or a frame, in the place of the record where they stand."""

    layout: ImageLayout
    item: int
    """Index into the items of the record."""
    frame: int
    """Number among the taken frames of its video; -1 for an image."""


RecordPart = SamplePart | Placed


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
    grid: tuple[int, int] | None = None
    """Rows and columns of its pooled tokens, where its family states them."""


def learned_tokens(
    tokens: np.ndarray,
    weights: np.ndarray | None,
    starts: Iterable[int] = (),
    leaves: Iterable[int] = (),
) -> int:
    """How many tokens of a document have a loss weight and a token before them that predicts them.

    tokens: [n]; weights: [n] or None = all ones; starts, leaves: of its branches. Where all
    branches of a part begin with the same token, its end predicts that.
    """
    first = np.array([0, *starts])
    if weights is None and len(first) == 1:
        return len(tokens) - 1
    counted = np.ones(len(tokens), bool) if weights is None else weights > 0
    total = int(counted.sum() - counted[first].sum())
    begins: dict[int, list[int]] = {}  # of each part with branches, where these begin
    for start, parent in zip(
        first[1:], parents(first, np.array([len(tokens), *leaves]))[1:].tolist(), strict=True
    ):
        begins.setdefault(parent, []).append(start)
    return total + sum(
        [int(counted[of[0]]) for of in begins.values() if len({*tokens[of].tolist()}) == 1]
    )


class Document(NamedTuple):
    """A record in tokens: its prefix, then its branches, depth first."""

    tokens: np.ndarray
    """[n], of the type that stores the vocabulary."""
    weights: np.ndarray | None
    """float32 [n]; None = all ones."""
    branch_starts: tuple[int, ...]
    branch_leaves: tuple[int, ...]
    """Where the last branch of each branch ends, or itself."""
    units: tuple[SegmentUnit, ...]
    """Images and frames of the record."""
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
        template: Template | None = None,
    ) -> None:
        """`token_ids`: of the special image tokens; empty in a text build. `template`: what wrote
        the messages.
        """
        self._tokenizer, self._template = tokenizer, template
        self._special = {i: name for name, i in token_ids.items()}
        self._special_ids = np.array(sorted(self._special))
        self.num_token_ids = max([tokenizer.vocab_size, *(i + 1 for i in self._special)])
        self._eod = np.array([tokenizer.eos_id], dtype=np.int32) if append_eod else None
        self._first = (
            None
            if tokenizer.begins_with is None
            else np.array([tokenizer.begins_with], dtype=np.int32)
        )

    def encode(
        self,
        records: Sequence[Sequence[Sequence[RecordPart]]],
        parents: Sequence[Sequence[int]] = (),
    ) -> Iterator[Document]:
        """The document of each record, which is a prefix and branches, in order; `parents`: those
        of the samples.
        """
        parts = [
            part
            for record in records
            for text in record
            for part in text
            if type(part) is SamplePart
        ]
        encoded = iter(
            self._tokenizer.encode([part.text for part in parts if part.text is not None])
        )
        for record, above in zip(records, parents or [()] * len(records), strict=True):
            if -1 in above:
                yield self._document(
                    *_prefix_tree([self._stretches([whole], (), encoded) for whole in record])
                )
            else:
                above = above or (0,) * (len(record) - 1)
                made, problem = self._stretches(record, above, encoded)
                yield self._document(made, above, problem)

    def _stretches(
        self,
        record: Sequence[Sequence[RecordPart]],
        above: Sequence[int],
        encoded: Iterator[np.ndarray],
    ) -> tuple[list[list[Stretch]], str | None]:
        """The tokens of a prefix and branches, and what is wrong with them; `encoded`: of the texts
        that come.
        """
        if self._template is not None and isinstance(record[0][0], Rendered):
            return _conversation(record, above, loaded(self._template))
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
        return stretches, None

    def _document(
        self, parts: list[list[Stretch]], above: Sequence[int], problem: str | None
    ) -> Document:
        """`parts` in a row, each behind that of number `above`; a branch that begins learned is
        made predictable.
        """
        parts = [[stretch for stretch in part if len(stretch.ids)] for part in parts]
        if problem is None and not all(parts):
            problem = NO_TOKEN
        if problem is None and len(parts) > 1:
            parts, above, problem = _predictable(parts, above)
        stretches = [stretch for part in parts for stretch in part]
        units, start = [], 0
        for ids, _, placed in stretches:
            if placed is not None:
                sizes = len(ids), placed.layout.num_crops, len(placed.layout.pooling)
                units.append(
                    SegmentUnit(placed.item, start, *sizes, placed.frame, placed.layout.grid)
                )
            elif self._special and (bad := np.isin(ids, self._special_ids)).any():
                problem = (
                    "a text of this record spells the special token "
                    f"{self._special[int(ids[bad][0])]}"
                )
            start += len(ids)
        dtype = token_dtype(self.num_token_ids)
        ids_of_all = [stretch.ids for stretch in stretches] or [np.empty(0, dtype)]
        tokens = np.concatenate(ids_of_all, dtype=dtype, casting="unsafe")
        weights = None
        if any([stretch.weight != 1.0 for stretch in stretches]):
            each = np.array([stretch.weight for stretch in stretches], dtype=np.float32)
            weights = np.repeat(each, [len(stretch.ids) for stretch in stretches])
        if problem is not None or len(parts) < 2:
            return Document(tokens, weights, (), (), tuple(units), problem)
        leaves = np.cumsum([sum([len(stretch.ids) for stretch in part]) for part in parts]).tolist()
        starts = tuple(leaves[:-1])
        for number in range(len(parts) - 1, 0, -1):
            leaves[above[number - 1]] = max(leaves[above[number - 1]], leaves[number])
        return Document(tokens, weights, starts, tuple(leaves[1:]), tuple(units), problem)


def _conversation(
    record: Sequence[Sequence[RecordPart]], above: Sequence[int], template: ChatTemplate
) -> tuple[list[list[Stretch]], str | None]:
    """A record that a chat template wrote: texts of which each begins with that of number `above`;
    what is wrong.
    """
    texts: list[np.ndarray] = []
    parts: list[list[Stretch]] = []
    for number, (rendered, *placed) in enumerate(record):
        assert isinstance(rendered, Rendered) and rendered.text, "a template writes all of a record"
        ids, places = template.encode(rendered.text)
        prefix = texts[above[number - 1]] if number else ids[:0]
        if not np.array_equal(ids[: len(prefix)], prefix):
            what = (
                f"branch {number}: the tokens of the shared messages are others once it follows "
                "them"
            )
            return parts, f"{what}; make a record of each branch"
        weights = np.zeros(len(ids))
        for start, stop, weight in rendered.learned:
            # a token with one character of what is learned is learned, as in the library
            first, last = (
                np.searchsorted(places[:, 1], start, "right"),
                np.searchsorted(places[:, 0], stop),
            )
            if first == last:
                return parts, f"the tokenizer makes no token of {rendered.text[start:stop]!r:.80}"
            weights[first:last] = weight
        images: dict[int, tuple[int, Placed]] = {}
        for (start, stop), unit in zip(rendered.places, placed, strict=True):
            first, last = (
                np.searchsorted(places[:, 0], start),
                np.searchsorted(places[:, 1], stop, "right"),
            )
            whole = first < last and (places[first, 0], places[last - 1, 1]) == (start, stop)
            if not (whole and isinstance(unit, Placed)):
                return parts, "the place of an image in the chat template is no whole token"
            images[int(first)] = int(last), unit
        parts.append(_cut(ids, weights, images, len(prefix)))
        texts.append(ids)
    return parts, None


def _cut(
    ids: np.ndarray, weights: np.ndarray, images: dict[int, tuple[int, Placed]], begin: int
) -> list[Stretch]:
    """Tokens [n] from `begin` on in stretches of one weight; `images` stand for tokens from each
    first to its last.
    """
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


def _prefix_tree(
    rollouts: Sequence[tuple[list[list[Stretch]], str | None]],
) -> tuple[list[list[Stretch]], list[int], str | None]:
    """Whole documents, each with what is wrong with it, as the tree of the tokens with which they
    begin alike.

    Its parts, the number of that above each but the first, and what is wrong. A part ends where
    documents differ; they go on in the order in which they came. The weights of a shared token add
    up.
    """
    if problem := next((problem for _, problem in rollouts if problem is not None), None):
        return [], [], problem
    numbers: dict[Placed, int] = {}
    ids, keys, weights = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    images: list[dict[int, tuple[int, Placed]]] = []
    for (stretches,), _ in rollouts:
        ids.append(np.concatenate([stretch.ids for stretch in stretches]))
        keys.append(ids[-1].astype(np.int64))
        weights.append(
            np.repeat(
                [stretch.weight for stretch in stretches], [len(each.ids) for each in stretches]
            )
        )
        images.append({})
        end = 0
        for of_text, _, placed in stretches:
            start, end = end, end + len(of_text)
            if placed is not None:  # an image is shared as a whole: its tokens are its number
                images[-1][start] = end, placed
                keys[-1][start:end] = -1 - numbers.setdefault(placed, len(numbers))
    if not all(map(len, keys)):
        return [], [], NO_TOKEN
    if len({int(key[0]) for key in keys}) > 1:
        return (
            [],
            [],
            "the rollouts begin with different tokens and share nothing: make a record of each",
        )
    parts, above, waiting = list[list[Stretch]](), list[int](), [([*range(len(keys))], 0, -1)]
    while waiting:
        alike, start, parent = waiting.pop()
        longest = max(alike, key=lambda rollout: len(keys[rollout]))
        stop = len(keys[longest])
        for rollout in alike:
            until = min(len(keys[rollout]), stop)
            other = np.flatnonzero(keys[rollout][start:until] != keys[longest][start:until])
            stop = start + int(other[0]) if len(other) else stop
        total, branches = np.zeros(stop), dict[int, list[int]]()
        for rollout in alike:
            total[start : len(keys[rollout])] += weights[rollout][start:stop]
            if len(keys[rollout]) > stop:
                branches.setdefault(int(keys[rollout][stop]), []).append(rollout)
        waiting += [(going, stop, len(parts)) for going in branches.values()][::-1]
        parts.append(_cut(ids[longest][:stop], total, images[longest], start))
        above.append(parent)
    return parts, above[1:], None


def _predictable(
    parts: list[list[Stretch]], above: Sequence[int]
) -> tuple[list[list[Stretch]], Sequence[int], str | None]:
    """The parts of a tree, such that some token before it predicts the first one of every branch;
    what prevents it.

    The end of a part cannot predict several tokens. Where a branch begins with learned text, the
    last token of what it continues moves to the beginning of every branch of that. It is learned
    once, as before. A part of which nothing is left makes room for its branches.
    """
    branches = list[list[int]]([] for _ in parts)
    for branch, parent in enumerate(above, start=1):
        branches[parent].append(branch)
    for number, part in enumerate(parts):
        if not any(parts[branch][0].weight > 0 for branch in branches[number]):
            continue
        *before, end = part
        if end.placed is not None or (number == 0 and not before and len(end.ids) == 1):
            what = "a single token" if end.placed is None else "an image"
            reason = (
                f"branches or rollouts go on with learned text right after {what}, which "
                "cannot predict it"
            )
            return parts, above, f"{reason}: let more text stand before it"
        part[:] = [*before, *([end._replace(ids=end.ids[:-1])] if len(end.ids) > 1 else [])]
        for branch in branches[number]:
            parts[branch].insert(
                0, Stretch(end.ids[-1:], end.weight if branch == number + 1 else 0.0)
            )
    left, new = list[int](), list[int]()
    for number, part in enumerate(parts):
        new.append(len(left) if part else new[above[number - 1]])
        left += [number] if part else []
    return [parts[number] for number in left], [new[above[number - 1]] for number in left[1:]], None
