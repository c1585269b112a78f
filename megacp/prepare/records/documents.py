"""Encode parsed records as token ids with weights, branches and images.

The result is packed by a build and used as a prompt in generation. Image tokens come only from
images; a text that contains one is refused. A document begins with the tokenizer's first token
(BOS), so that a prompt tokenized by a server equals a prompt of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megacp.prepare.records.chat_template import ChatTemplate, Template, loaded
from megacp.prepare.records.record import Rendered, SamplePart, Tokenized
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.training.data.collate import parents
from megacp.training.data.tables import token_dtype
from megacp.training.data.vision.rules import ImageLayout

NO_TOKEN = "the tokenizer produces no token for a text of this record"


@dataclass(frozen=True, eq=False)
class Placed:
    """The tokens of one unit (an image or a frame) at its position in a record."""

    layout: ImageLayout
    item: int
    """Index into the images and videos of the record."""
    frame: int
    """Frame number among the sampled frames of its video; -1 for an image."""


RecordPart = SamplePart | Placed


@dataclass(frozen=True)
class SegmentUnit:
    """An image or a video frame within the tokens of a segment."""

    item: int
    """Index into Segment.items."""
    start: int
    """Index of its first token in the segment."""
    num_tokens: int
    num_crops: int
    num_pooled: int
    frame: int = -1
    """Frame number among the sampled frames of its item; -1 for an image."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its pooled tokens, if its family defines them."""


def learned_tokens(
    tokens: np.ndarray,
    weights: np.ndarray | None,
    starts: Iterable[int] = (),
    leaves: Iterable[int] = (),
) -> int:
    """Return the number of tokens of a document that contribute to the loss.

    Such a token has a positive weight and a preceding token that predicts it. If all branches of a
    part begin with the same token, the end of the part predicts it. tokens: [n]; weights: [n], or
    None for all ones; starts, leaves: of the branches.
    """
    first = np.array([0, *starts])
    if weights is None and len(first) == 1:
        return len(tokens) - 1
    counted = np.ones(len(tokens), bool) if weights is None else weights > 0
    total = int(counted.sum() - counted[first].sum())
    # group the branches by the part that they continue: part -> first tokens of its branches
    begins: dict[int, list[int]] = {}
    ends = np.array([len(tokens), *leaves])
    for start, parent in zip(first[1:], parents(first, ends)[1:].tolist(), strict=True):
        begins.setdefault(parent, []).append(start)
    for of in begins.values():
        if len(set(tokens[of].tolist())) == 1:
            total += int(counted[of[0]])
    return total


class Document(NamedTuple):
    """A record as tokens: its prefix, then its branches in depth-first order."""

    tokens: np.ndarray
    """[n], in the dtype that stores the vocabulary."""
    weights: np.ndarray | None
    """float32 [n], or None for all ones."""
    branch_starts: tuple[int, ...]
    """First token of each branch."""
    branch_leaves: tuple[int, ...]
    """End of the last branch below each branch, or of the branch itself."""
    units: tuple[SegmentUnit, ...]
    """Images and video frames of the record."""
    problem: str | None
    """Reason why the document cannot be used, or None."""

    @property
    def num_crops(self) -> int:
        """Total number of crops of its images and frames."""
        return sum([unit.num_crops for unit in self.units])


class Stretch(NamedTuple):
    """Consecutive ids with one weight: a text, an end-of-document token, or a unit."""

    ids: np.ndarray
    weight: float
    placed: Placed | None = None


class DocumentMaker:
    """Converts parts of records into documents."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        append_eod: bool,
        token_ids: dict[str, int],
        template: Template | None = None,
    ) -> None:
        """Prepare to encode with a tokenizer.

        `token_ids` are the special image tokens (empty in a text build); `template` is the chat
        template that rendered the messages.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._special = {i: name for name, i in token_ids.items()}
        self._special_ids = np.array(sorted(self._special))
        # image tokens may have ids above the tokenizer's vocabulary
        self.num_token_ids = max([tokenizer.vocab_size, *(i + 1 for i in self._special)])
        self._eod: np.ndarray | None = None
        if append_eod:
            self._eod = np.array([tokenizer.eos_id], dtype=np.int32)
        self._first: np.ndarray | None = None
        if tokenizer.begins_with is not None:
            self._first = np.array([tokenizer.begins_with], dtype=np.int32)

    def encode(
        self,
        records: Sequence[Sequence[Sequence[RecordPart]]],
        parents: Sequence[Sequence[int]] = (),
    ) -> Iterator[Document]:
        """Yield the document of each record, which is a prefix with branches.

        `parents` come from the samples; -1 marks rollouts, which become a prefix tree.
        """
        # Encode the texts of all records in one call, which is much faster. Conversations rendered
        # by a template (Rendered) are encoded separately, because their offsets are needed.
        texts = []
        for record in records:
            for branch in record:
                for part in branch:
                    if type(part) is SamplePart and part.text is not None:
                        texts.append(part.text)
        encoded = iter(self._tokenizer.encode(texts))
        for record, above in zip(records, parents or [()] * len(records), strict=True):
            if -1 in above:
                wholes = [self._stretches([whole], (), encoded) for whole in record]
                yield self._document(*_prefix_tree(wholes))
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
        """Return the tokens of a prefix and its branches, and a problem with them or None.

        `encoded` yields the ids of the texts that follow.
        """
        if self._template is not None and isinstance(record[0][0], Rendered):
            return _conversation(record, above, loaded(self._template))
        if isinstance(record[0][0], Tokenized):
            return self._tokenized(record[0][0])
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
        # add BOS, unless the text already begins with it
        head = next((stretch for stretch in stretches[0] if len(stretch.ids)), None)
        if self._first is not None and head is not None and head.ids[0] != self._first[0]:
            stretches[0].insert(0, Stretch(self._first, head.weight))
        return stretches, None

    def _tokenized(self, whole: Tokenized) -> tuple[list[list[Stretch]], str | None]:
        """Return the tokens of a tokenized document, and a problem with them or None.

        The first and the last token of a document are added unless it already has them.
        """
        assert whole.ids is not None, "the reader sets them"
        ids = whole.ids  # [n]
        vocab_size = self._tokenizer.vocab_size
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(outside):
            number = int(outside[0])
            return [[]], (
                f"token {number + 1} of this document has the id {ids[number]}, but the ids of "
                f"--tokenizer are 0 to {vocab_size - 1}: give the tokenizer with which the dataset "
                "was tokenized"
            )
        stretches = [Stretch(ids, whole.weight)]
        if self._first is not None and ids[0] != self._first[0]:
            stretches.insert(0, Stretch(self._first, whole.weight))
        if self._eod is not None and ids[-1] != self._eod[0]:
            stretches.append(Stretch(self._eod, whole.weight))
        return [stretches], None

    def _document(
        self, parts: list[list[Stretch]], above: Sequence[int], problem: str | None
    ) -> Document:
        """Return the document of a tree of parts.

        `above` has the number of the part that each branch continues. Branches that begin with
        learned text are made predictable first.
        """
        # an empty text has no tokens
        parts = [[stretch for stretch in part if len(stretch.ids)] for part in parts]
        if problem is None and not all(parts):
            problem = NO_TOKEN
        if problem is None and len(parts) > 1:
            parts, above, problem = _predictable(parts, above)
        stretches = list(itertools.chain.from_iterable(parts))

        # find the units, and refuse texts that contain image tokens
        units = []
        start = 0
        for ids, _, placed in stretches:
            if placed is not None:
                unit = SegmentUnit(
                    placed.item,
                    start,
                    len(ids),
                    placed.layout.num_crops,
                    len(placed.layout.pooling),
                    placed.frame,
                    placed.layout.grid,
                )
                units.append(unit)
            elif self._special and (bad := np.isin(ids, self._special_ids)).any():
                problem = (
                    "a text of this record contains the special token "
                    f"{self._special[int(ids[bad][0])]}"
                )
            start += len(ids)

        # join the parts; weights that are all 1 are not stored
        dtype = token_dtype(self.num_token_ids)
        ids_of_all = [stretch.ids for stretch in stretches] or [np.empty(0, dtype)]
        tokens = np.concatenate(ids_of_all, dtype=dtype, casting="unsafe")
        weights = None
        if any([stretch.weight != 1.0 for stretch in stretches]):
            each = np.array([stretch.weight for stretch in stretches], dtype=np.float32)
            weights = np.repeat(each, [len(stretch.ids) for stretch in stretches])
        if problem is not None or len(parts) < 2:
            return Document(tokens, weights, (), (), tuple(units), problem)
        # Parts are stored one after another: the end of each is the start of the next. A part also
        # covers the branches below it; going backwards passes each end on to the part above.
        lengths = []
        for part in parts:
            lengths.append(sum([len(stretch.ids) for stretch in part]))
        leaves = np.cumsum(lengths).tolist()
        starts = tuple(leaves[:-1])
        for number in range(len(parts) - 1, 0, -1):
            leaves[above[number - 1]] = max(leaves[above[number - 1]], leaves[number])
        return Document(tokens, weights, starts, tuple(leaves[1:]), tuple(units), problem)


def _conversation(
    record: Sequence[Sequence[RecordPart]], above: Sequence[int], template: ChatTemplate
) -> tuple[list[list[Stretch]], str | None]:
    """Encode a record rendered by a chat template; return its parts and a problem or None.

    Each text begins with the text of the part that it continues (`above`). Only the added tokens
    become a part.
    """
    texts: list[np.ndarray] = []
    parts: list[list[Stretch]] = []
    for number, (rendered, *placed) in enumerate(record):
        assert isinstance(rendered, Rendered) and rendered.text, "a template writes all of a record"
        ids, places = template.encode(rendered.text)
        prefix = texts[above[number - 1]] if number else ids[:0]
        # tokens may merge across the boundary, so an equal text may still have different tokens
        if not np.array_equal(ids[: len(prefix)], prefix):
            return parts, (
                f"branch {number}: the tokens of the shared messages change once this branch "
                "follows them; make each branch a separate record"
            )
        weights = np.zeros(len(ids))
        for start, stop, weight in rendered.learned:
            # a token is learned if any of its characters is, as in the transformers library
            first = np.searchsorted(places[:, 1], start, "right")
            last = np.searchsorted(places[:, 0], stop)
            if first == last:
                text = rendered.text[start:stop]
                return parts, f"the tokenizer produces no token for {text!r:.80}"
            weights[first:last] = weight
        images: dict[int, tuple[int, Placed]] = {}
        for (start, stop), unit in zip(rendered.places, placed, strict=True):
            # a placeholder must consist of whole tokens, which the tokens of the unit replace
            first = np.searchsorted(places[:, 0], start)
            last = np.searchsorted(places[:, 1], stop, "right")
            whole = first < last and (places[first, 0], places[last - 1, 1]) == (start, stop)
            if not (whole and isinstance(unit, Placed)):
                return (
                    parts,
                    "an image placeholder of the chat template is not made of whole tokens",
                )
            images[int(first)] = (int(last), unit)
        parts.append(_cut(ids, weights, images, len(prefix)))
        texts.append(ids)
    return parts, None


def _cut(
    ids: np.ndarray, weights: np.ndarray, images: dict[int, tuple[int, Placed]], begin: int
) -> list[Stretch]:
    """Return the tokens [n] from `begin` on as stretches of equal weight.

    `images` maps the first token of a placeholder to its end and the unit that replaces it.
    """
    stretches = []
    start = begin
    while start < len(ids):
        if start in images:
            start, unit = images[start]
            stretches.append(Stretch(unit.layout.tokens, 0.0, unit))
            continue
        # up to the next placeholder or the next change of the weight
        stop = min([first for first in images if first > start], default=len(ids))
        other = np.flatnonzero(weights[start:stop] != weights[start])
        if len(other):
            stop = start + int(other[0])
        stretches.append(Stretch(ids[start:stop], float(weights[start])))
        start = stop
    return stretches


def _prefix_tree(
    rollouts: Sequence[tuple[list[list[Stretch]], str | None]],
) -> tuple[list[list[Stretch]], list[int], str | None]:
    """Merge whole documents into a tree by their common first tokens.

    `rollouts` are the documents, each with a problem or None. Return the parts, the number of the
    part that each part except the first continues, and a problem or None. A part ends where
    documents differ; branches keep the order of the documents. The weights of a shared token add
    up.
    """
    for _, problem in rollouts:
        if problem is not None:
            return [], [], problem

    # Lay out each rollout: ids [n], weights [n], and keys [n] by which rollouts are compared. A key
    # is the token's id, or for an image a negative number. All tokens of an image have the same
    # key, so rollouts share an image as a whole or not.
    numbers: dict[Placed, int] = {}
    ids: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    images: list[dict[int, tuple[int, Placed]]] = []
    for (stretches,), _ in rollouts:
        ids.append(np.concatenate([stretch.ids for stretch in stretches]))
        keys.append(ids[-1].astype(np.int64))
        lengths = [len(stretch.ids) for stretch in stretches]
        weights.append(np.repeat([stretch.weight for stretch in stretches], lengths))
        images.append({})
        start = 0
        for of_text, _, placed in stretches:
            end = start + len(of_text)
            if placed is not None:
                images[-1][start] = (end, placed)
                keys[-1][start:end] = -1 - numbers.setdefault(placed, len(numbers))
            start = end
    if not all(map(len, keys)):
        return [], [], NO_TOKEN
    if len({int(key[0]) for key in keys}) > 1:
        problem = (
            "the rollouts begin with different tokens, so they have no common prefix; make each "
            "rollout a separate record"
        )
        return [], [], problem

    # Depth first: take rollouts that agree before `start`, find where they first differ, and put
    # the groups that continue differently on the stack.
    parts: list[list[Stretch]] = []
    above: list[int] = []
    waiting = [([*range(len(keys))], 0, -1)]  # (rollouts, first token, part above)
    while waiting:
        alike, start, parent = waiting.pop()
        longest = max(alike, key=lambda rollout: len(keys[rollout]))
        stop = len(keys[longest])
        for rollout in alike:
            until = min(len(keys[rollout]), stop)
            other = np.flatnonzero(keys[rollout][start:until] != keys[longest][start:until])
            if len(other):
                stop = start + int(other[0])
        # a rollout that ends within the part adds its weights as far as it goes
        total = np.zeros(stop)
        branches: dict[int, list[int]] = {}  # next key -> rollouts
        for rollout in alike:
            total[start : len(keys[rollout])] += weights[rollout][start:stop]
            if len(keys[rollout]) > stop:
                branches.setdefault(int(keys[rollout][stop]), []).append(rollout)
        # reversed, because the stack returns the last entry first
        for group in reversed(branches.values()):
            waiting.append((group, stop, len(parts)))
        parts.append(_cut(ids[longest][:stop], total, images[longest], start))
        above.append(parent)
    return parts, above[1:], None


def _predictable(
    parts: list[list[Stretch]], above: Sequence[int]
) -> tuple[list[list[Stretch]], Sequence[int], str | None]:
    """Move tokens so that every branch of a tree has a token that predicts its first token.

    Return the parts, their numbers above, and a problem or None. The last token of a part cannot
    predict several different tokens. If a branch begins with learned text, the last token of the
    part that it continues moves to the beginning of all of that part's branches. Only the first
    branch keeps the token's weight, so it is learned once, as before. A part that becomes empty is
    replaced by its branches.
    """
    branches: list[list[int]] = [[] for _ in parts]
    for branch, parent in enumerate(above, start=1):
        branches[parent].append(branch)
    for number, part in enumerate(parts):
        if not any(parts[branch][0].weight > 0 for branch in branches[number]):
            continue
        *before, end = part
        # an image cannot be cut, and the document must keep at least its first token
        if end.placed is not None or (number == 0 and not before and len(end.ids) == 1):
            what = "a single token" if end.placed is None else "an image"
            problem = (
                f"branches or rollouts continue with learned text right after {what}, which cannot "
                "predict it; put more text before them"
            )
            return parts, above, problem
        part[:] = before
        if len(end.ids) > 1:
            part.append(end._replace(ids=end.ids[:-1]))
        # the first branch directly follows its part, so its number is the next one
        for branch in branches[number]:
            weight = end.weight if branch == number + 1 else 0.0
            parts[branch].insert(0, Stretch(end.ids[-1:], weight))

    # drop empty parts; `new` has the new number of each part, or of the part above an empty one
    left: list[int] = []
    new: list[int] = []
    for number, part in enumerate(parts):
        new.append(len(left) if part else new[above[number - 1]])
        if part:
            left.append(number)
    new_above = [new[above[number - 1]] for number in left[1:]]
    return [parts[number] for number in left], new_above, None
